"""Does a paper's claim hold here? Each claim of config/published/claims.yaml, tested on a results folder.

The effect of a claim (a similarity, or the difference of two) is measured seed by seed and example by example, so that
what a seed or an example adds to both sides cancels (paired). Its interval comes from a bootstrap over both: seeds are
drawn with replacement, and so are examples, the same ones for every seed, because all seeds saw the same examples.

    draw = effect + (effect of drawn seeds - effect) * w + (effect on drawn examples - effect)

Few seeds understate their own spread: w = sqrt(S / (S - 1)) * t / z makes up for it (t: Student's 97.5 % point with one
degree of freedom less than there are seeds, z: the normal one). One seed has no spread at all: it decides nothing.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import yaml

from fairseq_icl.replication.report.evidence import AuthorsEvidence, Evidence, RunEvidence, Sample
from fairseq_icl.replication.report.published import FOLDER
from fairseq_icl.replication.report.run import Run
from fairseq_icl.results.bootstrap import RESAMPLES, resampling_counts

HOLDS, FAILS, OPEN, NO_DATA = "holds", "does not hold", "undecided", "no data"
LEVEL = 0.05
NORMAL = 1.96
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 30: 2.042}
"""97.5 % points by degrees of freedom; those between take the next lower one, which is the larger."""
ENOUGH_SEEDS, MOST_SEEDS, MOST_EXAMPLES = 3, 200, 100_000


@dataclass(frozen=True)
class Effect:
    """An effect at one place (a dataset, a layer) or on average, with what it varied by."""

    place: str
    value: float
    seeds: int  # the smallest number of seeds that it is a mean over
    examples: int  # 0: only means over examples are known
    freedom: int  # degrees of freedom of the spread over seeds
    by_seed: np.ndarray  # (B,) deviations of drawn seeds, already widened by sqrt(S / (S - 1))
    by_example: np.ndarray  # (B,) deviations of drawn examples

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The middle 1 - level of the draws."""
        drawn = self.value + self.by_seed * student(self.freedom) / NORMAL + self.by_example
        low, high = np.quantile(drawn, [level / 2, 1 - level / 2])
        return float(low), float(high)

    def halves(self) -> tuple[float, float]:
        """Half the width that seeds alone and examples alone give the interval."""
        parts = (
            Effect(self.place, 0.0, self.seeds, 0, self.freedom, self.by_seed, np.zeros(1)),
            Effect(self.place, 0.0, self.seeds, 0, self.freedom, np.zeros(1), self.by_example),
        )
        of_seeds, of_examples = ((high - low) / 2 for low, high in (part.interval() for part in parts))
        return of_seeds, of_examples


@dataclass(frozen=True)
class Verdict:
    """A claim's outcome on one body of results."""

    claim: dict[str, Any]
    status: str
    reason: str
    """Why, and if it is undecided, what would decide it."""
    average: Effect | None = None
    places: tuple[tuple[Effect, str], ...] = ()
    """Every place with its own outcome."""


draws_of = lru_cache(maxsize=64)(resampling_counts.__wrapped__)
"""Draws of all datasets are kept: every claim asks for them again."""


def student(freedom: float) -> float:
    """Student's 97.5 % point."""
    return STUDENT[max(known for known in STUDENT if known <= max(1, freedom))]


@cache
def claims() -> list[dict[str, Any]]:
    """The claims of the package's YAML file."""
    return list(yaml.safe_load((FOLDER / "claims.yaml").read_text(encoding="utf-8"))["claims"])


def verdicts(run: Run, model: str) -> list[Verdict]:
    """Every claim on one model of a run."""
    metrics = {term["metric"] for claim in claims() for term in _terms(claim)}
    evidence = RunEvidence(run, model, sorted(metrics))
    return [judge(claim, evidence) for claim in claims()]


@cache
def authors_verdicts() -> list[Verdict]:
    """Every claim on the authors' own runs."""
    evidence = AuthorsEvidence()
    return [judge(claim, evidence) for claim in claims()]


def judge(claim: dict[str, Any], evidence: Evidence) -> Verdict:
    """One claim on one body of results."""
    left_out = claim.get("datasets", {}).get("except", [])
    datasets = [dataset for dataset in evidence.datasets if dataset not in left_out]
    found = {dataset: _samples(claim, evidence, dataset) for dataset in datasets}
    samples = {dataset: terms for dataset, terms in found.items() if terms is not None}
    if not samples:
        return Verdict(
            claim, NO_DATA, f"needs {', '.join(dict.fromkeys(map(_named, _terms(claim))))} on the same seeds"
        )
    if claim.get("by") == "layer":
        depth = next(iter(samples.values()))[0].values.shape[-1]
        if depth != claim["layers"]["of"]:
            asked = claim["layers"]["of"]
            return Verdict(claim, NO_DATA, f"names layers of a model with {asked}; this one has {depth}")
        layers = [layer for layer in range(depth) if layer not in claim["layers"]["except"]]
        found_in = [effects for dataset, terms in samples.items() if (effects := _effects(terms, dataset, layers))]
        by_layer = zip(layers, zip(*found_in, strict=True), strict=True) if found_in else []
        places = [average(f"layer {layer}", effects) for layer, effects in by_layer]
    else:
        places = [effect for dataset, terms in samples.items() for effect in _effects(terms, dataset)]
    return decide(claim, places) if places else Verdict(claim, NO_DATA, "its quantity has no value at any seed")


def decide(claim: dict[str, Any], places: Sequence[Effect]) -> Verdict:
    """The verdict on a claim, given its effect at every place."""
    mean = average("average", places)
    where = claim["where"]
    asked = [mean] if where == "average" else list(places)
    outcomes = [_outcome(effect, claim["asks"], LEVEL) for effect in asked]
    shown = tuple((effect, _outcome(effect, claim["asks"], LEVEL)) for effect in places)
    if min(effect.seeds for effect in places) < 2:
        told = ", ".join(f"{effect.place} {outcome}" for effect, outcome in _at_this_seed(claim, asked))
        reason = f"one seed has no spread, at least {ENOUGH_SEEDS} would; at this seed: {told}"
        return Verdict(claim, OPEN, reason, mean, tuple((effect, OPEN) for effect in places))
    # A claim about every place falls with one of them; looking at many, each is held to a stricter level.
    strict = [_outcome(effect, claim["asks"], LEVEL / len(asked)) for effect in asked]
    held, fallen = outcomes.count(HOLDS), strict.count(FAILS)
    needed = len(asked) // 2 + 1 if where == "most" else len(asked)
    allowed = len(asked) - needed
    if held >= needed:
        return Verdict(claim, HOLDS, _counted(where, held, len(asked)), mean, shown)
    if fallen > allowed:
        names = [effect.place for effect, outcome in zip(asked, strict, strict=True) if outcome == FAILS]
        reason = "not on average" if where == "average" else f"not on {', '.join(names)}"
        return Verdict(claim, FAILS, reason, mean, shown)
    unclear = [effect for effect, outcome in zip(asked, outcomes, strict=True) if outcome != HOLDS]
    wishes = [f"{effect.place}: {_what_would_decide(effect, claim['asks'])}" for effect in unclear[:3]]
    more = f" (and {len(unclear) - 3} more)" if len(unclear) > 3 else ""
    return Verdict(claim, OPEN, f"open on {'; '.join(wishes)}{more}", mean, shown)


def average(place: str, effects: Sequence[Effect]) -> Effect:
    """The mean of effects whose seeds and examples are independent of each other."""
    return Effect(
        place,
        math.fsum(effect.value for effect in effects) / len(effects),
        min(effect.seeds for effect in effects),
        min(effect.examples for effect in effects),
        sum(effect.freedom for effect in effects),
        np.mean([effect.by_seed for effect in effects], axis=0),
        np.mean([effect.by_example for effect in effects], axis=0),
    )


def _terms(claim: dict[str, Any]) -> list[dict[str, Any]]:
    return [claim[name] for name in ("left", "right", "over") if name in claim]


def _named(term: dict[str, Any]) -> str:
    init = term.get("init", "pretrained")
    return f"{term['metric']} of {term.get('method', 'gd')}" + ("" if init == "pretrained" else f" ({init})")


def _samples(claim: dict[str, Any], evidence: Evidence, dataset: str) -> list[Sample] | None:
    """The claim's terms on a dataset, on the seeds that all of them have; None if one is missing."""
    found = [evidence.sample(term, dataset) for term in _terms(claim)]
    samples = [sample for sample in found if sample is not None]
    seeds = [seed for seed in samples[0].seeds if all(seed in s.seeds for s in samples)] if samples else []
    if len(samples) < len(found) or not seeds:
        return None
    chosen = [Sample(tuple(seeds), s.examples, s.values[[s.seeds.index(seed) for seed in seeds]]) for s in samples]
    # A seed on which a side is not defined (a quotient of no example) says nothing about the difference.
    defined = np.all([np.isfinite(s.values).any((1, 2)) for s in chosen], axis=0)
    kept = tuple(seed for seed, known in zip(seeds, defined, strict=True) if known)
    return [Sample(kept, s.examples, s.values[defined]) for s in chosen] if kept else None


def _effects(samples: Sequence[Sample], place: str, layers: Sequence[int] | None = None) -> list[Effect]:
    """The effect on a dataset: over all layers, or in each of some layers."""
    with_examples = all(len(sample.examples) for sample in samples)
    examples = np.unique(np.concatenate([s.examples for s in samples])) if with_examples else np.array([], dtype=int)
    generator = zlib.crc32(place.encode())  # datasets are drawn apart, and a report gives the same numbers again
    counts = draws_of(len(examples), generator) if len(examples) else np.ones((RESAMPLES, 1))
    terms = [_by_seed(sample, examples, counts, layers) for sample in samples]
    point, drawn = (_combined([term[part] for term in terms]) for part in (0, 1))  # (S, P), (B, S, P)
    defined = np.isfinite(point).all(1)  # a seed whose quotient has no value (over no example, by 0) says nothing
    if not defined.any():
        return []
    point, drawn, seeds = point[defined], drawn[:, defined], int(defined.sum())
    value = point.mean(0)
    draws = draws_of(seeds, generator + 1)  # (B, S)
    widen = math.sqrt(seeds / (seeds - 1)) if seeds > 1 else 0.0
    by_seed = (draws @ point / seeds - value) * widen  # (B, P)
    by_example = np.nan_to_num(_defined_mean(drawn) - value) if len(examples) else np.zeros_like(by_seed)
    return [
        Effect(place, float(value[i]), seeds, len(examples), seeds - 1, by_seed[:, i], by_example[:, i])
        for i in range(len(value))
    ]


def _by_seed(
    sample: Sample, examples: np.ndarray, counts: np.ndarray, layers: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """A term's mean for every seed, (S, P), and for every seed and draw of examples, (B, S, P); P: 1, or the layers."""
    values = sample.values
    if layers is None:
        known = np.isfinite(values)
        total, number = np.where(known, values, 0.0).sum(-1), known.sum(-1)
        values = np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)[..., None]
    else:
        values = values[..., list(layers)]
    seeds, _, width = values.shape
    if len(examples) == 0:
        point = values[:, 0]  # means over examples
        return point, np.broadcast_to(point, (len(counts), *point.shape))
    everything = len(examples) == len(sample.examples)
    weights = counts if everything else counts[:, np.searchsorted(examples, sample.examples)]  # (B, N of this term)
    flat = values.transpose(1, 0, 2).reshape(len(sample.examples), -1)  # (N, S * P)
    known = np.isfinite(flat)
    filled = np.where(known, flat, 0.0)
    point = filled.sum(0) / known.sum(0)
    number = np.full((len(weights), 1), weights[0].sum()) if known.all() and everything else weights @ known
    total = weights @ filled
    drawn = np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)
    return point.reshape(seeds, width), drawn.reshape(-1, seeds, width)


def _combined(terms: Sequence[np.ndarray]) -> np.ndarray:
    """left, left - right, or (left - right) / over."""
    difference = terms[0] - terms[1] if len(terms) > 1 else terms[0]
    if len(terms) < 3:
        return difference
    return np.divide(difference, terms[2], out=np.full(difference.shape, np.nan), where=terms[2] != 0)


def _defined_mean(values: np.ndarray) -> np.ndarray:
    """The mean over the defined values of the second axis: (B, S, P) -> (B, P), NaN where there is none."""
    known = np.isfinite(values)
    number = known.sum(1)
    return np.divide(np.where(known, values, 0.0).sum(1), number, out=np.full(number.shape, np.nan), where=number > 0)


def _outcome(effect: Effect, asks: dict[str, Any], level: float) -> str:
    low, high = effect.interval(level)
    least, most = _bounds(asks)
    if low > least and high < most:
        return HOLDS
    return FAILS if high < least or low > most else OPEN


def _bounds(asks: dict[str, Any]) -> tuple[float, float]:
    if "between" in asks:
        return float(asks["between"][0]), float(asks["between"][1])
    return float(asks.get("above", -math.inf)), float(asks.get("below", math.inf))


def _at_this_seed(claim: dict[str, Any], effects: Iterable[Effect]) -> list[tuple[Effect, str]]:
    """What each place would say if seeds made no difference."""
    return [(effect, _outcome(effect, claim["asks"], LEVEL)) for effect in effects]


def _what_would_decide(effect: Effect, asks: dict[str, Any]) -> str:
    """How many seeds or examples would bring the interval clear of what is asked, at the effect seen so far."""
    distance = min(abs(effect.value - bound) for bound in _bounds(asks) if math.isfinite(bound))
    by_seed, by_example = effect.halves()
    # If examples alone keep it open, they have to give half of the room; then seeds get the rest.
    examples, wishes = effect.examples, []
    if by_example**2 > distance**2 / 2:
        examples = math.ceil(examples * 2 * (by_example / distance) ** 2) if distance else MOST_EXAMPLES + 1
        by_example = distance / math.sqrt(2)
        wishes.append(f"about {examples:,} examples")
    room = math.sqrt(distance**2 - by_example**2)
    freedom = max(1, effect.freedom) / max(1, effect.seeds - 1)  # that a further seed of every place adds
    seeds = effect.seeds
    while seeds <= MOST_SEEDS and _half_with(seeds, effect, by_seed, freedom) >= room:
        seeds += 1
    if seeds > MOST_SEEDS or examples > MOST_EXAMPLES:
        return "too close to call with any affordable number of seeds and examples"
    wishes = [f"about {seeds} seeds", *wishes] if seeds > effect.seeds else wishes
    return " and ".join(wishes) + " would do" if wishes else "a few more seeds would do"


def _half_with(seeds: int, effect: Effect, half: float, freedom: float) -> float:
    """Half the width that the spread over seeds would have with more of them."""
    narrower = student(freedom * (seeds - 1)) / student(effect.freedom)
    return half * narrower * math.sqrt(effect.seeds / seeds)


def _counted(where: str, held: int, places: int) -> str:
    return "on average" if where == "average" else f"on {held} of {places}"
