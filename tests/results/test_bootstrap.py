"""Bootstrap intervals: coverage, reproducibility, and quotients that are not always defined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_icl.results.bootstrap import Estimate, bootstrap_ratio, resampling_counts


def bootstrap_mean(values: np.ndarray, seed: int = 0, resamples: int = 1000) -> Estimate:
    """The mean of plain numbers as the collector takes it: a quotient whose denominators are 1."""
    counts = resampling_counts(len(values), seed, resamples)
    return bootstrap_ratio(values[:, None], np.ones((len(values), 1)), counts)[1]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.integers(0, 5))
def test_the_interval_lies_within_the_values_and_repeats(values, seed):
    mean, low, high = bootstrap_mean(np.array(values), seed, resamples=50)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert mean == pytest.approx(np.mean(values), abs=1e-12)
    assert (mean, low, high) == bootstrap_mean(np.array(values), seed, resamples=50)


def test_the_interval_has_the_width_of_the_standard_error():
    values = np.random.default_rng(0).normal(size=400)
    mean, low, high = bootstrap_mean(values)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.15)
    assert low < mean < high


def test_every_resample_draws_as_many_examples_as_there_are():
    counts = resampling_counts(7, seed=1, resamples=20)
    assert counts.shape == (20, 7)
    assert (counts.sum(1) == 7).all()


def test_a_layer_without_defined_values_takes_no_part_in_the_mean_over_layers():
    numerator, denominator = np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])
    layers, overall = bootstrap_ratio(numerator, denominator, resampling_counts(2))
    assert layers.value[0] == 2
    assert np.isnan([layers.value[1], layers.low[1], layers.high[1]]).all()
    assert overall.value == 2


def test_resamples_without_a_defined_example_are_left_out():
    numerator, denominator = np.array([[1.0], [0.0], [0.0]]), np.array([[1.0], [0.0], [0.0]])
    _, overall = bootstrap_ratio(numerator, denominator, resampling_counts(3))
    assert (overall.value, overall.low, overall.high) == (1, 1, 1)
