"""How often the verdicts are wrong: results without any effect, made at random and judged like real ones.

    python -m examples.verdict_rates --repeats 1000

prints, for every form of claim, the rate of a false "holds" and of a false "does not hold", and how often the 95 %
intervals contain the truth. Both rates should be at most 2.5 % and the coverage at least 93 %.

The nulls are the hardest ones: for "holds" every place but those that must not decide has a strong effect; for "does
not hold" likewise on the other side.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairseq_icl.replication.report.claims import FAILS, HOLDS, judge
from fairseq_icl.replication.report.effects import Sample
from fairseq_icl.replication.report.published import Claim, Term

EXAMPLES, LAYERS, STRONG = 60, 6, 50.0
SHARE, CHANCE = 0.9, 0.7
Values = dict[str, np.ndarray]
"""Metric -> (seeds, examples, layers) on one dataset, NaN where not defined."""


@dataclass
class Made:
    """Evidence out of arrays."""

    values: dict[str, Values]
    datasets: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.datasets = list(self.values)

    def sample(self, term: Term, dataset: str) -> Sample | None:
        """As `Evidence` says."""
        values = self.values[dataset].get(term.metric)
        if values is None:
            return None
        return Sample(tuple((seed, 0) for seed in range(len(values))), np.arange(values.shape[1]), values)


@dataclass(frozen=True)
class Form:
    """A form of claim, and how results without an effect are made for it."""

    name: str
    claim: Claim
    make: Callable[[np.random.Generator, int, float, float], Values]
    """(generator, seeds, effect, spread over seeds) -> the values of a dataset."""
    truth: float = 0.0


def numbers(random: np.random.Generator, seeds: int, effect: float, spread: float, layers: int = 1) -> Values:
    """A paired difference: what a seed and an example add to it, and what only both together do."""
    common = random.standard_normal((1, EXAMPLES, 1))
    of_seeds = spread * random.standard_normal((seeds, 1, layers))
    of_examples = 0.3 * random.standard_normal((1, EXAMPLES, layers))
    rest = 0.3 * random.standard_normal((seeds, EXAMPLES, layers))
    return {"m": common + effect + of_seeds + of_examples + rest, "n": common + 0 * rest}


def in_layers(random: np.random.Generator, seeds: int, effect: float, spread: float) -> Values:
    """The same in several layers."""
    return numbers(random, seeds, effect, spread, LAYERS)


def shares(random: np.random.Generator, seeds: int, effect: float, spread: float) -> Values:
    """Shares of a few examples that vary over seeds, so that all or none of them is common."""
    size = SHARE * (1 - SHARE) / (0.03 * spread + 1e-3) ** 2 - 1  # of a beta distribution with that spread
    rate = random.beta(SHARE * size, (1 - SHARE) * size, (seeds, 1, 1)) if abs(effect) < 1 else effect
    asked = np.where(random.random((seeds, EXAMPLES, 1)) < 0.15, 1.0, np.nan)
    return {"rec2ftp": asked * (random.random((seeds, EXAMPLES, 1)) < rate)}


def against_chance(random: np.random.Generator, seeds: int, effect: float, spread: float) -> Values:
    """A share of some of the examples against the share of all of them; without an effect some are drawn by chance."""
    rates = np.clip(CHANCE + 0.1 * spread * random.standard_normal((seeds, 1, 1)), 0, 1)
    icl = (random.random((seeds, EXAMPLES, 1)) < rates).astype(float)
    chosen = random.random((seeds, EXAMPLES, 1)) < 0.3 * (1 if abs(effect) < 1 else (icl if effect > 0 else 1 - icl))
    return {"rec2ftp": np.where(chosen, icl, np.nan), "rec2ftp_chance": icl}


def accuracies(random: np.random.Generator, seeds: int, effect: float, spread: float) -> Values:
    """Two accuracies and what their difference is divided by."""
    rates = np.clip(0.6 + 0.1 * spread * random.standard_normal((seeds, 1, 2)), 0, 1)
    right = random.random((1, EXAMPLES, 1)) * 0.5 + 0.5 * random.random((seeds, EXAMPLES, 2)) < rates
    zsl = np.repeat(random.random((1, EXAMPLES, 1)) < 0.5, seeds, axis=0)
    return {"accuracy_icl": right[..., :1] * 1.0, "accuracy_ft": right[..., 1:] * 1.0, "accuracy_zsl": zsl * 1.0}


def claim(where: str, left: str, right: str | None = None, **more: Any) -> Claim:
    """A claim as the YAML file has it."""
    terms = {"left": {"metric": left}} | ({"right": {"metric": right}} if right else {})
    said = {"name": left, "says": "", "source": "dai2023", "asks": {"above": 0}, "where": where}
    return Claim.model_validate({**said, **terms, **more})


FORMS = (
    Form("every", claim("every", "m", "n"), numbers),
    Form("most", claim("most", "m", "n"), numbers),
    Form("average", claim("average", "m", "n"), numbers),
    Form("every layer", claim("every", "m", "n", by="layer", layers={"of": LAYERS, "except": []}), in_layers),
    Form("every, a share", claim("every", "rec2ftp", asks={"above": SHARE}), shares, SHARE),
    Form("every, a share against chance", claim("every", "rec2ftp", "rec2ftp_chance"), against_chance),
    Form(
        "average, a quotient",
        claim("average", "accuracy_icl", "accuracy_ft", over={"metric": "accuracy_zsl"}),
        accuracies,
    ),
)
SPREADS = {"equal": (0.3, 1.0), "unequal": (0.3, 10.0), "of examples": (0.0, 1.0)}
"""Spread over seeds, and how much larger it is at the first place."""


@dataclass(frozen=True)
class Rates:
    """Shares of the repeats."""

    holds: float
    fails: float
    of_places: float
    of_average: float


def rates(form: Form, spread: str, seeds: int, places: int, repeats: int, seed: int = 0) -> Rates:
    """How often a claim of this form is decided though nothing is there, and the coverage of its intervals."""
    random = np.random.default_rng([seed, seeds, places, len(form.name), len(spread)])
    needed = {"every": places, "most": places // 2 + 1, "average": 1}[form.claim.where]
    strong = 0 if form.claim.where == "average" or form.claim.by == "layer" else places - needed
    certain = 0 if form.claim.where == "average" or form.claim.by == "layer" else needed - 1
    effects = {HOLDS: [STRONG] * certain, FAILS: [-STRONG] * strong}
    counts, inside = {HOLDS: 0, FAILS: 0}, np.zeros((2, 2))
    for _ in range(repeats):
        for status, given in effects.items():
            made = _results(form, spread, seeds, [0.0] * (places - len(given)) + given, random)
            verdict = judge(form.claim, made)
            counts[status] += verdict.status == status
            if status == FAILS:
                found = [effect for effect, _ in verdict.places[: places - strong]]
                inside += _covered(found, form.truth, 0)
                if strong == 0 and verdict.average is not None:
                    inside += _covered([verdict.average], form.truth, 1)
    of_places, of_average = np.divide(inside[:, 0], inside[:, 1], out=np.full(2, np.nan), where=inside[:, 1] > 0)
    return Rates(counts[HOLDS] / repeats, counts[FAILS] / repeats, of_places, of_average)


def _results(form: Form, spread: str, seeds: int, effects: list[float], random: np.random.Generator) -> Made:
    size, larger = SPREADS[spread]
    sizes = [size * (larger if place == 0 else 1) for place in range(len(effects))]
    pairs = zip(effects, sizes, strict=True)
    return Made({f"d{i}": form.make(random, seeds, effect, size) for i, (effect, size) in enumerate(pairs)})


def _covered(effects: list[Any], truth: float, row: int) -> np.ndarray:
    """(of places, of the average) x (inside, all)"""
    counts = np.zeros((2, 2))
    for low, high in (effect.interval() for effect in effects):
        counts[row] += low <= truth + 1e-12 and high >= truth - 1e-12, 1
    return counts


def table(repeats: int, seeds: tuple[int, ...] = (2, 3, 5), places: tuple[int, ...] = (2, 6)) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| form | spread over seeds | places | " + " | ".join(f"{number} seeds" for number in seeds) + " |"
    yield "|---|---|---|" + "---|" * len(seeds)
    for form in FORMS:
        for spread in SPREADS:
            for number in places:
                cells = [shown(rates(form, spread, count, number, repeats)) for count in seeds]
                yield f"| {form.name} | {spread} | {number} | {' | '.join(cells)} |"


def shown(found: Rates) -> str:
    """False holds, false does not hold; coverage at the places and on average; in percent."""
    parts = [f"{100 * rate:.1f}" for rate in (found.holds, found.fails, found.of_places, found.of_average)]
    return f"{parts[0]} / {parts[1]}; {parts[2]} / {parts[3]}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m examples.verdict_rates", description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    arguments = parser.parse_args()
    for line in table(arguments.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
