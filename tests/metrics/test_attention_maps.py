"""SimAM: padding does not matter, probabilities are over the query tokens, identities and bounds."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch.nn.functional import pad

from fairseq_icl.metrics import attention_maps as am
from tests.metrics.observations import random_observation, triples


@given(triples())
def test_similarities_are_bounded(triple):
    zsl, icl, ft = triple
    for softmax in (False, True):
        for value in (
            am.sim_am_before(zsl, icl, softmax).value,
            am.sim_am_after(icl, ft, softmax).value,
            am.sim_am_delta(zsl, icl, ft, softmax).value,
        ):
            assert value.shape == (len(zsl), 3)
            assert (value.nan_to_num().abs() <= 1).all()  # NaN: an update of zero


@pytest.mark.parametrize("softmax", [False, True])
def test_padding_does_not_matter(softmax: bool):
    short = [random_observation(seed) for seed in range(3)]
    long = [replace(o, attention_row=pad(o.attention_row, (7, 0))) for o in short]
    expected = am.sim_am_delta(*short, softmax).value
    assert torch.allclose(expected, am.sim_am_delta(*long, softmax).value, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("softmax", [False, True])
def test_identical_settings_have_similarity_one(softmax: bool):
    zsl, icl = random_observation(0), random_observation(1)
    assert torch.allclose(am.sim_am_before(zsl, zsl, softmax).value, torch.ones(6, 3, dtype=torch.float64))
    many_tokens = zsl.query_length > 1  # the probability of a single token is 1 in every condition: a zero update
    value = am.sim_am_delta(zsl, icl, icl, softmax).value[many_tokens]
    assert torch.allclose(value, torch.ones_like(value))


def test_probabilities_ignore_a_shift_of_the_scores():
    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    is_token = (torch.arange(5) >= 5 - icl.query_length[:, None])[:, None, None]
    shifted = replace(icl, attention_row=icl.attention_row + 2 * is_token)
    same = am.sim_am_delta(zsl, shifted, ft, softmax=True).value
    assert torch.allclose(am.sim_am_delta(zsl, icl, ft, softmax=True).value, same, atol=1e-5, equal_nan=True)
    assert not torch.allclose(am.sim_am_delta(zsl, icl, ft).value, am.sim_am_delta(zsl, shifted, ft).value)


def test_unchanged_heads_are_counted_and_left_out():
    zsl, icl = random_observation(0), random_observation(1)
    row = icl.attention_row.clone()
    row[:, 1, 0] = zsl.attention_row[:, 1, 0]
    similarity = am.sim_am_delta(zsl, icl, replace(icl, attention_row=row))
    assert (similarity.zero_updates == torch.tensor([0, 1, 0])).all()
    assert torch.allclose(similarity.value[:, 1], torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize(("precision", "noise"), [("fp32", 1e-5), ("fp16", 1e-3)])
@pytest.mark.parametrize("softmax", [False, True])
def test_the_cosine_of_rounding_is_no_number(precision: str, noise: float, softmax: bool):
    """As in the first layer of a rotary model: ICL leaves the scores as they are, but for their last digits."""
    zsl, _, ft = (replace(random_observation(seed), precision=precision) for seed in range(3))
    draw = torch.randn(zsl.attention_row.shape, generator=torch.Generator().manual_seed(9))
    rows = zsl.attention_row.clone()
    rows[:, 0] *= 1 + noise * draw[:, 0].clamp(-1, 1)
    rows[:, 1:] *= 1 + 0.1 * draw[:, 1:]
    similarity = am.sim_am_delta(zsl, replace(zsl, attention_row=rows), ft, softmax)
    many_tokens = zsl.query_length > 1
    assert similarity.value[:, 0].isnan().all()
    assert (similarity.zero_updates[:, 0] == 2).all()
    assert similarity.lengths[0][:, 0].isnan().all()
    assert similarity.value[many_tokens, 1:].isfinite().all()


def test_alpha_is_the_similarity_of_two_finetuning_methods():
    zsl, gd, lcgd = (random_observation(seed) for seed in range(3))
    assert torch.equal(am.alpha(zsl, gd, other_ft=lcgd).value, am.sim_am_delta(zsl, lcgd, gd).value)
    alpha, delta = (
        am.alpha(zsl, gd, other_ft=lcgd, softmax=True).value,
        am.sim_am_delta(zsl, lcgd, gd, softmax=True).value,
    )
    assert torch.equal(alpha.nan_to_num(2), delta.nan_to_num(2))
