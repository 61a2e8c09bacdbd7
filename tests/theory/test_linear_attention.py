"""Demonstrations as a weight update: exact without softmax, measured with it."""

import pytest
import torch
from torch import Tensor

from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.linear_attention import Heads, explain, softmax_attention, softmax_change, weight_update

HEADS, WIDTH = 3, 5


@pytest.fixture
def tokens() -> tuple[Tensor, Heads, Heads]:
    generator = torch.Generator().manual_seed(1)
    own, demonstrations = (
        Heads(*torch.randn(3, HEADS, count, WIDTH, generator=generator, dtype=torch.float64)) for count in (7, 40)
    )
    return own.query, own, demonstrations


def relaxed_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """sum_i v_i (k_i . q), token by token: query (..., n, D), key and value (..., P, D) -> (..., n, D)"""
    return (query @ key.transpose(-2, -1)) @ value


def joined(demonstrations: Heads, own: Heads) -> Heads:
    return Heads(*(torch.cat(pair, dim=1) for pair in zip(demonstrations, own, strict=True)))


def test_relaxed_attention_is_zero_shot_weights_plus_update(tokens: tuple[Tensor, Heads, Heads]) -> None:
    query, own, demonstrations = tokens
    both = joined(demonstrations, own)
    weights = weight_update(own.key, own.value) + weight_update(demonstrations.key, demonstrations.value)
    claimed = query @ weights.transpose(1, 2)  # (H, n, D)
    assert relative_error(claimed, relaxed_attention(query, both.key, both.value)) < 1e-10


def test_softmax_breaks_the_sum_of_weights(tokens: tuple[Tensor, Heads, Heads]) -> None:
    query, own, demonstrations = tokens
    both = joined(demonstrations, own)
    parts = [softmax_attention(query, part.key, part.value) for part in (own, demonstrations)]
    assert relative_error(parts[0] + parts[1], softmax_attention(query, both.key, both.value)) > 0.1


def test_softmax_change_is_share_times_difference(tokens: tuple[Tensor, Heads, Heads]) -> None:
    seen = softmax_change(*tokens)
    claimed = seen.share[..., None] * (seen.demonstrations - seen.zero_shot)
    assert relative_error(claimed, seen.change) < 1e-10
    both = joined(tokens[2], tokens[1])
    assert relative_error(seen.zero_shot + seen.change, softmax_attention(tokens[0], both.key, both.value)) < 1e-10


def test_linear_part_explains_softmax_only_in_part(tokens: tuple[Tensor, Heads, Heads]) -> None:
    query, _, shown = tokens
    seen = explain(softmax_change(*tokens).change, relaxed_attention(query, shown.key, shown.value))
    assert seen.cosine.shape == (HEADS,)
    assert (seen.relative_error > 1).all()  # unnormalised: far too large
    assert (seen.scaled_error > 0.1).all()
    assert (seen.cosine.abs() < 0.999).all()


def test_explaining_a_linear_change_is_perfect(tokens: tuple[Tensor, Heads, Heads]) -> None:
    query, _, demonstrations = tokens
    linear = relaxed_attention(query, demonstrations.key, demonstrations.value)
    seen = explain(0.25 * linear, linear)
    assert relative_error(seen.scale, torch.full((HEADS,), 0.25).double()) < 1e-10
    assert seen.scaled_error.max() < 1e-10
    assert relative_error(seen.cosine, torch.ones(HEADS).double()) < 1e-10
    assert relative_error(seen.r2, torch.ones(HEADS).double()) < 1e-10
    assert relative_error(seen.relative_error, torch.full((HEADS,), 3.0).double()) < 1e-10


def test_r2_ignores_what_does_not_depend_on_the_query() -> None:
    torch.manual_seed(0)
    linear = torch.randn(50, 4).double()
    seen = explain(linear + 100, linear)
    assert seen.r2 == pytest.approx(1.0)
    assert abs(float(seen.cosine)) < 0.5
    assert torch.isnan(explain(linear[:1], linear[:1]).r2)


def test_small_scores_make_softmax_linear_up_to_a_constant() -> None:
    """With values of mean zero, softmax over many tokens is (1/P) sum_i v_i (k_i . q) to first order in the scores."""
    torch.manual_seed(0)
    key, value = torch.randn(1, 200, 4).double(), torch.randn(1, 200, 4).double()
    value, key = value - value.mean(1, keepdim=True), key - key.mean(1, keepdim=True)
    query = 1e-4 * torch.randn(1, 30, 4).double()
    seen = explain(softmax_attention(query, key, value, 1.0), relaxed_attention(query, key, value))
    assert float(seen.scaled_error) < 1e-3
    assert float(seen.scale) == pytest.approx(1 / 200, rel=1e-3)
