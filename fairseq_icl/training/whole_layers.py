"""Gradient norms of whole layers (`gradient_norms=all`): of everything in a layer, whether it learns or not.

This is what the second paper's heat maps show: the norm over all parameters of a layer, of the gradient summed over
tokens. Frozen weights take part in the graph while a batch is trained on, and lose their gradient as soon as its norm
is known, so the price is one weight's gradient in memory and about the time of one more forward pass.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer
from torch import Tensor, nn

from fairseq_icl.compat import loss_scale
from fairseq_icl.errors import UserError


class WholeLayers:
    """Watches the batches of one training."""

    def __init__(self, decoder: Any) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UserError("gradient_norms=all: frozen weights' gradients are not summed over processes; train in one")
        self._layers = list(decoder.layers)
        self.squares = [0.0] * len(self._layers)

    @contextmanager
    def watching(self, optimizer: FairseqOptimizer, *, first: bool) -> Iterator[None]:
        """Around forward and backward of the one batch of an update; `first`: none came before it."""
        if not first:
            raise UserError("gradient_norms=all: sees one batch an update; leave --update-freq at 1")
        scale = loss_scale(optimizer)
        self.squares = squares = [0.0] * len(self._layers)
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                for parameter in layer.parameters():
                    stack.enter_context(_watched(parameter, squares, number, scale))
            yield

    @property
    def norms(self) -> list[float]:
        """One a layer, of the batch that was seen last."""
        return [math.sqrt(square) for square in self.squares]


@contextmanager
def _watched(parameter: nn.Parameter, squares: list[float], layer: int, scale: float) -> Iterator[None]:
    """Add the squared norm of the parameter's gradient to its layer's; a frozen one is left without a gradient."""
    frozen = not parameter.requires_grad

    def add(seen: Tensor) -> None:
        assert seen.grad is not None
        squares[layer] += (float(seen.grad.float().norm()) / scale) ** 2
        if frozen:
            seen.grad = None

    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(add)
    try:
        yield
    finally:
        handle.remove()
        parameter.requires_grad_(not frozen)
