"""Rankings against scipy and against hand-worked cases."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from fairseq_icl.metrics import rank


@given(
    st.integers(2, 30).flatmap(lambda size: st.tuples(*[st.lists(st.integers(0, 6), min_size=size, max_size=size)] * 2))
)
def test_kendall_equals_scipy_with_ties(pair):
    a, b = pair
    expected = kendalltau(a, b).statistic if len(set(a)) > 1 and len(set(b)) > 1 else 0.0
    similarity = rank.kendall(torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64))
    assert float(similarity.value) == pytest.approx(expected, abs=1e-12)
    assert int(similarity.zero_updates) == (len(set(a)) == 1 or len(set(b)) == 1)


def test_kendall_of_many_rows_in_parts(monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 3, 4, 11))
    monkeypatch.setattr(rank, "PAIRS_AT_ONCE", 300)
    value = rank.kendall(torch.from_numpy(a), torch.from_numpy(b)).value
    expected = [[kendalltau(x, y).statistic for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
    np.testing.assert_allclose(value, expected, atol=1e-12)


def test_dense_rank_gives_equal_values_one_rank():
    assert rank.dense_rank(torch.tensor([[0.5, -1.0, 0.5, 2.0]])).tolist() == [[1, 0, 1, 2]]


def test_top_k_prefers_the_first_of_equal_weights():
    assert rank.top_k(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2).tolist() == [False, True, True, False]


def test_recall_is_the_share_of_common_top_entries():
    a, b = torch.tensor([5.0, 4.0, 3.0, 2.0]), torch.tensor([5.0, 0.0, 3.0, 4.0])
    assert float(rank.top_k_recall(a, b, 2)) == 0.5
    assert float(rank.top_k_recall(a, b, 4)) == 1.0
