"""Weights moved by the smallest possible amount, to see how much of a result is rounding.

Other threads, another device or another library round differently. Fine-tuning at the papers' learning rates amplifies
such differences; moving every weight by one unit in the last place shows by how much (experiment=stability).
"""

import torch
from torch import Tensor, nn


@torch.no_grad()
def perturb(model: nn.Module, draw: int) -> None:
    """Move every weight that is not zero one unit in the last place up or down, at random from `draw`; 0: not at all.

    Weights that two modules share are moved once.
    """
    if draw:
        generator = torch.Generator().manual_seed(draw)
        for parameter in model.parameters():
            parameter.copy_(moved(parameter, generator))


def moved(weights: Tensor, generator: torch.Generator) -> Tensor:
    """The neighbours of the weights; zeros stay."""
    up = torch.randint(0, 2, weights.shape, generator=generator, dtype=torch.bool).to(weights.device)
    towards = torch.where(up, torch.inf, -torch.inf).to(weights.dtype)
    return torch.where(weights == 0, weights, torch.nextafter(weights, towards))
