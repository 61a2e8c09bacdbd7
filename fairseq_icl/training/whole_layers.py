"""Gradient norms of whole layers (`gradient_norms=all`): of everything in a layer, whether it learns or not.

This is what the second paper's heat maps show: the norm over all parameters of a layer, of the gradient summed over
tokens. The gradient of a frozen matrix need not be formed for that. With the inputs X (rows, in) of its product and the
gradient G (rows, out) of its outputs it is GᵀX, and

    |GᵀX|² = sum over pairs of rows (i, j) of (G Gᵀ)_ij (X Xᵀ)_ij,

which for the 30 rows of a demonstration takes a twentieth of the operations. Other frozen parameters (norms, and the
matrices of fairseq's own attention, which are multiplied inside one function) take part in the graph while a batch is
trained on, and lose their gradient as soon as its norm is known.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from fairseq.optim import FairseqOptimizer
from torch import Tensor, nn

from fairseq_icl.compat.half_precision import loss_scale
from fairseq_icl.errors import UserError
from fairseq_icl.training.step_sizes import norms_of


class WholeLayers:
    """Watches the batches of one training."""

    def __init__(self, decoder: Any) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UserError("gradient_norms=all: frozen weights' gradients are not summed over processes; train in one")
        self._layers = list(decoder.layers)
        self._frozen_products = [_frozen_products(layer) for layer in self._layers]
        self.squares = [0.0] * len(self._layers)

    @contextmanager
    def watching(self, optimizer: FairseqOptimizer, *, first: bool) -> Iterator[None]:
        """Around forward and backward of the one batch of an update; `first`: none came before it."""
        if not first:
            raise UserError("gradient_norms=all: sees one batch an update; leave --update-freq at 1")
        scale = loss_scale(optimizer)
        self.squares = [0.0] * len(self._layers)
        with ExitStack() as stack:
            for number, (layer, products) in enumerate(zip(self._layers, self._frozen_products, strict=True)):
                add = _Sum(self.squares, number, scale)
                for module in products:
                    stack.enter_context(module.register_forward_hook(add.product))
                seen_there = {id(module.weight) for module in products}
                for parameter in layer.parameters():
                    if id(parameter) not in seen_there:
                        stack.enter_context(_watched(parameter, add))
            yield

    @property
    def norms(self) -> list[float]:
        """One a layer, of the batch that was seen last."""
        return [math.sqrt(square) for square in self.squares]


class _Sum:
    """Adds squared norms of gradients, as they come in backward, to the one of their layer."""

    def __init__(self, squares: list[float], layer: int, scale: float) -> None:
        self._squares, self._layer, self._scale = squares, layer, scale

    def gradient(self, parameter: Tensor) -> None:
        """Of a parameter that has its gradient."""
        assert parameter.grad is not None
        self._squares[self._layer] += (norms_of([parameter.grad])[0] / self._scale) ** 2

    def product(self, module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook: of the module's weight, once the gradient of `output` (..., out) is known."""
        if not torch.is_grad_enabled():
            return
        inputs = args[0].detach().flatten(0, -2)  # (rows, in)

        def look(gradient: Tensor) -> None:
            square = _product_square(gradient.detach().flatten(0, -2), inputs)
            self._squares[self._layer] += square / self._scale**2

        if not output.requires_grad:  # nothing below learns
            output.requires_grad_(True)
        output.register_hook(look)


def _frozen_products(layer: nn.Module) -> list[nn.Linear]:
    """The modules with a frozen weight that multiply when they are called, so that a hook sees the product."""
    inside = {
        id(part) for module in layer.modules() if isinstance(module, MultiheadAttention) for part in module.modules()
    }
    found = [module for module in layer.modules() if type(module) is nn.Linear and id(module) not in inside]
    return [module for module in found if not module.weight.requires_grad]


def _product_square(gradient: Tensor, inputs: Tensor) -> float:
    """|GᵀX|² of a gradient G (rows, out) and inputs X (rows, in), whichever way has fewer operations.

    Sums over pairs of rows are in fp64: where tokens' gradients cancel, digits would.
    """
    rows, width, height = len(inputs), inputs.size(1), gradient.size(1)
    if rows * (width + height) >= width * height:
        return norms_of([torch.mm(gradient.float().t(), inputs.float())])[0] ** 2
    gradient, inputs = gradient.double(), inputs.double()
    return float((torch.mm(gradient, gradient.t()) * torch.mm(inputs, inputs.t())).sum())


@contextmanager
def _watched(parameter: nn.Parameter, add: _Sum) -> Iterator[None]:
    """Look at the parameter's gradient as soon as it is there; a frozen one is left without."""
    frozen = not parameter.requires_grad

    def look(seen: Tensor) -> None:
        add.gradient(seen)
        if frozen:
            seen.grad = None

    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(look)
    try:
        yield
    finally:
        handle.remove()
        parameter.requires_grad_(not frozen)
