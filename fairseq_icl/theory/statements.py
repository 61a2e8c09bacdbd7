"""Every exact statement once as it is claimed and once with a premise removed, as numbers: what `page` prints.

All on small random problems in float64; what has to be trained first is in `trained`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory import momentum_attention as momentum
from fairseq_icl.theory import perceptron
from fairseq_icl.theory.construction import (
    gradient_descent,
    gradient_descent_plus,
    gradient_step_layer,
    predict,
    random_regression,
)
from fairseq_icl.theory.dual_form import DualRecorder, SgdRule
from fairseq_icl.theory.implicit_update import implicit_update
from fairseq_icl.theory.linear_attention import (
    Heads,
    relaxed_attention,
    softmax_attention,
    softmax_change,
    weight_update,
)

EXACT = 1e-10
"""Relative error below which an exact statement counts as confirmed in float64."""

AIZERMAN = "Aizerman et al. 1964"
IRIE = "Irie et al. 2022, arXiv 2202.05798"
DAI = "Dai et al. 2023, arXiv 2212.10559"
OSWALD = "von Oswald et al. 2023, arXiv 2212.07677"
DHERIN = "Dherin et al. 2025, arXiv 2507.16003"


@dataclass(frozen=True)
class Record:
    """One statement and what came out."""

    statement: str
    source: str
    computed: str  # what `value` is, in words
    value: float
    premise: str  # what was removed for `broken`
    broken: float
    exact: bool  # whether `value` must be below EXACT; else it is a measured gap
    is_claim: bool = True  # otherwise a question: both numbers are the answer, and nothing can fail
    per_layer: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of a real model: what to draw by layer

    @property
    def holds(self) -> bool:
        """Exact: below 1e-10, and visibly wrong without the premise. Measured: the gap is smaller than without it."""
        if not self.is_claim:
            return True
        return self.value < EXACT < 1e-3 < self.broken if self.exact else self.value < self.broken


Normal = Callable[..., Tensor]
"""(*shape) -> standard normal float64 numbers"""


def run_exact(seed: int = 0) -> list[Record]:
    """All exact statements, each on its own random problem; a second."""
    return [statement(_normal(seed)) for statement in EXACT_STATEMENTS]


def _normal(seed: int) -> Normal:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def perceptron_statement(normal: Normal) -> Record:
    """Primal against dual perceptron."""
    examples, queries = normal(60, 8), normal(40, 8)
    labels = (examples @ normal(8)).sign()
    primal = perceptron.train_primal(examples, labels)(queries)
    return Record(
        "A perceptron's weight vector is a sum over the examples it got wrong; its output is attention to them.",
        AIZERMAN,
        "relative error of dual against primal outputs, 60 examples, 5 rounds",
        relative_error(perceptron.train_dual(examples, labels)(queries), primal),
        "softmax in place of the dot product",
        relative_error(perceptron.train_dual(examples, labels, kernel=perceptron.softmax_kernel)(queries), primal),
        exact=True,
    )


def _train_recorded(normal: Normal, **options: Any) -> tuple[nn.Linear, DualRecorder]:
    """A layer in the middle of a network, 10 steps of SGD."""
    below, layer, above = (nn.Linear(6, 6).double() for _ in range(3))
    with torch.no_grad():  # from our own generator: the global one is the caller's
        for parameter in (*below.parameters(), *layer.parameters(), *above.parameters()):
            parameter.copy_(normal(*parameter.shape) / 3)
    optimizer = torch.optim.SGD([*below.parameters(), *layer.parameters(), *above.parameters()], **options)
    with DualRecorder(layer) as recorder:
        for _ in range(10):
            loss = (above(torch.tanh(layer(torch.tanh(below(normal(8, 6)))))) - normal(8, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            recorder.end_step(SgdRule.of(optimizer, layer.weight))
            optimizer.step()
    return layer, recorder


def dual_form_statement(normal: Normal) -> Record:
    """Plain SGD in its dual form, and the examples forgotten."""
    layer, recorder = _train_recorded(normal, lr=0.3)
    x = normal(50, 6)
    with torch.no_grad():
        output, untrained = layer(x), x @ recorder.initial_weight.T + layer.bias
        value = relative_error(recorder.dual_layer()(x), output)
    return Record(
        "A linear layer trained by SGD is its initial self plus linear attention to its training examples.",
        IRIE,
        "relative error of W_0 x + LinearAttn(E, X, x) against the trained layer, 10 steps",
        value,
        "no attention to the examples",
        relative_error(untrained, output),
        exact=True,
    )


def dual_form_momentum_statement(normal: Normal) -> Record:
    """SGD with momentum and weight decay, accounted for or not."""
    layer, recorder = _train_recorded(normal, lr=0.1, momentum=0.9, weight_decay=0.05)
    x = normal(50, 6)
    plain = recorder.dual_layer([step.rule.plain() for step in recorder.steps])
    with torch.no_grad():
        output = layer(x)
    return Record(
        "The same with momentum and weight decay, with other weights of the examples.",
        f"{IRIE}; weights derived here",
        "relative error with the weights that momentum 0.9 and decay 0.05 imply",
        relative_error(recorder.dual_layer()(x), output),
        "momentum and decay not accounted for",
        relative_error(plain(x), output),
        exact=True,
    )


def _head_tensors(normal: Normal) -> tuple[Tensor, Heads, Heads, Heads]:
    """Query vectors; keys and values of own tokens, of demonstrations, and of both."""
    own, shown = (Heads(*(normal(4, tokens, 8) for _ in range(3))) for tokens in (9, 50))
    return own.query, own, shown, Heads(*(torch.cat(pair, dim=1) for pair in zip(shown, own, strict=True)))


def linear_attention_statement(normal: Normal) -> Record:
    """W_ZSL + dW_ICL against relaxed and against softmax attention."""
    query, own, shown, both = _head_tensors(normal)
    claimed = query @ (weight_update(own.key, own.value) + weight_update(shown.key, shown.value)).transpose(1, 2)
    softmax = softmax_attention(query, both.key, both.value)
    factor = (claimed * softmax).sum() / claimed.square().sum()  # unscaled it would be a hundred times too large
    return Record(
        "Linear attention to demonstrations is a change of weights: (W_ZSL + dW_ICL) q.",
        DAI,
        "relative error against attention without softmax, 4 heads, 50 demonstration tokens",
        relative_error(claimed, relaxed_attention(query, both.key, both.value)),
        "softmax attention, after the best common factor",
        relative_error(factor * claimed, softmax),
        exact=True,
    )


def softmax_statement(normal: Normal) -> Record:
    """The exact decomposition of softmax attention."""
    query, own, shown, _ = _head_tensors(normal)
    seen = softmax_change(query, own, shown)
    return Record(
        "Softmax attention changes by the demonstrations' share of attention times (their output - zero-shot output).",
        "follows from the softmax",
        "relative error of the product against the change",
        relative_error(seen.share[..., None] * (seen.demonstrations - seen.zero_shot), seen.change),
        "demonstrations simply added (share times their output)",
        relative_error(seen.share[..., None] * seen.demonstrations, seen.change),
        exact=True,
    )


def construction_statement(normal: Normal) -> Record:
    """One to five constructed layers against explicit descent on 100 tasks."""
    generator = torch.Generator().manual_seed(int(normal(1).abs() * 1e6))
    task = random_regression(100, 12, 6, 2, generator=generator)
    worst, wrong = 0.0, float("inf")
    for depth in range(1, 6):
        rates = torch.linspace(0.3, 1.0, depth, dtype=torch.float64)
        layers = [gradient_step_layer(6, 2, 12, rate) for rate in rates.tolist()]
        doubled = [gradient_step_layer(6, 2, 12, 2 * rate) for rate in rates.tolist()]
        worst = max(worst, relative_error(predict(layers, task), gradient_descent(task, rates)))
        wrong = min(wrong, relative_error(predict(doubled, task), gradient_descent(task, rates)))
    return Record(
        "L layers of linear self-attention with the constructed weights are L steps of gradient descent.",
        OSWALD,
        "largest relative error of predictions over L = 1..5, 100 random regression tasks",
        worst,
        "P twice as large",
        wrong,
        exact=True,
    )


def construction_plus_statement(normal: Normal) -> Record:
    """The same for GD++; plain descent as the broken case."""
    generator = torch.Generator().manual_seed(int(normal(1).abs() * 1e6))
    task = random_regression(100, 12, 6, 2, generator=generator)
    worst, wrong = 0.0, float("inf")
    for depth in range(2, 6):
        rates = torch.linspace(0.3, 1.0, depth, dtype=torch.float64)
        gammas = torch.full_like(rates, 0.4)
        pairs = zip(rates.tolist(), gammas.tolist(), strict=True)
        prediction = predict([gradient_step_layer(6, 2, 12, *pair) for pair in pairs], task)
        worst = max(worst, relative_error(prediction, gradient_descent_plus(task, rates, gammas)))
        wrong = min(wrong, relative_error(prediction, gradient_descent(task, rates)))
    return Record(
        "With inputs transformed as well (GD++), the layers are gradient descent with a preconditioner.",
        f"{OSWALD}; preconditioner derived here",
        "largest relative error of predictions over L = 2..5, 100 random regression tasks",
        worst,
        "no preconditioner (plain gradient descent)",
        wrong,
        exact=True,
    )


def implicit_update_statement(normal: Normal) -> Record:
    """An MLP without context and with W + dW, at its own token and at another."""
    weight, bias, above = normal(32, 8), normal(32), normal(8, 32)
    without, with_context = normal(5, 8), normal(5, 8)

    def block(first: Tensor, x: Tensor) -> Tensor:  # (5, 32, 8), (5, 8) -> (5, 8)
        return torch.tanh((first @ x[..., None])[..., 0] + bias) @ above.T

    updated = weight + implicit_update(weight, without, with_context)
    truth = block(weight.expand_as(updated), with_context)
    return Record(
        "For the MLP behind attention, a context is the rank-one update dW = (W dA) A^T / |A|^2 of its first matrix.",
        DHERIN,
        "relative error of the updated block without context against the block with context, 5 tokens",
        relative_error(block(updated, without), truth),
        "every token with the update of another token",
        relative_error(block(updated.roll(1, dims=0), without), truth),
        exact=True,
    )


def momentum_statement(normal: Normal) -> Record:
    """The scan against the definition."""
    values, eta = normal(2, 3, 40, 8), 0.8
    definition = momentum.decay_matrix(40, eta) @ values
    cut = torch.cat([momentum.decayed_sum(part, eta)[0] for part in values.chunk(2, dim=2)], dim=2)
    return Record(
        "Momentum attention adds sum over i < t of eta^(t-i) v_i; a scan in log2(T) additions computes it.",
        DAI,
        "relative error of the scan against the (T x T) matrix of decays, T = 40, eta = 0.8",
        relative_error(momentum.decayed_sum(values, eta)[0], definition),
        "state not carried from the first half to the second",
        relative_error(cut, definition),
        exact=True,
    )


EXACT_STATEMENTS: tuple[Callable[[Normal], Record], ...] = (
    perceptron_statement,
    dual_form_statement,
    dual_form_momentum_statement,
    linear_attention_statement,
    softmax_statement,
    construction_statement,
    construction_plus_statement,
    implicit_update_statement,
    momentum_statement,
)
