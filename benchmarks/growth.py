"""How cost grows with what an experiment may have more of, each sweep with its exponent.

A sweep changes one thing and keeps the rest: 32 demonstrations of about 26 tokens, queries of about 30, two labels of
one token. Validation sets of several sizes are observed and compared in processes of their own, because their memory
is measured too: `python -m benchmarks.growth SHAPE EXAMPLES`, the shape as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch import nn

from benchmarks import last_line_of
from benchmarks.measure import clock, interleave, peak_bytes_of, seconds
from benchmarks.report import BenchFindings, Limit
from benchmarks.scoring import run_batches, sample_by_length, score_all
from benchmarks.shapes import Shape, model_of, random_prompts
from benchmarks.sweeps import VALIDATION, SweepPoint, slope
from fairseq_icl.api import compare, observe
from fairseq_icl.models import Model
from fairseq_icl.observing import Observer

QUERIES = 34
OPTION_TOKENS = 3
MEBI = 2**20


@dataclass(frozen=True)
class Sweep:
    """What is swept, over which numbers, and what a number means for the prompts."""

    name: str
    values: tuple[int, ...]
    prompts: Callable[[int], Mapping[str, int]]
    """Arguments of `random_prompts`."""
    authors: bool = False
    """Whether the authors' way, which knows labels of one token only, runs along."""


SWEEPS = (
    Sweep("demonstrations", (8, 16, 32, 64), lambda x: {"num_demonstrations": x}, authors=True),
    Sweep("tokens in a query", (15, 30, 60, 120), lambda x: {"query_tokens": x}, authors=True),
    # Options that share no token of their labels need a sequence each: few queries, or it takes minutes.
    Sweep(
        f"options of {OPTION_TOKENS} tokens",
        (2, 4, 8),
        lambda x: {"num_options": x, "label_tokens": OPTION_TOKENS, "num_queries": 10},
    ),
    Sweep("classes", (2, 4, 8, 16), lambda x: {"num_options": x}),
)
LAYERS = "layers"
LAYER_SHARES = (4, 2, 1)
VALIDATION_SIZES, QUICK_VALIDATION_SIZES = (100, 200, 400, 800), (100, 200, 400)
"""More than the examples that are compared at a time: below, what metrics make in between grows too."""
MEMORY_OF_AN_EXAMPLE = 20
"""kB a layer that a validation example may add to the peak: its rows of the table, but not what was observed of it."""


@dataclass
class Turns:
    """Ways that are to take turns, and what is already known of their points."""

    ways: dict[str, Callable[[], object]] = field(default_factory=dict)
    points: list[tuple[str, int, int, float, int]] = field(default_factory=list)
    """Sweep, x, context tokens, seconds of the prefix, queries."""

    def add(self, sweep: str, x: int, model: Model, shape: Shape, sizes: Mapping[str, int], authors: bool) -> None:
        """Another point: the prefix runs now, the queries when all ways do."""
        arguments: dict[str, Any] = {"num_queries": QUERIES, **sizes}
        prompts = random_prompts(shape, **arguments)
        observer = Observer(model, prompts, in_context=True)
        prefix = seconds(lambda: observer.prefix)
        self.points.append((sweep, x, len(prompts.context), prefix, len(prompts.queries)))
        self.ways[f"ours {sweep} {x}"] = partial(run_batches, observer)
        if authors:
            one = sample_by_length(prompts.queries, 1)
            self.ways[f"authors {sweep} {x}"] = partial(score_all, model, one, prompts.context)

    def run(self, rounds: int) -> list[SweepPoint]:
        """All ways in turn."""
        best = interleave(self.ways, rounds)
        return [
            SweepPoint(sweep, x, context, prefix, best[f"ours {sweep} {x}"] / queries, best.get(f"authors {sweep} {x}"))
            for sweep, x, context, prefix, queries in self.points
        ]


def measure_growth(findings: BenchFindings, shape: Shape, model: Model, rounds: int, quick: bool) -> None:
    """Points of all sweeps; limits and notes on what they show."""
    for sweep in SWEEPS:
        turns = Turns()  # one for each sweep: every point holds a prefix, which is large
        for x in sweep.values:
            turns.add(sweep.name, x, model, shape, sweep.prompts(x), sweep.authors)
        findings.points += turns.run(rounds)
    findings.points += layer_points(shape, model, rounds)
    findings.points += [validation_point(shape, n) for n in (QUICK_VALIDATION_SIZES if quick else VALIDATION_SIZES)]
    judge_demonstrations(findings)
    judge_memory(findings, shape)


def layer_points(shape: Shape, model: Model, rounds: int) -> list[SweepPoint]:
    """The first quarter and half of the layers, and all: models as wide as the given one, with its weights."""
    points: list[SweepPoint] = []
    for share in LAYER_SHARES:
        if number := shape.layers // share:
            with first_layers(model, number):  # the prefix and the queries run with as many layers
                turns = Turns()
                turns.add(LAYERS, number, model, shape, {}, authors=False)
                points += turns.run(rounds)
    return points


@contextmanager
def first_layers(model: Model, number: int) -> Iterator[None]:
    """Inside, the model ends after its first layers."""
    decoder = model.lm.decoder
    layers = decoder.layers
    decoder.layers = nn.ModuleList(list(layers)[:number])
    try:
        yield
    finally:
        decoder.layers = layers


def validation_point(shape: Shape, examples: int) -> SweepPoint:
    """ZSL, ICL and FT observed and compared on so many examples, in a new process."""
    return SweepPoint(**json.loads(last_line_of("growth", json.dumps(asdict(shape)), str(examples))))


def main(argv: list[str]) -> None:
    """Measure one validation set and print its point as JSON. FT has the base model's weights: cost is the same."""
    shape, examples = Shape(**json.loads(argv[0])), int(argv[1])
    model = model_of(shape)
    times = {"observe": 0.0, "compare": 0.0}

    def run(num_queries: int, num_demonstrations: int) -> int:
        prompts = random_prompts(shape, num_queries=num_queries, num_demonstrations=num_demonstrations)
        start = clock()
        seen = [observe(model, prompts, in_context=in_context) for in_context in (False, True, False)]
        times["observe"] = clock() - start
        times["compare"] = seconds(lambda: compare(prompts, *seen))
        return len(prompts.context)

    run(2, 1)  # libraries have what they keep
    contexts: list[int] = []
    memory = peak_bytes_of(lambda: contexts.append(run(examples, 32)))
    point = SweepPoint(VALIDATION, examples, contexts[0], None, times["observe"] / examples)
    print(json.dumps(asdict(point) | {"compare": times["compare"] / examples, "memory": memory}))


def judge_demonstrations(findings: BenchFindings) -> None:
    """The limit: a query's cost hardly depends on the demonstrations before it."""
    costs = [point.ours for point in findings.points if point.sweep == SWEEPS[0].name]
    mean = sum(costs) / len(costs)
    spread = max(abs(cost / mean - 1) for cost in costs)
    findings.limits.append(Limit("cost a query from 8 to 64 demonstrations, deviation from its mean", spread, 0.25))
    findings.notes.append(
        f"A query costs {costs[-1] / costs[0]:.2f} times as much after 64 demonstrations as after 8; the limit is on "
        "the deviation from the mean of the four. At the 125m shape the operations alone grow by a factor of 1.3, "
        "because every query token attends to seven times as many."
    )


def judge_memory(findings: BenchFindings, shape: Shape) -> None:
    """The limit: what an example of the validation set adds to the peak, observed and compared."""
    sizes, memory = zip(
        *((point.x, point.memory) for point in findings.points if point.memory is not None), strict=True
    )
    kilobytes = slope(sizes, memory) / 1000
    what = "peak memory that a validation example adds, kB a layer"
    findings.limits.append(Limit(what, kilobytes / shape.layers, MEMORY_OF_AN_EXAMPLE))
    findings.notes.append(
        f"From {sizes[0]} to {sizes[-1]} validation examples peak memory grows by "
        f"{(memory[-1] - memory[0]) / MEBI:.0f} MiB, {kilobytes:.0f} kB an example (least squares): what was observed "
        "lies in files, the table of results does not."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
