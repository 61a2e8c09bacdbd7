"""The size of an effect and how well it is known: the statistics behind the verdicts.

An effect is a mean over draws of demonstrations (seeds) of a mean over validation examples, the same ones at every
seed. Its variance has two parts: that of the seeds, (spread of the seeds' values)^2 / S with S - 1 degrees of freedom,
and that of the examples, by leaving out one at a time (jackknife). Half the interval at a level is

    sqrt( t(S - 1)^2 variance of seeds  +  t(N - 1)^2 variance of examples ),     t: Student's quantile at that level

whose coverage is at least the nominal one (Banerjee 1960). A mean over datasets adds up each part over the datasets;
its degrees of freedom are Satterthwaite's, so that one dataset that varies more than the others counts as what it is,
and half of them: out of two or three seeds they come out too large too often (examples/verdict_rates.py).

Shares (of predictions) get four further examples, two on either side (Agresti and Coull): 0 of n and n of n are no
certainty. An interval never leaves the range that the quantity can have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtr, stdtrit  # light, unlike scipy.stats

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.evidence import Sample, defined_mean

LEVEL, POWER = 0.05, 0.8
FEWEST = 10
"""Examples that a share has to be of, at least, to decide anything."""
MOST_SEEDS, MOST_EXAMPLES = 30, 100_000
FURTHER = np.array([(1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)], dtype=float)
"""What a claim's left, right and over see at the four examples that shares get: unrelated to each other."""


@dataclass(frozen=True)
class Part:
    """A variance of the mean with its degrees of freedom."""

    variance: float
    freedom: float

    def half(self, level: float) -> float:
        """Half the interval that it would give alone."""
        return float(stdtrit(self.freedom, 1 - level / 2)) * math.sqrt(self.variance) if self.variance else 0.0


@dataclass(frozen=True)
class Effect:
    """An effect at one place (a dataset, a layer) or on average."""

    place: str
    value: float
    seeds: int  # the smallest number of draws of demonstrations that it is a mean over
    examples: int  # 0: only means over examples are known
    of_seeds: Part
    of_examples: Part
    centre: float  # of the interval: the value, drawn towards the middle where it is one of shares
    limits: tuple[float, float]  # what the quantity can be
    count: int | None = None  # of shares: how many examples they are of

    @property
    def problem(self) -> str:
        """Why there is no interval; empty if there is one."""
        if self.count is not None and self.count < FEWEST:
            return f"too few: {self.count} examples to take a share of, {FEWEST} are needed"
        if self.seeds < 2 or self.examples == 1:
            return "one seed has no spread" if self.seeds < 2 else "one example has no spread"
        return "" if self.of_seeds.variance > 0 or self.count is not None else "its seeds do not differ at all"

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The interval at a two-sided level; all that is possible if there is none."""
        if self.problem:
            return self.limits
        half = math.hypot(self.of_seeds.half(level), self.of_examples.half(level))
        low, high = max(self.centre - half, self.limits[0]), min(self.centre + half, self.limits[1])
        return min(low, self.value), max(high, self.value)

    def wish(self, distance: float, level: float) -> str:
        """How many seeds, or examples, would tell it from a bound so far away with a power of 80 %, if it stays so."""
        normal = float(stdtrit(1e9, 1 - level / 2) + stdtrit(1e9, POWER))
        variance, wishes = self.of_examples.variance, []
        if distance == 0 or variance * normal**2 > distance**2 / 2:  # examples alone keep it open: half of the room
            examples = self.examples * 2 * variance * (normal / distance) ** 2 if distance else math.inf
            if examples > MOST_EXAMPLES:
                return "too close to call"
            wishes, variance = [f"{math.ceil(examples):,} examples"], (distance / normal) ** 2 / 2
        for seeds in range(self.seeds, MOST_SEEDS + 1):
            if self._power(seeds, distance, level, variance) >= POWER:
                wishes = [f"{seeds} seeds", *wishes] if seeds > self.seeds else wishes
                return f"at least {' and '.join(wishes)} for a power of 80 %" if wishes else "a few more seeds"
        return f"more than {MOST_SEEDS} seeds"

    def _power(self, seeds: int, distance: float, level: float, of_examples: float) -> float:
        freedom = self.of_seeds.freedom * (seeds - 1) / max(1, self.seeds - 1)
        parts = Part(self.of_seeds.variance * self.seeds / seeds, freedom), Part(of_examples, self.of_examples.freedom)
        error = math.sqrt(parts[0].variance + parts[1].variance)
        bound = math.hypot(parts[0].half(level), parts[1].half(level))
        return 1 - float(nctdtr(freedom, distance / error, bound / error)) if error else 1.0


def average(place: str, effects: Sequence[Effect]) -> Effect:
    """The mean of effects whose seeds and examples are independent of each other."""
    counts = [effect.count for effect in effects if effect.count is not None]
    value, centre, low, high = np.mean([(e.value, e.centre, *e.limits) for e in effects], axis=0).tolist()
    return Effect(
        place,
        value,
        min(effect.seeds for effect in effects),
        min(effect.examples for effect in effects),
        satterthwaite([effect.of_seeds for effect in effects]),
        satterthwaite([effect.of_examples for effect in effects]),
        value + (centre - value) / len(effects),  # drawn by further examples, of which one place's are enough
        (low, high),
        min(counts) if counts else None,
    )


def satterthwaite(parts: Sequence[Part]) -> Part:
    """The variance of a mean of independent values, with half the approximate degrees of freedom."""
    total = math.fsum(part.variance for part in parts)
    squares = math.fsum(part.variance**2 / part.freedom for part in parts)
    freedom = total**2 / squares / 2 if squares else 0.0
    return Part(total / len(parts) ** 2, max(freedom, min(part.freedom for part in parts)))


def effect_of(samples: Sequence[Sample], metrics: Sequence[str], place: str) -> Effect | None:
    """left, left - right or (left - right) / over on a dataset, over all layers; None if no seed has a value."""
    shares = [shown_as(metric)[1] == "percent" for metric in metrics]
    examples = np.unique(np.concatenate([sample.examples for sample in samples]))
    terms = [_on(examples, sample) for sample in samples]  # (S, N) each
    raw = _quantity([defined_mean(term, 1) for term in terms])  # (S,)
    kept = np.isfinite(raw)  # a seed whose quotient has no value (over no example, by 0) says nothing
    if not kept.any():
        return None
    terms, raw, count, of_examples = [term[kept] for term in terms], raw[kept], None, Part(0.0, 1)
    points = raw
    if len(examples):
        defined = [np.isfinite(term) for term in terms]
        count = min((int(d.any(0).sum()) for d, share in zip(defined, shares, strict=True) if share), default=None)
        if count is not None:
            more = [FURTHER[i] if share else np.full(4, np.nan) for i, share in enumerate(shares)]
            terms = [np.hstack([term, np.tile(m, (len(raw), 1))]) for term, m in zip(terms, more, strict=True)]
        points = _quantity([defined_mean(term, 1) for term in terms])
        without = _quantity([_without_each(term) for term in terms]).mean(0)  # (N,)
        jackknife = (len(without) - 1) * float(without.var())
        of_examples = Part(jackknife, max(1, min(int(d.sum(1).mean()) for d in defined) - 1))
    variance = float(points.var(ddof=1)) / len(raw) if len(raw) > 1 else 0.0
    if variance < (1e-12 * np.abs(points).max()) ** 2:  # equal but for the last digits of their sums
        variance = 0.0
    low = [0.0 if share else -1.0 for share in shares]  # a share lies in [0, 1], a similarity in [-1, 1]
    limits = [(low[0], 1.0), (low[0] - 1.0, 1.0 - low[-1]), (-math.inf, math.inf)][len(shares) - 1]
    of_seeds, centre = Part(variance, max(1, len(raw) - 1)), float(points.mean())
    value = float(raw.mean())
    return Effect(place, value, len(raw), len(examples), of_seeds, of_examples, centre, limits, count)


def _on(examples: np.ndarray, sample: Sample) -> np.ndarray:
    """The mean over layers on all of the examples, NaN where not defined; (S, N), or (S, 1) if only means are known."""
    values = defined_mean(sample.values, 2)
    if len(examples) == 0 or len(sample.examples) == len(examples):
        return values
    term = np.full((len(values), len(examples)), np.nan)
    term[:, np.searchsorted(examples, sample.examples)] = values
    return term


def _without_each(term: np.ndarray) -> np.ndarray:
    """The mean over the examples but one, for every one of them: (S, N) -> (S, N)"""
    known = np.isfinite(term)
    filled = np.where(known, term, 0.0)
    number = known.sum(1, keepdims=True) - known
    return (filled.sum(1, keepdims=True) - filled) / np.maximum(number, 1)


def _quantity(terms: Sequence[np.ndarray]) -> np.ndarray:
    difference = terms[0] - terms[1] if len(terms) > 1 else terms[0]
    return difference / np.where(terms[2] == 0, np.nan, terms[2]) if len(terms) > 2 else difference
