"""Does a paper's claim hold here? Each claim of config/published/claims.yaml, tested on a results folder.

The effect of a claim (a similarity, or the difference of two) is measured seed by seed and example by example, so that
what a seed or an example adds to both sides cancels (paired); effects.py says how well it is then known. A seed is a
draw of demonstrations: several orders of the same demonstrations are one.

A claim about at least u of m places (every: u = m, most: more than half) is a partial conjunction (Benjamini and Heller
2008). It holds if at least u places are clear of what is asked at the level 5 % / (m - u + 1), and does not hold if at
least m - u + 1 places are clear on the other side at 5 % / u. Either error has a probability of at most 2.5 %.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import yaml

from fairseq_icl.replication.report.effects import (
    LEVEL,
    AuthorsEvidence,
    Effect,
    Evidence,
    RunEvidence,
    Sample,
    average,
    effect_of,
    orders_joined,
)
from fairseq_icl.replication.report.published import FOLDER
from fairseq_icl.replication.report.run import Run

HOLDS, FAILS, OPEN, TOO_FEW, NO_DATA = "holds", "does not hold", "undecided", "too few", "no data"
TERMS = ("left", "right", "over")


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
    control: Effect | None = None
    """The same of what means nothing, where the claim names it."""
    level: float = 1.0
    """The strictest level at which it would still be decided."""
    corrected: str = ""
    """What is left of it when all claims of the page are taken together (Holm)."""


@cache
def claims() -> list[dict[str, Any]]:
    """The claims of the package's YAML file."""
    return list(yaml.safe_load((FOLDER / "claims.yaml").read_text(encoding="utf-8"))["claims"])


def verdicts(run: Run, model: str) -> list[Verdict]:
    """Every claim on one model of a run."""
    terms = [term for claim in claims() for said in (claim, claim.get("control", {})) for term in _terms(said)]
    evidence = RunEvidence(run, model, sorted({term["metric"] for term in terms}))
    return corrected([judge(claim, evidence) for claim in claims()])


@cache
def authors_verdicts() -> list[Verdict]:
    """Every claim on the authors' own runs."""
    evidence = AuthorsEvidence()
    return corrected([judge(claim, evidence) for claim in claims()])


def corrected(found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with what is left of each by Holm's correction over all claims that could be asked."""
    asked = sorted((verdict for verdict in found if verdict.status != NO_DATA), key=lambda verdict: verdict.level)
    left, stands = {}, True
    for rank, verdict in enumerate(asked):
        stands = stands and verdict.level <= LEVEL / (len(asked) - rank)
        left[verdict.claim["name"]] = verdict.status if stands or verdict.level > LEVEL else OPEN
    return [replace(verdict, corrected=left.get(verdict.claim["name"], verdict.status)) for verdict in found]


def judge(claim: dict[str, Any], evidence: Evidence) -> Verdict:
    """One claim on one body of results."""
    samples = _by_dataset(claim, claim, evidence)
    if not samples:
        needed = ", ".join(dict.fromkeys(map(_named, _terms(claim))))
        return Verdict(claim, NO_DATA, f"needs {needed} on the same seeds")
    layers, depth = _layers(claim), max(terms[0].values.shape[-1] for terms in samples.values())
    if layers and depth != claim["layers"]["of"]:
        of = claim["layers"]["of"]
        return Verdict(claim, NO_DATA, f"names layers of a model with {of}; this one has {depth}")
    over_all = _effects(claim, samples, layers)
    if not over_all:
        return Verdict(claim, NO_DATA, "its quantity has no value at any seed")
    by_layer = [(layer, _effects(claim, samples, [layer])) for layer in layers or []]
    places = [average(f"layer {layer}", effects) for layer, effects in by_layer if effects] or over_all
    beside = claim.get("control", {})
    control = _effects(beside, _by_dataset(claim, beside, evidence), layers) if beside else []
    verdict = decide(claim, places, average("average", over_all))
    return replace(verdict, control=average("control", control) if control else None)


def decide(claim: dict[str, Any], places: Sequence[Effect], mean: Effect | None = None) -> Verdict:
    """The verdict on a claim, given its effect at every place; `mean`: where they are not independent (layers)."""
    mean = mean or average("average", places)
    where = claim["where"]
    asked = [mean] if where == "average" else list(places)
    status = _status(claim, asked, LEVEL)
    levels = _levels(claim, len(asked), LEVEL)
    outcomes = [_outcome(effect, claim["asks"], *levels) for effect in asked]
    shown = tuple((effect, _outcome(effect, claim["asks"], *levels)) for effect in places)
    verdict = Verdict(claim, status, "", mean, shown, level=_strictest(claim, asked, status))
    if status in (HOLDS, FAILS):
        names = [effect.place for effect, outcome in zip(asked, outcomes, strict=True) if outcome == FAILS]
        words = f"on {outcomes.count(HOLDS)} of {len(asked)}" if status == HOLDS else f"not on {', '.join(names)}"
        words = words if where != "average" else {HOLDS: "on average", FAILS: "not on average"}[status]
        return replace(verdict, reason=words)
    unclear = [effect for effect, outcome in zip(asked, outcomes, strict=True) if outcome != HOLDS]
    wishes = [f"{effect.place}: {_wish(effect, claim['asks'], levels)}" for effect in unclear[:3]]
    more = f" (and {len(unclear) - 3} more)" if len(unclear) > 3 else ""
    return replace(verdict, reason=f"open on {'; '.join(wishes)}{more}")


def summary(model: str, found: Collection[Verdict]) -> str:
    """One sentence: which claims hold on this model, how many are open, and for want of what."""

    def names(status: str) -> list[str]:
        return [verdict.claim["name"] for verdict in found if verdict.status == status]

    def listed(words: str, chosen: list[str]) -> str:
        return f"{len(chosen)} {words}" + (f" ({', '.join(chosen)})" if chosen else "")

    opened = [verdict for verdict in found if verdict.status in (OPEN, TOO_FEW)]
    wants = [_want(verdict) for verdict in opened]
    told = ", ".join(f"{wants.count(want)} for want of {want}" for want in dict.fromkeys(wants))
    lost = sum(verdict.corrected != verdict.status for verdict in found)
    taken = f"; all taken together (Holm), {lost} of these verdicts would be open too" if lost else ""
    return (
        f"On {model}, of {len(found)} claims {listed('hold', names(HOLDS))}, {listed('do not hold', names(FAILS))}, "
        f"{len(opened)} are open{f': {told}' if told else ''}, and {len(names(NO_DATA))} could not be asked{taken}."
    )


def _want(verdict: Verdict) -> str:
    """What an open claim is open for want of."""
    words = {"too few": "cases", "examples": "examples", "close to call": "a clear effect"}
    return next((want for sign, want in words.items() if sign in verdict.reason), "seeds")


def _terms(claim: dict[str, Any]) -> list[dict[str, Any]]:
    return [claim[name] for name in TERMS if name in claim]


def _named(term: dict[str, Any]) -> str:
    init = term.get("init", "pretrained")
    return f"{term['metric']} of {term.get('method', 'gd')}" + ("" if init == "pretrained" else f" ({init})")


def _by_dataset(claim: dict[str, Any], said: dict[str, Any], evidence: Evidence) -> dict[str, list[Sample]]:
    """The terms of the claim, or of its control, on the datasets that have all of them."""
    left_out = claim.get("datasets", {}).get("except", [])
    found = {dataset: _samples(said, evidence, dataset) for dataset in evidence.datasets if dataset not in left_out}
    return {dataset: samples for dataset, samples in found.items() if samples is not None}


def _samples(said: dict[str, Any], evidence: Evidence, dataset: str) -> list[Sample] | None:
    """The terms on a dataset, on the seeds and orders that all of them have; None if one is missing."""
    found = [evidence.sample(term, dataset) for term in _terms(said)]
    samples = [sample for sample in found if sample is not None]
    seeds = [seed for seed in samples[0].seeds if all(seed in s.seeds for s in samples)] if samples else []
    if len(samples) < len(found) or not seeds:
        return None
    chosen = [Sample(tuple(seeds), s.examples, s.values[[s.seeds.index(seed) for seed in seeds]]) for s in samples]
    # A seed on which a side is not defined (a quotient of no example) says nothing about the difference.
    defined = np.all([np.isfinite(s.values).any((1, 2)) for s in chosen], axis=0)
    kept = tuple(seed for seed, known in zip(seeds, defined, strict=True) if known)
    return [orders_joined(Sample(kept, s.examples, s.values[defined])) for s in chosen] if kept else None


def _effects(said: dict[str, Any], samples: dict[str, list[Sample]], layers: list[int] | None = None) -> list[Effect]:
    """The effects of the terms in `said` on every dataset, over all layers or over some."""
    metrics = [term["metric"] for term in _terms(said)]
    chosen = {
        dataset: [replace(term, values=term.values[..., layers]) for term in terms] if layers else terms
        for dataset, terms in samples.items()
    }
    found = (effect_of(terms, metrics, dataset) for dataset, terms in chosen.items())
    return [effect for effect in found if effect is not None]


def _layers(claim: dict[str, Any]) -> list[int] | None:
    said = claim.get("layers", {})
    return list(said.get("only") or (x for x in range(said["of"]) if x not in said["except"])) if said else None


def _levels(claim: dict[str, Any], places: int, level: float) -> tuple[float, float]:
    """The levels at which a single place counts for and against the claim."""
    needed = places // 2 + 1 if claim["where"] == "most" else places
    return level / (places - needed + 1), level / needed


def _status(claim: dict[str, Any], asked: Sequence[Effect], level: float) -> str:
    needed = len(asked) // 2 + 1 if claim["where"] == "most" else len(asked)
    outcomes = [_outcome(effect, claim["asks"], *_levels(claim, len(asked), level)) for effect in asked]
    if outcomes.count(HOLDS) >= needed:
        return HOLDS
    if outcomes.count(FAILS) > len(asked) - needed:
        return FAILS
    return TOO_FEW if outcomes.count(TOO_FEW) > len(asked) - needed else OPEN


def _strictest(claim: dict[str, Any], asked: Sequence[Effect], status: str) -> float:
    """The smallest level at which the claim is decided as it is."""
    if status not in (HOLDS, FAILS):
        return 1.0
    low, high = -15.0, math.log10(LEVEL)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _status(claim, asked, 10**middle) == status else (middle, high)
    return 10**high


def _outcome(effect: Effect, asks: dict[str, Any], for_it: float, against_it: float) -> str:
    if effect.problem:
        return TOO_FEW if effect.problem.startswith(TOO_FEW) else OPEN
    (least, most), (low, high) = _bounds(asks), effect.interval(for_it)
    if low > least and high < most:
        return HOLDS
    low, high = effect.interval(against_it)
    return FAILS if high < least or low > most else OPEN


def _bounds(asks: dict[str, Any]) -> tuple[float, float]:
    return float(asks.get("above", -math.inf)), float(asks.get("below", math.inf))


def _wish(effect: Effect, asks: dict[str, Any], levels: tuple[float, float]) -> str:
    """What would decide at one place, at the effect seen so far."""
    if effect.problem:
        return f"{effect.problem} (here {effect.value:+.3f})"
    least, most = _bounds(asks)
    distance = min(abs(effect.centre - bound) for bound in (least, most) if math.isfinite(bound))
    return effect.wish(distance, levels[0] if least < effect.centre < most else levels[1])
