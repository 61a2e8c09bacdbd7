"""Every exact statement once as it is claimed and once with a premise removed, as numbers.

All on small random problems in float64; what has to be trained first is in `trained`, what is asked of a real model in
`on_decoder`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.models.attention import decayed_sum
from fairseq_icl.theory.construction import Regression, gradient_descent, gradient_step_layer, predict, random_tasks
from fairseq_icl.theory.dual_form import DualRecorder, Kernel, SgdRule, dot_product, softmax_kernel, train_perceptron
from fairseq_icl.theory.implicit_update import implicit_update
from fairseq_icl.theory.linear_attention import Heads, softmax_attention, softmax_change, weight_update

EXACT = 1e-10  # relative error below which an exact statement counts as confirmed in float64

AIZERMAN = "Aizerman et al. 1964"
IRIE = "Irie et al. 2022, arXiv 2202.05798"
DAI = "Dai et al. 2023, arXiv 2212.10559"
OSWALD = "von Oswald et al. 2023, arXiv 2212.07677"
AHN = "Ahn et al. 2023, arXiv 2306.00297"
MESA = "von Oswald et al. 2023b, arXiv 2309.05858"
CHENG = "Cheng et al. 2024, arXiv 2312.06528"
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
    kind: Literal["exact", "measured", "question"] = "exact"
    per_layer: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of a real model: what to draw by layer

    @property
    def holds(self) -> bool:
        """Exact: below 1e-10, and visibly wrong without the premise. Measured: less than without. Questions: always."""
        if self.kind == "exact":
            return self.value < EXACT < 1e-3 < self.broken
        return self.kind == "question" or self.value < self.broken


Normal = Callable[..., Tensor]  # (*shape) -> standard normal float64 numbers
Pairs = Iterator[tuple[float, float]]  # (error, error without the premise) of one case or several
Errors = Callable[[Normal], Pairs]
EXACT_STATEMENTS: list[tuple[tuple[str, str, str, str], Errors]] = []


def exact(statement: str, source: str, computed: str, premise: str) -> Callable[[Errors], Errors]:
    """Add the decorated function to the exact statements, with its words."""

    def add(errors: Errors) -> Errors:
        EXACT_STATEMENTS.append(((statement, source, computed, premise), errors))
        return errors

    return add


def run_exact(seed: int = 0) -> list[Record]:
    """All exact statements, each on its own random problem, with the largest error and the smallest without premise."""
    records = []
    for (statement, source, computed, premise), errors in EXACT_STATEMENTS:
        generator = Generator().manual_seed(seed)
        value, broken = zip(*errors(partial(torch.randn, generator=generator, dtype=torch.float64)), strict=True)
        records.append(Record(statement, source, computed, max(value), premise, min(broken)))
    return records


@exact(
    "A perceptron's weight vector is a sum over the examples it got wrong; its output is attention to them.",
    AIZERMAN,
    "relative error of dual against primal outputs, 60 examples, 5 rounds",
    "softmax in place of the dot product",
)
def perceptron(normal: Normal) -> Pairs:
    examples, queries = normal(60, 8), normal(40, 8)
    labels = (examples @ normal(8)).sign()
    primal = queries @ train_perceptron(examples, labels)[0]

    def error(kernel: Kernel) -> float:
        return relative_error(kernel(examples, queries) @ train_perceptron(examples, labels, kernel)[0], primal)

    yield error(dot_product), error(softmax_kernel)


def _train_recorded(normal: Normal, **options: Any) -> tuple[DualRecorder, Tensor, Tensor]:
    """A layer in the middle of a network, recorded in 10 steps of SGD; inputs (50, 6), and its outputs for them."""
    below, layer, above = (nn.Linear(6, 6).double() for _ in range(3))
    parameters = [*below.parameters(), *layer.parameters(), *above.parameters()]
    with torch.no_grad():  # from our own generator: the global one is the caller's
        for parameter in parameters:
            parameter.copy_(normal(*parameter.shape) / 3)
    optimizer = torch.optim.SGD(parameters, **options)
    with DualRecorder(layer) as recorder:
        for _ in range(10):
            loss = (above(torch.tanh(layer(torch.tanh(below(normal(8, 6)))))) - normal(8, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            recorder.end_step(SgdRule.of(optimizer, layer.weight))
            optimizer.step()
    x = normal(50, 6)
    return recorder, x, layer(x).detach()


@exact(
    "A linear layer trained by SGD is its initial self plus linear attention to its training examples.",
    IRIE,
    "relative error of W_0 x + LinearAttn(E, X, x) against the trained layer, 10 steps",
    "no attention to the examples",
)
def trained_by_sgd(normal: Normal) -> Pairs:
    recorder, x, output = _train_recorded(normal, lr=0.3)
    untrained = x @ recorder.initial_weight[:, :-1].T + recorder.layer.bias.detach()
    yield relative_error(recorder.dual_layer()(x), output), relative_error(untrained, output)


@exact(
    "The same with momentum and weight decay, with other weights of the examples.",
    f"{IRIE}; weights derived here",
    "relative error with the weights that momentum 0.9 and decay 0.05 imply",
    "momentum and decay not accounted for",
)
def trained_with_momentum(normal: Normal) -> Pairs:
    recorder, x, output = _train_recorded(normal, lr=0.1, momentum=0.9, weight_decay=0.05)
    plain = recorder.dual_layer([SgdRule(step.rule.lr) for step in recorder.steps])
    yield relative_error(recorder.dual_layer()(x), output), relative_error(plain(x), output)


def _head_tensors(normal: Normal) -> tuple[Tensor, Heads, Heads, Heads]:
    """Query vectors; keys and values of own tokens, of demonstrations, and of both."""
    own, shown = (Heads(*(normal(4, tokens, 8) for _ in range(3))) for tokens in (9, 50))
    return own.query, own, shown, Heads(*(torch.cat(pair, dim=1) for pair in zip(shown, own, strict=True)))


@exact(
    "Linear attention to demonstrations is a change of weights: (W_ZSL + dW_ICL) q.",
    DAI,
    "relative error against attention without softmax, 4 heads, 50 demonstration tokens",
    "softmax attention, after the best common factor",
)
def linear_attention(normal: Normal) -> Pairs:
    query, own, shown, both = _head_tensors(normal)
    claimed = query @ (weight_update(own.key, own.value) + weight_update(shown.key, shown.value)).transpose(1, 2)
    softmax = softmax_attention(query, both.key, both.value)
    factor = (claimed * softmax).sum() / claimed.square().sum()  # unscaled it would be a hundred times too large
    relaxed = dot_product(both.key, query) @ both.value
    yield relative_error(claimed, relaxed), relative_error(factor * claimed, softmax)


@exact(
    "Softmax attention changes by the demonstrations' share of attention times (their output - zero-shot output).",
    "follows from the softmax",
    "relative error of the product against the change",
    "demonstrations simply added (share times their output)",
)
def softmax_decomposition(normal: Normal) -> Pairs:
    seen = softmax_change(*_head_tensors(normal)[:3])
    share = seen.share[..., None]
    exactly = share * (seen.demonstrations - seen.zero_shot)
    yield relative_error(exactly, seen.change), relative_error(share * seen.demonstrations, seen.change)


def hundred_tasks(normal: Normal) -> Regression:
    """100 regression tasks, 12 examples of 6 inputs and 2 outputs each."""
    return random_tasks(100, 12, 6, 2, generator=Generator().manual_seed(int(normal(1).abs() * 1e6)))


@exact(
    "L layers of linear self-attention with the constructed weights are L steps of gradient descent.",
    OSWALD,
    "largest relative error of predictions over L = 1..5, 100 random regression tasks",
    "P twice as large",
)
def construction(normal: Normal) -> Pairs:
    task = hundred_tasks(normal)
    for depth in range(1, 6):
        rates = torch.linspace(0.3, 1.0, depth, dtype=torch.float64)
        stacks = ([gradient_step_layer(6, 2, 12, by * rate) for rate in rates.tolist()] for by in (1, 2))
        right, wrong = (relative_error(predict(stack, task), gradient_descent(task, rates)) for stack in stacks)
        yield right, wrong


@exact(
    "With inputs transformed as well (GD++), the layers are gradient descent with a preconditioner.",
    f"{OSWALD}; preconditioner derived here",
    "largest relative error of predictions over L = 2..5, 100 random regression tasks",
    "no preconditioner (plain gradient descent)",
)
def construction_plus(normal: Normal) -> Pairs:
    task = hundred_tasks(normal)
    for depth in range(2, 6):
        rates = torch.linspace(0.3, 1.0, depth, dtype=torch.float64)
        prediction = predict([gradient_step_layer(6, 2, 12, rate, 0.4) for rate in rates.tolist()], task)
        plus, plain = (gradient_descent(task, rates, gammas) for gammas in (torch.full_like(rates, 0.4), None))
        yield relative_error(prediction, plus), relative_error(prediction, plain)


@exact(
    "For the MLP behind attention, a context is the rank-one update dW = (W dA) A^T / |A|^2 of its first matrix.",
    DHERIN,
    "relative error of the updated block without context against the block with context, 5 tokens",
    "every token with the update of another token",
)
def context_as_update(normal: Normal) -> Pairs:
    weight, bias, above = normal(32, 8), normal(32), normal(8, 32)
    without, with_context = normal(5, 8), normal(5, 8)

    def block(first: Tensor, x: Tensor) -> Tensor:  # (5, 32, 8), (5, 8) -> (5, 8)
        return torch.tanh((first @ x[..., None])[..., 0] + bias) @ above.T

    updated = weight + implicit_update(weight, without, with_context)
    truth = block(weight.expand_as(updated), with_context)
    shifted = block(updated.roll(1, dims=0), without)
    yield relative_error(block(updated, without), truth), relative_error(shifted, truth)


@exact(
    "Momentum attention adds sum over i < t of eta^(t-i) v_i; a scan in log2(T) additions computes it.",
    DAI,
    "relative error of the scan against the (T x T) matrix of decays, T = 40, eta = 0.8",
    "state not carried from the first half to the second",
)
def momentum(normal: Normal) -> Pairs:
    values, eta = normal(2, 3, 40, 8), 0.8
    distance = torch.arange(40)[:, None] - torch.arange(40)  # (T, T) t - i
    definition = torch.where(distance > 0, eta ** distance.clamp_min(1).double(), 0.0) @ values
    cut = torch.cat([decayed_sum(part, eta)[0] for part in values.chunk(2, dim=2)], dim=2)
    yield relative_error(decayed_sum(values, eta)[0], definition), relative_error(cut, definition)


@exact(
    "A head whose values are its keys descends a loss in context: o_ICL - o_ZSL = -dL/dq, L(q) = log(1 - share(q)).",
    "derived here (docs/theory.md)",
    "relative error of -dL/dq by autograd against the change of softmax attention",
    "values of their own, after the best common factor",
)
def loss_in_context(normal: Normal) -> Pairs:
    query, own, shown, _ = _head_tensors(normal)
    query = query.requires_grad_()
    tied = softmax_change(query, own._replace(value=own.key), shown._replace(value=shown.key), scale=1.0)
    (descent,) = torch.autograd.grad(-torch.log1p(-tied.share).sum(), query)
    free = softmax_change(query, own, shown, scale=1.0).change.detach()
    factor = (descent * free).sum() / descent.square().sum()
    yield relative_error(descent, tied.change.detach()), relative_error(factor * descent, free)
