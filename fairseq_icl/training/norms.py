"""Norms: how far a step moves the weights, and of the gradients of whole layers.

**Steps**, |dW| / |W| of what learns in a layer: measured, and made equal if asked. Plain SGD moves by dW = lr *
gradient, so |dW| is known without looking, and a step of any size is a factor on the gradient. Of other optimizers
(momentum, weight decay, Adam) |dW| is measured on a copy of the weights; their steps are not made equal, because what
a factor on the gradient does to them is another question.

**Whole layers** (`gradient_norms=all`), as in the second paper's heat maps: the norm over all parameters of a layer,
whether they learn or not, of the gradient summed over tokens. That of a frozen matrix need not be formed: with the
inputs X (rows, in) of its product and the gradient G (rows, out) of its outputs it is GᵀX, and

    |GᵀX|² = sum over pairs of rows (i, j) of (G Gᵀ)_ij (X Xᵀ)_ij,

which for the 30 rows of a demonstration takes a twentieth of the operations. Other frozen parameters (norms, and the
matrices of fairseq's own attention, which are multiplied inside one function) take part in the graph while a batch is
trained on, and lose their gradient as soon as its norm is known.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from fairseq.optim import FairseqOptimizer
from torch import Tensor, nn

from fairseq_icl.compat.half_precision import loss_scale
from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import l2_norm


class StepSizes:
    """Watches the steps of one optimizer; with a `size`, every layer's step gets this relative size."""

    def __init__(self, decoder: Any, size: float | None = None) -> None:
        self.size = size
        self._learning = [
            (layer, module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for layer, module in enumerate(decoder.layers)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]  # (layer, module, attribute) of every trained parameter
        self._start()

    def _start(self) -> None:
        self._updates = [0.0] * len(self._learning)
        self._weights: dict[int, float] = {}
        self._before: dict[int, Tensor] = {}

    def before_step(
        self, optimizer: FairseqOptimizer, gradients: Sequence[Tensor | None], norms: Sequence[float], *, last: bool
    ) -> None:
        """Look at the weights, and give the gradients, with which `optimizer` steps, the length asked for.

        `norms` are theirs in the step itself. An update of several steps is measured as one (`last`: its last step).
        """
        moving = [place for place, gradient in enumerate(gradients) if gradient is not None]
        unseen = [n for n in (range(len(gradients)) if last else moving) if n not in self._weights]
        whole = [self._parameter(number, whole=True) for number in unseen]
        self._weights |= dict(zip(unseen, norms_of(whole), strict=True))
        if not is_plain_sgd(optimizer):
            if self.size is not None:
                raise UserError(
                    "layer_step=equal: needs plain gradient descent (--optimizer sgd, no momentum, no weight decay)"
                )
            self._before |= {number: self._parameter(number).clone() for number in moving}
            return
        rate = float(optimizer.get_lr())
        if rate == 0 and self.size is not None:
            raise UserError("layer_step=equal: no step can be made of lr=0; give a learning rate above 0")
        lengths = [rate * norm for norm in norms]
        if self.size is not None:
            squares: dict[int, tuple[float, float]] = {}  # layer -> of the step at this rate, of the weights
            for place, ((layer, _, _), moved) in enumerate(zip(self._learning, lengths, strict=True)):
                step, weight = squares.get(layer, (0.0, 0.0))
                squares[layer] = (step + moved**2, weight + self._weights.get(place, 0.0) ** 2)
            for place, ((layer, _, _), gradient) in enumerate(zip(self._learning, gradients, strict=True)):
                step, weight = squares[layer]
                factor = self.size * math.sqrt(weight / step) if step > 0 else 1.0  # no gradient: it does not move
                lengths[place] *= factor
                if gradient is not None:
                    gradient.mul_(factor)
        self._updates = [one + other for one, other in zip(self._updates, lengths, strict=True)]

    def after_update(self) -> tuple[list[float], list[float]]:
        """What the update did to each trained parameter, once its last step is taken: |dW|, and |W| before it."""
        changes = norms_of([self._parameter(number) - self._before[number] for number in self._before])
        for number, change in zip(self._before, changes, strict=True):
            self._updates[number] = change
        moved = self._updates, [self._weights[place] for place in range(len(self._learning))]
        self._start()
        return moved

    def _parameter(self, number: int, *, whole: bool = False) -> Tensor:
        """What learns, or the `whole` weight: in a linearized model it learns its difference to the pretrained one."""
        _, module, attribute = self._learning[number]
        parameter: Tensor = getattr(module, attribute).detach()
        base = getattr(module, f"{attribute}_base", None) if whole else None
        return parameter if base is None else base + parameter


def is_plain_sgd(optimizer: FairseqOptimizer) -> bool:
    """Whether a step is just minus lr times the gradient."""
    inner = optimizer.optimizer  # torch's, whatever fairseq wraps around it for half precision
    changing = ("momentum", "weight_decay", "nesterov", "maximize")
    given = [group.get(name) for group in inner.param_groups for name in changing]
    return type(inner) is torch.optim.SGD and not any(given)


def norms_of(tensors: Sequence[Tensor | None], factor: float = 1.0) -> list[float]:
    """l2 norms of factor * tensors in fp32 (or fp64), 0 for None; brought to the CPU together."""
    present = [l2_norm(x.to(torch.promote_types(x.dtype, torch.float32))) for x in tensors if x is not None]
    values = iter(torch.stack(present).tolist() if present else [])
    return [0.0 if tensor is None else factor * next(values) for tensor in tensors]


class WholeLayers:
    """Watches the batches of one training: the gradient of all parameters of each layer, frozen ones too."""

    def __init__(self, decoder: Any) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UserError("gradient_norms=all: frozen weights' gradients are not summed over processes; train in one")
        self._layers = list(decoder.layers)
        self._frozen_products: list[list[nn.Linear]] = []  # by layer: what multiplies when called, for a hook to see
        for layer in self._layers:
            fused = [part for part in layer.modules() if isinstance(part, MultiheadAttention)]
            inside = {part for module in fused for part in module.modules()}
            products = [part for part in layer.modules() if type(part) is nn.Linear and part not in inside]
            self._frozen_products.append([part for part in products if not part.weight.requires_grad])
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
                for module in products:
                    stack.enter_context(module.register_forward_hook(partial(self._see_product, number, scale)))
                seen_there = {id(module.weight) for module in products}
                for parameter in layer.parameters():
                    if id(parameter) not in seen_there:
                        frozen = not parameter.requires_grad
                        stack.callback(parameter.requires_grad_, not frozen)
                        see = partial(self._see_gradient, number, scale, frozen)
                        stack.enter_context(parameter.requires_grad_(True).register_post_accumulate_grad_hook(see))
            yield

    def _see_gradient(self, layer: int, scale: float, frozen: bool, parameter: Tensor) -> None:
        """Of a parameter that has its gradient now; a frozen one is left without."""
        assert parameter.grad is not None
        self.squares[layer] += (norms_of([parameter.grad])[0] / scale) ** 2
        if frozen:
            parameter.grad = None

    def _see_product(self, layer: int, scale: float, module: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        """A forward hook: of the module's weight, once the gradient of `output` (..., out) is known."""
        if not torch.is_grad_enabled():
            return
        inputs = args[0].detach().flatten(0, -2)  # (rows, in)

        def look(gradient: Tensor) -> None:
            self.squares[layer] += _product_square(gradient.detach().flatten(0, -2), inputs) / scale**2

        output.requires_grad_(True).register_hook(look)  # also where nothing below learns

    @property
    def norms(self) -> list[float]:
        """One a layer, of the batch that was seen last."""
        return [math.sqrt(square) for square in self.squares]


def _product_square(gradient: Tensor, inputs: Tensor) -> float:
    """|GᵀX|² of a gradient G (rows, out) and inputs X (rows, in), whichever way has fewer operations."""
    rows, width, height = len(inputs), inputs.size(1), gradient.size(1)
    if rows * (width + height) >= width * height:
        return norms_of([torch.mm(gradient.float().t(), inputs.float())])[0] ** 2
    gradient, inputs = gradient.double(), inputs.double()  # where tokens' gradients cancel, digits would
    return float((torch.mm(gradient, gradient.t()) * torch.mm(inputs, inputs.t())).sum())
