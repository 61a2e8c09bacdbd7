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
from functools import cache
from typing import Protocol

import numpy as np
import pandas as pd
from scipy.special import nctdtr, stdtrit  # light, unlike scipy.stats

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.displacement import AT_EQUAL_LENGTH, at_equal_length, sweeps
from fairseq_icl.replication.report.published import Term, authors_runs, inits_of, zero_shot_errors
from fairseq_icl.replication.report.run import Run, plain

LEVEL, POWER = 0.05, 0.8
FEWEST = 10  # examples that a share has to be of, at least, to decide anything
MOST_SEEDS, MOST_EXAMPLES = 30, 100_000
FURTHER = np.array([(1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)], dtype=float)
"""What a claim's left, right and over see at the four examples that shares get: unrelated to each other."""
NO_EXAMPLE = -1
Seed = tuple[int, int]  # and permutation


@dataclass(frozen=True)
class Sample:
    """One metric on one dataset. Seeds see the same examples, so a value has a seed, an example and a layer."""

    seeds: tuple[Seed, ...]
    examples: np.ndarray  # (N,) positions in the validation set; empty if only means are known
    values: np.ndarray  # (S, N, L), or (S, 1, L) of means; NaN where not defined (a quotient leaves examples out)


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
            freedom = self.of_seeds.freedom * (seeds - 1) / max(1, self.seeds - 1)
            of_seeds = Part(self.of_seeds.variance * self.seeds / seeds, freedom)
            error = math.sqrt(of_seeds.variance + variance)
            bound = math.hypot(of_seeds.half(level), Part(variance, self.of_examples.freedom).half(level))
            if not error or 1 - float(nctdtr(freedom, distance / error, bound / error)) >= POWER:
                wishes = [f"{seeds} seeds", *wishes] if seeds > self.seeds else wishes
                return f"at least {' and '.join(wishes)}" if wishes else "a few more seeds"
        return f"more than {MOST_SEEDS} seeds"


def average(place: str, effects: Sequence[Effect]) -> Effect:
    """The mean of effects whose seeds and examples are independent of each other."""
    value, centre, low, high = np.mean([(e.value, e.centre, *e.limits) for e in effects], axis=0).tolist()
    centre = value + (centre - value) / len(effects)  # drawn by further examples, of which one place's are enough
    seeds, examples = min(e.seeds for e in effects), min(e.examples for e in effects)
    of_seeds = satterthwaite([e.of_seeds for e in effects])
    of_examples = satterthwaite([e.of_examples for e in effects])
    count = min((e.count for e in effects if e.count is not None), default=None)
    return Effect(place, value, seeds, examples, of_seeds, of_examples, centre, (low, high), count)


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
    terms = []  # (S, N) each, or (S, 1) if only means are known: the mean over layers, NaN where not defined
    for sample in samples:
        term = values = defined_mean(sample.values, 2)
        if 0 < len(examples) != len(sample.examples):
            term = np.full((len(values), len(examples)), np.nan)
            term[:, np.searchsorted(examples, sample.examples)] = values
        terms.append(term)
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
        means = []
        for term in terms:  # (S, N): the mean over the examples but one, for every one of them
            known, filled = np.isfinite(term), np.where(np.isfinite(term), term, 0.0)
            means.append((filled.sum(1, keepdims=True) - filled) / np.maximum(known.sum(1, keepdims=True) - known, 1))
        without = _quantity(means).mean(0)  # (N,)
        jackknife = (len(without) - 1) * float(without.var())
        of_examples = Part(jackknife, max(1, min(int(d.sum(1).mean()) for d in defined) - 1))
    variance = float(points.var(ddof=1)) / len(raw) if len(raw) > 1 else 0.0
    if variance < (1e-12 * np.abs(points).max()) ** 2:  # equal but for the last digits of their sums
        variance = 0.0
    low = [0.0 if share else -1.0 for share in shares]  # a share lies in [0, 1], a similarity in [-1, 1]
    limits = [(low[0], 1.0), (low[0] - 1.0, 1.0 - low[-1]), (-math.inf, math.inf)][len(shares) - 1]
    of_seeds, value, centre = Part(variance, max(1, len(raw) - 1)), float(raw.mean()), float(points.mean())
    return Effect(place, value, len(raw), len(examples), of_seeds, of_examples, centre, limits, count)


def _quantity(terms: Sequence[np.ndarray]) -> np.ndarray:
    difference = terms[0] - terms[1] if len(terms) > 1 else terms[0]
    return difference / np.where(terms[2] == 0, np.nan, terms[2]) if len(terms) > 2 else difference


class Evidence(Protocol):
    """Where samples come from."""

    datasets: Sequence[str]

    def sample(self, term: Term, dataset: str) -> Sample | None:
        """The sample of a claim's term on a dataset; None if there is none."""


class RunEvidence:
    """The plain cells of one model of a results folder, example by example."""

    def __init__(self, run: Run, model: str, metrics: Sequence[str]) -> None:
        cells = plain(run.planned[run.planned["finished"]], model)
        cells = cells.drop_duplicates(["init", "dataset", "method", "seed", "permutation"])
        self.displaced = at_equal_length(sweeps(run, model))
        self.datasets: Sequence[str] = list(dict.fromkeys([*cells["dataset"], *self.displaced["dataset"]]))
        self.groups: dict[tuple[str, str, str], dict[Seed, str]] = {}
        for cell in cells.itertuples():
            group = self.groups.setdefault((cell.dataset, cell.method, cell.init), {})
            group[int(cell.seed), int(cell.permutation)] = cell.key
        self.run, self.model, self.metrics = run, model, sorted(metrics)
        self.read = cache(self._read)  # a cell is asked for by many claims
        self._means = dict(list(run.values[run.values["metric"].isin(self.metrics)].groupby("key")))

    def sample(self, term: Term, dataset: str) -> Sample | None:
        """As `Evidence` says."""
        if term.metric.endswith(AT_EQUAL_LENGTH):  # of the seeds that get there
            place, name = (dataset, "pretrained", term.method), term.metric.removesuffix(AT_EQUAL_LENGTH)
            cells = self.displaced[(self.displaced[["dataset", "init", "method"]] == place).all(axis=1)]
            cells = cells[cells["by"] == cells["by"].max()]  # where rates and equal steps were swept, the rates
            known = cells.dropna(subset=[name])[["seed", "permutation", name]].to_numpy(float)
            return _joined({(int(seed), int(order)): pd.DataFrame([x], [NO_EXAMPLE]) for seed, order, x in known})
        places = [(dataset, term.method, init) for init in inits_of(term.init)]
        keys = next((self.groups[place] for place in places if place in self.groups), {})
        seeds = {seed: self.read(key).get(term.metric) for seed, key in keys.items()}
        return _joined({seed: values for seed, values in seeds.items() if values is not None})

    def _read(self, key: str) -> dict[str, pd.DataFrame]:
        """Metric -> (examples, layers) of one cell."""
        found = self.run.cell_folder(self.model, key).values(self.metrics)
        known = self._means.get(key, self.run.values.iloc[:0])
        for metric in set(known["metric"]) - set(found):  # without examples it still has its mean
            rows = known[known["metric"] == metric]
            layered = rows[rows["layer"].notna()].drop_duplicates("layer").sort_values("layer")
            values = (rows.iloc[:1] if layered.empty else layered)["value"].to_numpy(np.float64)
            found[metric] = pd.DataFrame([values], [NO_EXAMPLE])
        return found


def orders_joined(sample: Sample) -> Sample:
    """One value for every seed: a draw of demonstrations counts once, in however many orders it was shown."""
    drawn = np.array([seed for seed, _ in sample.seeds])
    kept = list(dict.fromkeys(drawn.tolist()))
    values = np.stack([defined_mean(sample.values[drawn == seed], 0) for seed in kept])
    return Sample(tuple((seed, 0) for seed in kept), sample.examples, values)


def defined_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean over the defined values along an axis, NaN where there is none."""
    known = np.isfinite(values)
    total, number = np.where(known, values, 0.0).sum(axis), known.sum(axis)
    return np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)


def _joined(found: dict[Seed, pd.DataFrame]) -> Sample | None:
    if not found:
        return None
    # Of a quotient, every seed has its own examples.
    examples = np.unique(np.concatenate([values.index.to_numpy(np.int64) for values in found.values()]))
    values = np.stack([values.reindex(examples).to_numpy(np.float64) for values in found.values()])
    return Sample(tuple(found), examples[examples != NO_EXAMPLE], values)


class AuthorsEvidence:
    """The authors' runs: means by seed and layer without examples, fp16 where there is fp16.

    Rec2FTP and its chance level are known by their counts, which are as good as the examples themselves.
    """

    def __init__(self) -> None:
        plain = authors_runs()[authors_runs()["clip_norm"] == 0]
        self.datasets: Sequence[str] = list(plain["dataset"].drop_duplicates())
        self.groups = dict(list(plain.groupby(["metric", "method", "init", "dataset"])))

    def sample(self, term: Term, dataset: str) -> Sample | None:
        """As `Evidence` says."""
        place = (term.method, inits_of(term.init)[0], dataset)
        if term.metric.startswith("rec2ftp"):
            return self._counted(term.metric, place)
        rows = self.groups.get((term.metric, *place))
        if rows is None:
            return None
        rows = rows[(rows["precision"] == rows["precision"].min()) & rows["layer"].notna()]  # fp16 before fp32
        means = rows.pivot(index=["seed", "permutation"], columns="layer", values="value")
        return _joined({seed: pd.DataFrame([mean.to_numpy()], [NO_EXAMPLE]) for seed, mean in means.iterrows()})

    def _counted(self, metric: str, place: tuple[str, str, str]) -> Sample | None:
        """The examples that are wrong zero-shot: mended by both first, then by FT alone, by ICL alone, by neither."""
        parts = [self.groups.get((f"f2t_{name}", *place)) for name in ("both", "ft", "icl")]
        if any(part is None for part in parts):
            return None
        keys = ["seed", "permutation", "precision"]
        both, ft, icl = (part.set_index(keys)["value"].astype(int) for part in parts if part is not None)
        example = np.arange(zero_shot_errors(place[2]))
        values: dict[Seed, pd.DataFrame] = {}
        for run in sorted(both.index):
            mended = (example < both[run]) | ((example >= ft[run]) & (example < ft[run] + icl[run] - both[run]))
            known = np.where(example < ft[run], mended * 1.0, np.nan) if metric == "rec2ftp" else mended * 1.0
            values.setdefault((int(run[0]), int(run[1])), pd.DataFrame(known))  # fp16 before fp32
        return _joined(values)
