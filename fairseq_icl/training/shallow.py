"""Shallow gradient descent: no weight of the model changes, every layer learns a small function of its own states.

    f_l      zero at the start; f_l(x) is added to the attention output at the token that predicts the label
    x_i      what the attention of layer l receives at that token of demonstration i, read alone as in fine-tuning
    h_i      the state right after attention there: the layer's input and the attention's output added
    loss     sum_i CE( U( h_i + f_l(x_i) ), y_i ),    y_i the first token of the label, U final norm and unembedding
    e_i      - d loss / d h_i

Nothing crosses layers: this is layer-causal descent (layer_causal.py) on a shallow function instead of on the model.
A step of rate r on a matrix, f_l(x) = W x, is W <- W + r sum_i e_i x_i^T, in dual form f_l(x) <- f_l(x) + r sum_i e_i
(x_i . x): linear attention to the demonstrations, with their errors as values (Dai et al. 2023, section 3). With a
kernel in the place of the product it is descent in its function space (Cheng et al. 2024, arXiv 2312.06528). So every
form is

    f_l(x) = sum_i k_i(x) c_i,      c_i (d) the sum of all r e_i so far,     k(x) (n) weights of the demonstrations

    linear           k_i(x) = x_i . x
    softmax          k_i(x) = share of exp(x_i . x / sqrt(d)) among the demonstrations: softmax attention to them
    rbf              k_i(x) = exp(-|x_i - x|^2 / 2 s^2), s^2 the median of |x_i - x_j|^2
    preconditioned   k(x) = (b G + t I)^-1 (K(x_i, x))_i, G the demonstrations' own K, b = (n+1)/n^2, t = tr G / n^2:
                     with the product this is W <- W + r sum_i e_i x_i^T A, A = ((n+1)/n S + tr(S)/n I)^-1, S the mean
                     of x x^T: the optimum of Ahn et al. (2023, arXiv 2306.00297, theorem 1) for this covariance
    gd++             after every step all inputs, and x with them, become (I - g S) x; g = 1 / largest eigenvalue of S
                     (von Oswald et al. 2023, arXiv 2212.07677; they tune g)
    ridge            c = (G + I / r)^-1 T, T_i the unembedding's row of y_i: least squares in closed form

Shapes: L layers, n demonstrations, width d, R tokens.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.state_edits import Recorder, StateEdit, edited
from fairseq_icl.observing.prefix import run_edited, run_prefix, supports_prefix
from fairseq_icl.observing.probe import at_least_single
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.settings import Settings
from fairseq_icl.training.layer_causal import before_unembedding, check_decoder, unembedding_losses


@dataclass(frozen=True)
class Weigh:
    """k(x): how much each demonstration counts at x."""

    kernel: str = "linear"
    preconditioned: bool = False

    def __call__(self, inputs: Tensor, x: Tensor) -> Tensor:
        """Demonstrations (..., n, d) and x (..., R, d) -> (..., R, n)."""
        weights = self.products(inputs, x)
        if not self.preconditioned:
            return weights
        gram, n = self.products(inputs, inputs), inputs.size(-2)
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] / n**2
        system = (n + 1) / n**2 * gram + trace * torch.eye(n).to(gram)
        return torch.linalg.solve(system, weights.transpose(-1, -2)).transpose(-1, -2)

    def products(self, inputs: Tensor, x: Tensor) -> Tensor:
        """K(x_i, x): (..., R, n)."""
        if self.kernel == "rbf":
            width = torch.cdist(inputs, inputs).square().flatten(-2).median(-1).values[..., None, None]
            return (-torch.cdist(x, inputs).square() / (2 * width.clamp_min(torch.finfo(x.dtype).tiny))).exp()
        products = x @ inputs.transpose(-1, -2)
        return products if self.kernel == "linear" else (products / math.sqrt(x.size(-1))).softmax(-1)


@dataclass(frozen=True)
class Step:
    """What one or several steps learnt from inputs that stayed the same, and how inputs change afterwards."""

    inputs: Tensor  # (L, n, d)
    coefficients: Tensor  # (L, n, d)
    transform: Tensor | None = None  # (L, 1, 1): gamma / n of gd++

    def moved(self, x: Tensor, layer: int | slice = slice(None)) -> Tensor:
        """x (..., R, d) as the next step sees it."""
        if self.transform is None:
            return x
        inputs = self.inputs[layer]
        return x - self.transform[layer] * (x @ inputs.transpose(-1, -2)) @ inputs


def descend(
    inputs: Tensor,
    errors: Callable[[Tensor, Tensor], Tensor],
    weigh: Weigh,
    *,
    rate: float,
    steps: int = 1,
    one_at_a_time: bool = False,
    gammas: Callable[[Tensor], Tensor] | None = None,
    decay: float = 0.0,
) -> list[Step]:
    """Functional gradient descent from f = 0 on demonstrations with inputs (L, n, d).

    `errors`: f at some of them (L, m, d), their numbers (m,) -> e (L, m, d). `gammas`: inputs (L, n, d) -> gamma of a
    layer, (L,), which makes it gd++. `decay`: of f itself, each step, as ridge regression has it.
    """
    n = inputs.size(1)
    made: list[Step] = []
    coefficients, base = torch.zeros_like(inputs), torch.zeros_like(inputs)  # base: f of the steps before
    for _ in range(steps):
        weights = weigh(inputs, inputs)  # (L, n, n): [j, i] = k_i(x_j)
        for batch in torch.arange(n).split(1 if one_at_a_time else n):
            found = errors(base[:, batch] + weights[:, batch] @ coefficients, batch)
            coefficients = (1 - rate * decay) * coefficients
            coefficients[:, batch] += rate * found
        if gammas is not None:
            made.append(Step(inputs, coefficients, gammas(inputs)[:, None, None] / n))
            base = base + weights @ coefficients
            inputs, coefficients = made[-1].moved(inputs), torch.zeros_like(coefficients)
    return made or [Step(inputs, coefficients)]


def ridge(inputs: Tensor, targets: Tensor, weigh: Weigh, rate: float) -> list[Step]:
    """Least squares of f(x_i) = t_i, (L, n, d) each, with the penalty |f|^2 / rate: c = r (r G + I)^-1 T."""
    gram = weigh.products(inputs, inputs)
    system = rate * gram + torch.eye(inputs.size(1)).to(gram)
    return [Step(inputs, rate * torch.linalg.solve(system, targets))]


class Shallow(StateEdit):
    """Adds f_l to the attention output of some layers."""

    def __init__(self, steps: list[Step], weigh: Weigh, layers: range) -> None:
        self.steps, self.weigh, self.layers = steps, weigh, layers

    def attention(self, layer: int, output: Tensor, received: Tensor, state: Tensor) -> Tensor:
        if layer not in self.layers:
            return output
        return (at_least_single(output) + self.value(layer - self.layers.start, at_least_single(received))).to(output)

    def value(self, number: int, x: Tensor) -> Tensor:
        """f at x (R, d), in the layer of this number among those that have one: (R, d)."""
        total = torch.zeros_like(x)
        for step in self.steps:
            total = total + self.weigh(step.inputs[number], x) @ step.coefficients[number]
            x = step.moved(x, number)
        return total


class Examples(NamedTuple):
    """What the demonstrations show, each read alone, in the layers that learn."""

    inputs: Tensor  # (L, n, d) x_i
    states: Tensor  # (L, n, d) h_i
    labels: Tensor  # (n,) y_i


def shallow_gd(model: Model, prompts: Prompts, settings: Settings) -> Shallow:
    """The method: the functions that descent on the demonstrations gives."""
    decoder, rate = model.lm.decoder, float(settings.lr or 0.0)
    layers = check_decoder(decoder, settings.layers, what="shallow_gd")
    examples = demonstration_states(model, prompts, layers)
    kernel = settings.kernel if settings.shallow == "kernel" else "linear"
    weigh = Weigh(kernel, settings.shallow_step == "preconditioned")
    if settings.shallow == "ridge":
        if settings.shallow_step != "plain":
            raise UserError(f"shallow_step={settings.shallow_step}: shallow=ridge is in closed form; leave it out")
        targets = at_least_single(decoder.output_projection.weight)[examples.labels]  # (n, d)
        if targets.size(1) != examples.inputs.size(2):
            raise UserError("shallow=ridge: this model's label embeddings are not as wide as its states; use linear")
        steps = ridge(examples.inputs, targets.expand_as(examples.inputs), weigh, rate)
    else:
        errors, one = partial(cross_entropy_errors, decoder, examples), settings.shallow_batch == "one"
        gammas = inverse_of_largest_eigenvalue if settings.shallow_step == "gd++" else None
        number = settings.shallow_steps
        steps = descend(examples.inputs, errors, weigh, rate=rate, steps=number, one_at_a_time=one, gammas=gammas)
    if not all(bool(step.coefficients.isfinite().all()) for step in steps):
        raise UserError("shallow_gd: diverged, its functions are NaN or infinite; lower lr")
    return Shallow(steps, weigh, layers)


def inverse_of_largest_eigenvalue(inputs: Tensor) -> Tensor:
    """1 / largest eigenvalue of S = mean of x x^T, of inputs (L, n, d): (L,)."""
    gram = inputs @ inputs.mT / inputs.size(1)  # has the eigenvalues of S
    return 1 / torch.linalg.eigvalsh(gram)[:, -1].clamp_min(torch.finfo(gram.dtype).tiny)


def cross_entropy_errors(decoder: Any, examples: Examples, values: Tensor, batch: Tensor) -> Tensor:
    """e_i = -d CE(U(h_i + f(x_i)), y_i) / d h_i of the demonstrations `batch`, where f is `values`: (L, m, d)."""
    moved = (examples.states[:, batch] + values).to(decoder.output_projection.weight)
    with torch.enable_grad():
        moved.requires_grad_(True)
        features = tuple(before_unembedding(decoder, layer) for layer in moved)
        losses = unembedding_losses(decoder.output_projection.weight, examples.labels[batch], features)
        (gradient,) = torch.autograd.grad(losses.sum(), moved)
    return -gradient.to(values)


def demonstration_states(model: Model, prompts: Prompts, layers: range) -> Examples:
    """The states of the demonstrations, each run alone after BOS, at the token that predicts its label."""
    decoder = model.lm.decoder
    if not supports_prefix(decoder):
        raise UserError("shallow_gd: this model's attention cannot be observed as it needs; use gd or lcgd")
    start = len(prompts.start)
    inputs = [sequence.tokens[start : -sequence.label_length] for sequence in prompts.finetuning]
    labels = torch.tensor([sequence.tokens[-sequence.label_length] for sequence in prompts.finetuning])
    recorder = Recorder()

    def run() -> None:
        check_residual(decoder, prompts.finetuning[0].tokens[: start + 1])
        run_edited(decoder, run_prefix(decoder, prompts.start), inputs, recorder)

    model.evaluate(run)
    kept = (recorder.received, recorder.after_attention)
    received, after = (at_least_single(recorder.stacked(part)[layers.start : layers.stop]) for part in kept)
    return Examples(received, after, labels.to(received.device))


def check_residual(decoder: Any, tokens: Sequence[int]) -> None:
    """Refuse a model that does something to the attention's output before, or right after, it is added to its input."""
    device = next(decoder.parameters()).device
    last = torch.tensor([len(tokens) - 1], device=device)
    recorder, found = Recorder(), dict[nn.Module, Tensor]()
    norms = [getattr(layer, "final_layer_norm", None) for layer in decoder.layers]
    with ExitStack() as hooks:
        for norm in filter(None, norms):  # they receive the sum, where attention and MLP follow each other
            look = norm.register_forward_pre_hook(lambda module, args: found.update({module: args[0][last, 0]}))
            hooks.enter_context(look)
        hooks.enter_context(edited(decoder, recorder, torch.zeros_like(last), last))
        decoder.extract_features(torch.tensor([tokens], device=device), None)
    for number, (layer, norm) in enumerate(zip(decoder.layers, norms, strict=True)):
        side_by_side = getattr(layer, "parallel_residual", False) and layer.normalize_before
        (expected,) = recorder.after_attention[number]
        if not side_by_side and not (norm in found and torch.allclose(found[norm], expected, rtol=1e-3, atol=1e-4)):
            raise UserError(
                "shallow_gd: this model norms or scales what its attention puts out before it is added to the state, "
                "so a function cannot be learnt there; use lcgd"
            )
