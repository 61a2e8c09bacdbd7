"""Attention to training tokens: pairing by row, weights, chance; rankings against scipy and worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from fairseq_icl.metrics import training_attention as ta
from fairseq_icl.metrics.training_attention import TrainingAttention, TrainingTokens
from fairseq_icl.observing.observation import Observation
from tests.metrics.observations import random_observation

# Rows 7, 8, 9 with 2, 1 and 3 tokens; context: BOS a a EOS b EOS c c c EOS
LENGTHS, SPANS = {7: 2, 8: 1, 9: 3}, {7: (1, 3), 8: (4, 5), 9: (6, 9)}


def recorded(rows: list[int]) -> torch.Tensor:
    """Query vectors of training sequences: BOS is 0, the others tell row and place: row * 10 + place."""
    numbers = [value for row in rows for value in [0, *(row * 10 + place for place in range(LENGTHS[row]))]]
    return torch.tensor(numbers, dtype=torch.float32)[None, :, None].expand(3, -1, 8)


def aligned(training_rows: list[int], **options: int) -> TrainingTokens:
    training = {row: recorded([row]) for row in training_rows}
    return replace(TrainingTokens.align(training, list(SPANS), list(SPANS.values())), **options)


def attention_of(icl: Observation, ft: Observation, **options: int) -> TrainingAttention:
    generator = torch.Generator().manual_seed(5)
    training = replace(aligned([7, 8, 9], **options), queries=torch.randn(3, 6, 8, generator=generator))
    return TrainingAttention.of(torch.arange(len(icl)), icl, ft, training)


def test_weights_that_underflow_in_float32_are_still_ranked():
    """As the authors rank them, in float64; scores as far apart as in a deep layer tied most weights at 0 before."""
    generator = torch.Generator().manual_seed(3)
    icl, ft = (60 * torch.randn(4, 2, 300, generator=generator, dtype=torch.float64) for _ in range(2))
    ft = 0.5 * icl + ft
    training = TrainingTokens(torch.zeros(2, 300, 8), torch.arange(300) // 10, torch.arange(300))
    seen = replace(random_observation(0, n=4, layers=2), context_row=icl.float())
    weights = ta.icl_weights(seen, training)
    assert len(weights[0, 0].unique()) == 300
    found = ta.kendall(weights, ft.float().double().softmax(-1)).value
    exact = [[kendalltau(a, b).statistic for a, b in zip(*pair, strict=True)] for pair in zip(icl, ft, strict=True)]
    np.testing.assert_allclose(found, exact, atol=1e-4)


def test_tokens_are_paired_by_row_whatever_the_order_of_training():
    expected = aligned([7, 8, 9])
    assert expected.queries[0, :, 0].tolist() == [70, 71, 80, 90, 91, 92]
    assert expected.context_position.tolist() == [1, 2, 4, 6, 7, 8]
    assert expected.demonstration.tolist() == [0, 0, 1, 2, 2, 2]
    assert torch.equal(aligned([9, 7, 8]).queries, expected.queries)


def test_a_demonstration_missing_on_one_side_is_left_out():
    tokens = aligned([9, 7])
    assert tokens.queries[0, :, 0].tolist() == [70, 71, 90, 91, 92]
    assert tokens.demonstration.tolist() == [0, 0, 1, 1, 1]


def test_sequences_of_different_length_cannot_be_paired():
    with pytest.raises(ValueError, match="row 7: 2 tokens in training, 3 in the prompt"):
        TrainingTokens.align({7: torch.zeros(1, 3, 8)}, [7], [(1, 4)])


def test_nothing_in_common_is_an_error():
    with pytest.raises(ValueError, match="no demonstration"):
        TrainingTokens.align({7: torch.zeros(1, 3, 8)}, [8], [(1, 3)])


def test_k_is_clipped_to_what_exists():
    assert aligned([7, 8, 9]).used_tops == (6, 3)
    attention = attention_of(random_observation(0), random_observation(1))
    assert (ta.recall(attention) == 1).all()


def test_weights_sum_to_one_over_tokens_and_over_demonstrations():
    attention = attention_of(random_observation(0), random_observation(1))
    for weights in (attention.icl_tokens, attention.ft_tokens, attention.icl_examples, attention.ft_examples):
        assert torch.allclose(weights.double().sum(-1), torch.ones(6, 3, dtype=torch.float64), atol=1e-6)


def test_identical_weights_agree_completely():
    attention = attention_of(random_observation(0), random_observation(1), top_examples=2, top_tokens=3)
    attention = replace(attention, ft_tokens=attention.icl_tokens, ft_examples=attention.icl_examples)
    for of in ("tokens", "examples"):
        assert (ta.recall(attention, of) == 1).all()
        assert torch.allclose(ta.kendall_of(attention, of).value, torch.ones(6, 3, dtype=torch.float64))


def test_equal_query_vectors_tie():
    training = aligned([7, 8, 9])
    training = replace(training, queries=torch.randn(3, 1, 8).expand(3, 6, 8))
    weights = ta.finetuning_weights(random_observation(0), training)
    assert (weights == weights[..., :1]).all()


def test_chance_recall_is_k_over_the_number_of_tokens_and_chance_kendall_is_zero():
    many = random_observation(0, n=400)
    attention = attention_of(many, many, top_examples=2, top_tokens=2)
    assert float(ta.recall_random(attention).mean()) == pytest.approx(2 / 6, abs=0.03)
    assert float(ta.recall_random(attention, "examples").mean()) == pytest.approx(2 / 3, abs=0.03)
    assert float(ta.kendall_random(attention).value.mean()) == pytest.approx(0, abs=0.05)
    assert float(ta.kendall_random(attention, "examples").value.mean()) == pytest.approx(0, abs=0.05)


def test_an_observation_without_context_is_refused():
    icl = replace(random_observation(0), context_row=None)
    with pytest.raises(ValueError, match="context_row"):
        ta.icl_weights(icl, aligned([7, 8, 9]))


@given(
    st.integers(2, 30).flatmap(lambda size: st.tuples(*[st.lists(st.integers(0, 6), min_size=size, max_size=size)] * 2))
)
def test_kendall_equals_scipy_with_ties(pair):
    a, b = pair
    expected = kendalltau(a, b).statistic if len(set(a)) > 1 and len(set(b)) > 1 else 0.0
    similarity = ta.kendall(torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64))
    assert float(similarity.value) == pytest.approx(expected, abs=1e-12)
    assert int(similarity.zero_updates) == (len(set(a)) == 1 or len(set(b)) == 1)


def test_kendall_of_rows_of_several_blocks():
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 3, 4, 11 * ta.BLOCK + 3))
    value = ta.kendall(torch.from_numpy(a), torch.from_numpy(b)).value
    expected = [[kendalltau(x, y).statistic for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
    np.testing.assert_allclose(value, expected, atol=1e-12)


def test_a_gpu_compares_pairs_and_finds_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(0, 9, (5, 2, 40), generator=generator).double() for _ in range(2))
    a[0] = 1.0  # all tied
    monkeypatch.setattr(ta, "PAIRS", 3 * 40**2)  # in several parts
    found, expected = ta._kendall_by_pairs(a, b), ta.kendall(a, b)
    torch.testing.assert_close(found.value, expected.value)
    assert torch.equal(found.zero_updates, expected.zero_updates)


def test_equal_values_have_one_rank_and_are_counted_as_tied_pairs():
    ranks, tied = ta._ranked(torch.tensor([[0.5, -1.0, 0.5, 2.0, 0.5]]))
    assert ranks.tolist() == [[1, 0, 1, 2, 1]]
    assert tied.tolist() == [3]


def test_top_k_prefers_the_first_of_equal_weights():
    assert ta.top_k(torch.tensor([1.0, 3.0, 3.0, 3.0]), 2).tolist() == [False, True, True, False]


def test_recall_is_the_share_of_common_top_entries():
    a, b = torch.tensor([[[5.0, 4.0, 3.0, 2.0]]]), torch.tensor([[[5.0, 0.0, 3.0, 4.0]]])
    attention = TrainingAttention(torch.arange(1), a, b, a, b, top_tokens=2, top_examples=4)
    assert float(ta.recall(attention)) == 0.5
    assert float(ta.recall(attention, "examples")) == 1.0
