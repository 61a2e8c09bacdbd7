"""Bootstrap confidence intervals of means, quotients, areas under ROC curves and calibration errors over examples."""

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000
AT_ONCE = 100  # resamples in memory as float64 together: all of them would take 8 kB an example
CONFIDENCE, NORMAL = 0.95, 1.96


class Estimate(NamedTuple):
    """A mean with its percentile interval; arrays (layers,) or numbers."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


@lru_cache(maxsize=4)  # all metrics of a table share one of a few numbers of examples
def resampling_counts(num_examples: int, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """How often each example is drawn in each resample with replacement: (resamples, n) small integers."""
    generator = np.random.default_rng(seed)
    counts = np.empty((resamples, num_examples), dtype=np.uint16)
    for resample in counts:
        resample[:] = np.bincount(generator.integers(num_examples, size=num_examples), minlength=num_examples)
    return counts


def _some_at_a_time(counts: np.ndarray, with_all: bool = True) -> Iterator[np.ndarray]:
    """(resamples, n) -> parts of it, float64; `with_all`: in front of them each example once, (1, n)"""
    if with_all:
        yield np.ones((1, counts.shape[1]))
    for start in range(0, len(counts), AT_ONCE):
        yield counts[start : start + AT_ONCE].astype(np.float64)


def bootstrap_ratio(
    numerator: np.ndarray, denominator: np.ndarray, counts: np.ndarray, is_share: bool = False
) -> tuple[Estimate, Estimate]:
    """sum(numerator) / sum(denominator) over examples for every layer, and the mean of these over layers.

    (n, layers), (n, layers), counts (resamples, n) -> estimates of shape (layers,) and (). A layer whose denominators
    sum to zero is NaN and takes no part in the mean; so are resamples without a single defined example. `is_share`: of
    examples that have a property; 0 of n and n of n then have Wilson's interval, for every resample is like them.
    """
    value, over_layers = _quotients(numerator.sum(0, keepdims=True), denominator.sum(0, keepdims=True))
    sums = [(some @ numerator, some @ denominator) for some in _some_at_a_time(counts, with_all=False)]
    drawn, drawn_over_layers = _quotients(*(np.concatenate(part) for part in zip(*sums, strict=True)))
    whole = Estimate(over_layers[0], *_interval(drawn_over_layers))
    if is_share and whole.value in (0, 1):
        far = NORMAL**2 / (denominator.sum(0).min() + NORMAL**2)
        whole = Estimate(whole.value, *((0.0, far) if whole.value == 0 else (1 - far, 1.0)))
    return Estimate(value[0], *_interval(drawn)), whole


def bootstrap_auc(scores: np.ndarray, is_class: np.ndarray, counts: np.ndarray) -> Estimate:
    """Area under the ROC curve of each class against the rest, averaged over the classes that have both sides.

    scores (n, classes), is_class (n, classes) bool, counts (resamples, n) -> an estimate of shape (). In a resample an
    example counts as often as it was drawn; a tie counts half.
    """
    sizes = is_class.sum(0)
    classes = np.flatnonzero((sizes > 0) & (sizes < len(is_class))).tolist() or [0]  # some have it and others have not
    areas = [[_areas(scores[:, c], is_class[:, c], part) for part in _some_at_a_time(counts)] for c in classes]
    drawn = np.stack([np.concatenate(parts) for parts in areas])  # (classes, 1 + resamples)
    over_classes = _quotients(np.nan_to_num(drawn).T, np.isfinite(drawn).T.astype(float))[1]  # (1 + resamples,)
    return Estimate(over_classes[0], *_interval(over_classes[1:]))


def bootstrap_ece(confidence: np.ndarray, is_right: np.ndarray, counts: np.ndarray, bins: int = 10) -> Estimate:
    """Expected calibration error in bins of equal width: (n,), (n,) bool, counts (resamples, n) -> shape ().

    Fewer different examples in a resample make its error larger on average, so the interval leans upwards.
    """
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    surplus = (confidence - is_right)[:, None] * (bin_of[:, None] == np.arange(bins))  # (n, bins)
    errors = np.concatenate([np.abs(part @ surplus).sum(1) / part.sum(1) for part in _some_at_a_time(counts)])
    return Estimate(errors[0], *_interval(errors[1:]))


def _areas(scores: np.ndarray, members: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """One class: the share of pairs (member, other) ranked rightly; (n,), (n,) bool, (r, n) -> (r,), NaN if none."""
    order = np.argsort(scores, kind="stable")
    _, starts = np.unique(scores[order], return_index=True)  # where each of the u different scores begins
    counts, members = counts[:, order], members[order]
    of_members, of_others = (np.add.reduceat(counts * who, starts, axis=1) for who in (members, ~members))  # (r, u)
    pairs = of_members.sum(1) * of_others.sum(1)
    won = (of_members * (of_others.cumsum(1) - 0.5 * of_others)).sum(1)  # others below, and half of those beside
    return np.divide(won, pairs, out=np.full_like(won, np.nan), where=pairs > 0)


def _quotients(sums: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sums / weights, (resamples, layers), and the means over the defined layers, (resamples,)."""
    defined = weights > 0
    quotients = np.divide(sums, weights, out=np.full_like(sums, np.nan), where=defined)
    num_defined = defined.sum(1)
    total = np.where(defined, quotients, 0.0).sum(1)
    return quotients, np.divide(total, num_defined, out=np.full_like(total, np.nan), where=num_defined > 0)


def _interval(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The middle 95 % of the defined resamples: (resamples, ...) -> 2 x (...), NaN where none is defined.

    Rounded to ten decimals: the last digits depend on how many threads the matrix product used.
    """
    quantile = np.nanquantile if np.isnan(drawn).any() else np.quantile
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # nothing but NaN: so is the quantile
        low, high = quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0).round(10)
    return low, high
