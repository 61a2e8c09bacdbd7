"""How far a step moves the weights, |dW| / |W| of what learns in a layer: measured, and made equal if asked.

Plain SGD moves by dW = lr * gradient, so |dW| is known without looking, and a step of any size is a factor on the
gradient. Of other optimizers (momentum, weight decay, Adam) |dW| is measured on a copy of the weights; their steps are
not made equal, because what a factor on the gradient does to them is another question.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from fairseq.optim import FairseqOptimizer
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import l2_norm
from fairseq_icl.settings import Settings


class Moved(NamedTuple):
    """What an update did to each trained parameter, in their order: |dW|, and |W| before it."""

    updates: list[float]
    weights: list[float]


def equal_step_size(settings: Settings) -> float | None:
    """The relative size that every layer's step is to have; None: whatever the learning rate makes of it."""
    if (settings.layer_step == "equal") != (settings.layer_step_size is not None):
        given, needed = "layer_step=equal", "layer_step_size=SIZE (|dW| / |W| of a step, for instance 0.001)"
        if settings.layer_step != "equal":
            given, needed = "layer_step_size", "layer_step=equal"
        raise UserError(f"{given}: needs {needed}")
    return settings.layer_step_size


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
        self,
        optimizer: FairseqOptimizer,
        gradients: Sequence[Tensor | None],
        norms: Sequence[float],
        *,
        last: bool = True,
    ) -> None:
        """Look at the weights, and give the gradients, with which `optimizer` steps, the length asked for.

        `norms` are theirs in the step itself. An update of several steps is measured as one (`last`: its last step).
        """
        moving = [place for place, gradient in enumerate(gradients) if gradient is not None]
        unseen = range(len(gradients)) if last else moving
        unseen = [place for place in unseen if place not in self._weights]
        self._weights |= dict(zip(unseen, norms_of([self._weight(place) for place in unseen]), strict=True))
        if not is_plain_sgd(optimizer):
            if self.size is not None:
                raise UserError(
                    "layer_step=equal: needs plain gradient descent (--optimizer sgd, no momentum, no weight decay)"
                )
            self._before |= {place: self._parameter(place).detach().clone() for place in moving}
            return
        rate = float(optimizer.get_lr())
        if rate == 0 and self.size is not None:
            raise UserError("layer_step=equal: no step can be made of lr=0; give a learning rate above 0")
        lengths = [rate * norm for norm in norms]
        if self.size is not None:
            factors = self._factors(lengths)
            for (layer, _, _), gradient in zip(self._learning, gradients, strict=True):
                if gradient is not None:
                    gradient.mul_(factors[layer])
            lengths = [step * factors[layer] for (layer, _, _), step in zip(self._learning, lengths, strict=True)]
        self._updates = [one + other for one, other in zip(self._updates, lengths, strict=True)]

    def after_update(self) -> Moved:
        """What the update did, once its last step is taken."""
        places = list(self._before)
        changes = norms_of([self._parameter(place).detach() - self._before[place] for place in places])
        for place, change in zip(places, changes, strict=True):
            self._updates[place] = change
        moved = Moved(self._updates, [self._weights[place] for place in range(len(self._learning))])
        self._start()
        return moved

    def _factors(self, lengths: Sequence[float]) -> dict[int, float]:
        """Layer -> what brings its step of these lengths, one per parameter, to the size asked for.

        A layer without a gradient does not move.
        """
        assert self.size is not None
        squares: dict[int, tuple[float, float]] = {}
        for place, ((layer, _, _), moved) in enumerate(zip(self._learning, lengths, strict=True)):
            step, weight = squares.get(layer, (0.0, 0.0))
            squares[layer] = (step + moved**2, weight + self._weights.get(place, 0.0) ** 2)
        return {
            layer: self.size * math.sqrt(weight / step) if step > 0 else 1.0
            for layer, (step, weight) in squares.items()
        }

    def _parameter(self, place: int) -> Tensor:
        _, module, attribute = self._learning[place]
        parameter: Tensor = getattr(module, attribute)
        return parameter

    def _weight(self, place: int) -> Tensor:
        """The weight itself; what learns in a linearized model is its difference to the pretrained one."""
        _, module, attribute = self._learning[place]
        base = getattr(module, f"{attribute}_base", None)
        parameter = self._parameter(place).detach()
        return parameter if base is None else base + parameter


def is_plain_sgd(optimizer: FairseqOptimizer) -> bool:
    """Whether a step is just minus lr times the gradient."""
    inner = optimizer.optimizer  # torch's, whatever fairseq wraps around it for half precision
    plain = {"momentum": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
    return type(inner) is torch.optim.SGD and all(
        group.get(name, value) == value for group in inner.param_groups for name, value in plain.items()
    )


def norms_of(tensors: Sequence[Tensor | None], factor: float = 1.0) -> list[float]:
    """l2 norms of factor * tensors in fp32 (or fp64), 0 for None; brought to the CPU together."""
    present = [l2_norm(x.to(torch.promote_types(x.dtype, torch.float32))) for x in tensors if x is not None]
    values = iter(torch.stack(present).tolist() if present else [])
    return [0.0 if tensor is None else factor * next(values) for tensor in tensors]
