"""Training is remembering: a perceptron, or a layer trained by SGD, is linear attention to its training examples.

Rosenblatt's perceptron (1958) keeps a weight vector, that of Aizerman, Braverman and Rozonoer (1964) the examples. For
labels y_i = +-1, going through the examples one by one,

    primal   if y_t (w . x_t) <= 0:                     w <- w + y_t x_t
    dual     if y_t sum_i a_i y_i k(x_i, x_t) <= 0:     a_t <- a_t + 1

With k(x, z) = x . z both make the same mistakes, and the dual's output sum_i (a_i y_i) (x_i . x) is unnormalised
attention to the examples. Irie, Csordas and Schmidhuber (2022, arXiv 2202.05798) say it of SGD. A layer y = W x + b
that sees the inputs x_i and receives the loss gradients g_i = dL/dy_i is, after any number of steps,

    W x = W_0 x + sum_i e_i (x_i . x) = W_0 x + LinearAttn(values E, keys X, query x),           e_i = -lr g_i

and with momentum and weight decay still linear in the recorded gradients, only with other coefficients:

    W = a W_0 + sum_s c_s G_s,      G_s = sum_{i in step s} g_i x_i^T,      e_i = c_s g_i

`example_weights` finds a and c_s for torch's SGD; with momentum mu and a constant rate c_s is -lr (1 - mu^(T-s+1)) /
(1 - mu). An optimizer that divides by gradient statistics (Adam) has no such coefficients for all entries of W.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import relative_error

Kernel = Callable[[Tensor, Tensor], Tensor]
"""(keys (..., n, d), queries (..., m, d) or (d,)) -> scores (..., m, n) or (n,)"""


def dot_product(keys: Tensor, queries: Tensor) -> Tensor:
    """k(x_i, x) = x_i . x"""
    return queries @ keys.transpose(-2, -1)


def softmax_kernel(keys: Tensor, queries: Tensor) -> Tensor:
    """Scores normalised over the examples, as in a transformer, which the dual form does not allow for."""
    return torch.softmax(dot_product(keys, queries), dim=-1)


def train_perceptron(
    examples: Tensor, labels: Tensor, kernel: Kernel | None = None, rounds: int = 5, keep: float = 1.0
) -> tuple[Tensor, list[int]]:
    """What a perceptron learns from examples (n, d) and labels (n,), and the visits, over all rounds, of its mistakes.

    Without a `kernel` these are the primal's weights (d,), with one the dual's values a_i y_i (n,) of the examples; the
    outputs for x are then x @ weights and kernel(examples, x) @ values. `keep`, a factor on what was learned at every
    mistake, is 1 in both forms; one that forgets is no longer the other.
    """
    learned, mistakes = torch.zeros_like(examples[0] if kernel is None else labels), []
    for visit, index in enumerate([*range(len(examples))] * rounds):
        x, y = examples[index], labels[index]
        if y * ((x if kernel is None else kernel(examples, x)) @ learned) <= 0:
            learned = keep * learned + y * (x if kernel is None else torch.eye(len(examples)).to(x)[index])
            mistakes.append(visit)
    return learned, mistakes


@dataclass(frozen=True)
class SgdRule:
    """How torch's SGD turns the gradient of one step into a change; the names are those of torch.optim.SGD."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer, parameter: Tensor) -> "SgdRule":
        """The rule that `optimizer` applies to `parameter` now (a schedule may change it from step to step)."""
        for group in optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                if "momentum" not in group or group.get("maximize"):
                    raise UserError(f"{type(optimizer).__name__}: has no dual form here; use SGD that minimizes")
                return cls(*(group[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")))
        raise UserError("the optimizer does not train this layer's weight: give it the layer's parameters")


def example_weights(rules: list[SgdRule]) -> tuple[float, list[float]]:
    """(a, [c_1 ... c_T]) with W_T = a W_0 + sum_s c_s G_s after T steps of SGD by these rules.

    Runs torch's update on the coefficients instead of on the matrices: W and the momentum buffer are both linear
    combinations of W_0 and the gradients, so a vector of T + 1 numbers stands for each.
    """
    units = torch.eye(len(rules) + 1, dtype=torch.float64)
    weight, buffer = units[0], None  # coefficients of (W_0, G_1, ..., G_T)
    for gradient, rule in zip(units[1:], rules, strict=True):
        change = rule.weight_decay * weight + gradient
        if rule.momentum:
            # torch starts the buffer with the first gradient, without dampening
            buffer = change if buffer is None else rule.momentum * buffer + (1.0 - rule.dampening) * change
            change = change + rule.momentum * buffer if rule.nesterov else buffer
        weight = weight - rule.lr * change
    return float(weight[0]), weight[1:].tolist()


@dataclass
class TrainingStep:
    """What one layer saw in one optimizer step, over all of its forward passes; n tokens in total."""

    inputs: Tensor  # (n, in) x_i
    gradients: Tensor  # (n, out) g_i, scaled like the gradient that the optimizer used
    rule: SgdRule
    unexplained: float  # |weight.grad - sum_i g_i x_i^T| / |weight.grad|; not 0: the weight is also used elsewhere


class DualRecorder:
    """Context manager that records a linear layer while it trains; docs/theory.md shows its use.

    Reads module input and output, so the layer must be called as a module: fairseq's fused attention path reads the
    weights of q/k/v_proj directly and would record nothing, which `end_step` reports.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.steps: list[TrainingStep] = []
        parts = [layer.weight] + ([] if layer.bias is None else [layer.bias[:, None]])
        self.initial_weight = torch.cat(parts, dim=1).detach()  # (out, in), or (out, in + 1) with a bias
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> "DualRecorder":
        self._hook = self.layer.register_forward_hook(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _record(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            inputs = args[0].detach().flatten(0, -2)
            # on the output, so that x and g of the same pass stay together
            output.register_hook(lambda gradient: self._pairs.append((inputs, gradient.detach().flatten(0, -2))))

    def end_step(self, rule: SgdRule, gradient_scale: float = 1.0) -> None:
        """Close a step, after backward and before optimizer.step is about to apply the `rule`.

        `gradient_scale` is the factor by which the gradient was changed since backward (clipping, division by tokens).
        """
        if not self._pairs:
            raise UserError("nothing was recorded: the layer is not called as a module, or gets no gradient")
        inputs = torch.cat([x for x, _ in self._pairs])
        gradients = torch.cat([g for _, g in self._pairs]) * gradient_scale
        self._pairs.clear()
        whole = self.layer.weight.grad
        unexplained = float("nan") if whole is None else relative_error(gradients.T @ inputs, whole)
        self.steps.append(TrainingStep(inputs, gradients, rule, unexplained))

    def dual_layer(self, rules: list[SgdRule] | None = None) -> "DualLayer":
        """The trained layer in its dual form; other `rules` than the recorded ones show what they leave unaccounted."""
        if not self.steps:
            raise UserError("no step was recorded: call end_step after every backward pass")
        kept, coefficients = example_weights([step.rule for step in self.steps] if rules is None else rules)
        keys = _widened(torch.cat([step.inputs for step in self.steps]), self.initial_weight)
        values = torch.cat([by * step.gradients for step, by in zip(self.steps, coefficients, strict=True)])
        return DualLayer(kept * self.initial_weight, keys, values)


@dataclass(frozen=True)
class DualLayer:
    """a W_0 x + sum_i e_i (x_i . x): initial layer plus attention to n examples.

    A bias is the weight of a constant input 1, which then ends every x and x_i; W_0 has a column more for it.
    """

    initial_weight: Tensor  # (out, in) a W_0
    keys: Tensor  # (n, in) x_i
    values: Tensor  # (n, out) e_i

    def __call__(self, x: Tensor) -> Tensor:
        """Output for inputs x: (..., in) -> (..., out)"""
        return _widened(x, self.initial_weight) @ self.initial_weight.T + self.scores(x) @ self.values

    def scores(self, x: Tensor) -> Tensor:
        """How much x attends to every example, x_i . x: (..., in) -> (..., n)"""
        return dot_product(self.keys, _widened(x, self.initial_weight))


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., in), with a 1 behind it if the weight (out, in) has a bias as its last column."""
    return x if x.shape[-1] == weight.shape[1] else torch.nn.functional.pad(x, (0, 1), value=1.0)
