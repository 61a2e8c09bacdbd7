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

import numpy as np

from fairseq_icl.replication.report import effects
from fairseq_icl.replication.report.effects import LEVEL, Effect, Evidence, Sample, average
from fairseq_icl.replication.report.published import Claim, Quantity, claims
from fairseq_icl.replication.report.run import Run

HOLDS, FAILS, OPEN, TOO_FEW, NO_DATA = "holds", "does not hold", "undecided", "too few", "no data"
WANTS = {"too few": "cases", "examples": "examples", "close to call": "a clear effect", "": "seeds"}
"""What a claim is open for want of, by words of the reason."""


@dataclass(frozen=True)
class Verdict:
    """A claim's outcome on one body of results."""

    claim: Claim
    status: str
    reason: str  # why, and if it is undecided, what would decide it
    average: Effect | None = None
    places: tuple[tuple[Effect, str], ...] = ()  # every place with its own outcome
    judged: Effect | None = None  # the one that decides: on average, or at the least clear of the places needed
    judged_at: float = LEVEL  # the level at which it is asked
    control: Effect | None = None  # the same of what means nothing, where the claim names it
    level: float = 1.0  # the strictest level at which it would still be decided
    corrected: str = ""  # what is left of it when all claims of the page are taken together (Holm)


def verdicts(run: Run, model: str) -> list[Verdict]:
    """Every claim on one model of a run."""
    asked = [quantity for claim in claims() for quantity in (claim, claim.control) if quantity is not None]
    evidence = effects.RunEvidence(run, model, sorted({term.metric for quantity in asked for term in quantity.terms}))
    return corrected([judge(claim, evidence) for claim in claims()])


@cache
def authors_verdicts() -> list[Verdict]:
    """Every claim on the authors' own runs."""
    evidence = effects.AuthorsEvidence()
    return corrected([judge(claim, evidence) for claim in claims()])


def corrected(found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with what is left of each by Holm's correction over all claims that could be asked."""
    asked = sorted((verdict for verdict in found if verdict.status != NO_DATA), key=lambda verdict: verdict.level)
    left, stands = {}, True
    for rank, verdict in enumerate(asked):
        stands = stands and verdict.level <= LEVEL / (len(asked) - rank)
        left[verdict.claim.name] = verdict.status if stands or verdict.level > LEVEL else OPEN
    return [replace(verdict, corrected=left.get(verdict.claim.name, verdict.status)) for verdict in found]


def judge(claim: Claim, evidence: Evidence) -> Verdict:
    """One claim on one body of results."""
    samples = _samples(claim, claim, evidence)
    if not samples:
        inits = {term: "" if term.init == "pretrained" else f" ({term.init})" for term in claim.terms}
        needed = dict.fromkeys(f"{term.metric} of {term.method}{init}" for term, init in inits.items())
        return Verdict(claim, NO_DATA, f"needs {', '.join(needed)} on the same seeds")
    depth = max(terms[0].values.shape[-1] for terms in samples.values())
    if claim.layers is not None and depth != claim.layers.of:
        return Verdict(claim, NO_DATA, f"names layers of a model with {claim.layers.of}; this one has {depth}")
    layers = claim.layers.chosen if claim.layers is not None else []
    over_all = _effects(claim, samples, layers)
    if not over_all:
        return Verdict(claim, NO_DATA, "its quantity has no value at any seed")
    by_layer = {f"layer {layer}": _effects(claim, samples, [layer]) for layer in layers}
    places = [average(layer, found) for layer, found in by_layer.items() if found] or over_all
    control = _effects(claim.control, _samples(claim, claim.control, evidence), layers) if claim.control else []
    verdict = decide(claim, places, average("average", over_all))
    return replace(verdict, control=average("control", control) if control else None)


def decide(claim: Claim, places: Sequence[Effect], mean: Effect | None = None) -> Verdict:
    """The verdict on a claim, given its effect at every place; `mean`: where they are not independent (layers)."""
    mean = mean or average("average", places)
    asked = [mean] if claim.where == "average" else list(places)
    status = _status(claim, asked, LEVEL)
    needed, for_it, against_it = claim.levels(len(asked), LEVEL)
    outcomes = [_outcome(effect, claim, for_it, against_it) for effect in asked]
    shown = tuple((effect, _outcome(effect, claim, for_it, against_it)) for effect in places)
    rank = len(asked) - needed if status == FAILS else needed - 1
    level = {HOLDS: for_it, FAILS: against_it}.get(status, min(for_it, against_it))  # open: neither decides
    judged = sorted(asked, key=lambda effect: _clearance(effect, claim, level, status), reverse=True)[rank]
    strictest = _strictest(claim, asked, status) if status in (HOLDS, FAILS) else 1.0
    if claim.where == "average" and status in (HOLDS, FAILS):
        reason = f"{'' if status == HOLDS else 'not '}on average over {len(places)} {claim.by}s"
    elif status == HOLDS:
        reason = f"on {outcomes.count(HOLDS)} of {len(asked)} {claim.by}s"
    elif status == FAILS:
        failed = (effect.place for effect, outcome in zip(asked, outcomes, strict=True) if outcome == FAILS)
        reason = f"not on {', '.join(failed)}"
    else:
        unclear = [effect for effect, outcome in zip(asked, outcomes, strict=True) if outcome != HOLDS]
        wishes = [f"{effect.place}: {_wish(effect, claim, for_it, against_it)}" for effect in unclear[:3]]
        reason = f"open on {'; '.join(wishes)}" + (f" (and {len(unclear) - 3} more)" if len(unclear) > 3 else "")
    return Verdict(claim, status, reason, mean, shown, judged, level, level=strictest)


def summary(model: str, found: Collection[Verdict]) -> str:
    """One sentence: how many claims hold on this model, how many are open and for want of what."""
    counts = {status: sum(verdict.status == status for verdict in found) for status in (HOLDS, FAILS, NO_DATA)}
    opened = [verdict.reason for verdict in found if verdict.status in (OPEN, TOO_FEW)]
    wants = [next(want for sign, want in WANTS.items() if sign in reason) for reason in opened]
    told = ", ".join(f"{wants.count(want)} for want of {want}" for want in dict.fromkeys(wants))
    lost = sum(verdict.corrected != verdict.status for verdict in found)
    taken = f"; taken all together, {lost} of these verdicts would be open too" if lost else ""
    return (
        f"On {model}, of the papers' {len(found)} claims {counts[HOLDS]} hold, {counts[FAILS]} do not hold, "
        f"{len(opened)} are open{f' ({told})' if told else ''}, and {counts[NO_DATA]} could not be asked{taken}."
    )


def _samples(claim: Claim, quantity: Quantity, evidence: Evidence) -> dict[str, list[Sample]]:
    """The terms of the claim, or of its control, on the datasets that have all of them, on the seeds that all have."""
    left_out = claim.datasets.excluded if claim.datasets else ()
    found = {}
    for dataset in (dataset for dataset in evidence.datasets if dataset not in left_out):
        samples = [sample for term in quantity.terms if (sample := evidence.sample(term, dataset)) is not None]
        # A seed on which a side is not defined (a quotient of no example) says nothing about the difference.
        known = [{seed: x for seed, x in zip(s.seeds, s.values, strict=True) if np.isfinite(x).any()} for s in samples]
        seeds = tuple(seed for seed in known[0] if all(seed in values for values in known)) if known else ()
        if seeds and len(samples) == len(quantity.terms):
            chosen = [np.stack([values[seed] for seed in seeds]) for values in known]
            terms = [Sample(seeds, s.examples, values) for s, values in zip(samples, chosen, strict=True)]
            found[dataset] = [effects.orders_joined(term) for term in terms]
    return found


def _effects(quantity: Quantity, samples: dict[str, list[Sample]], layers: list[int]) -> list[Effect]:
    """The effects of a quantity on every dataset, over some layers or (none named) over all."""
    metrics, found = [term.metric for term in quantity.terms], []
    for dataset, terms in samples.items():
        chosen = [replace(term, values=term.values[..., layers]) for term in terms] if layers else terms
        found.append(effects.effect_of(chosen, metrics, dataset))
    return [effect for effect in found if effect is not None]


def _status(claim: Claim, asked: Sequence[Effect], level: float) -> str:
    needed, *levels = claim.levels(len(asked), level)
    outcomes = [_outcome(effect, claim, *levels) for effect in asked]
    if outcomes.count(HOLDS) >= needed:
        return HOLDS
    if outcomes.count(FAILS) > len(asked) - needed:
        return FAILS
    return TOO_FEW if outcomes.count(TOO_FEW) > len(asked) - needed else OPEN


def _strictest(claim: Claim, asked: Sequence[Effect], status: str) -> float:
    """The smallest level at which the claim is decided as it is."""
    low, high = -15.0, math.log10(LEVEL)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if _status(claim, asked, 10**middle) == status else (middle, high)
    return 10**high


def _outcome(effect: Effect, claim: Claim, for_it: float, against_it: float) -> str:
    if effect.problem:
        return TOO_FEW if effect.problem.startswith(TOO_FEW) else OPEN
    if _clearance(effect, claim, for_it, HOLDS) > 0:
        return HOLDS
    return FAILS if _clearance(effect, claim, against_it, FAILS) > 0 else OPEN


def _clearance(effect: Effect, claim: Claim, level: float, status: str) -> float:
    """How far an interval is inside what the claim asks; if it fails, how far outside."""
    if effect.problem:
        return -math.inf
    low, high = effect.interval(level)
    if status == FAILS:
        return max(claim.asks.above - high, low - claim.asks.below)
    return min(low - claim.asks.above, claim.asks.below - high)


def _wish(effect: Effect, claim: Claim, for_it: float, against_it: float) -> str:
    """What would decide at one place, at the effect seen so far."""
    if effect.problem:
        return f"{effect.problem} (here {effect.value:+.3f})"
    least, most = claim.asks.above, claim.asks.below
    distance = min(abs(effect.centre - bound) for bound in (least, most) if math.isfinite(bound))
    return effect.wish(distance, for_it if least < effect.centre < most else against_it)
