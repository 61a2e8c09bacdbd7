"""SimAOU: bounds, identities, and the value of unrelated updates that the second paper derives."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch.nn.functional import normalize as unit

from fairseq_icl.metrics import attention_outputs as aou
from fairseq_icl.observing.observation import Observation
from tests.metrics.observations import random_observation, triples

DIMENSION = 2048


def wide_observation(seed: int) -> Observation:
    return random_observation(seed, n=20, layers=2, width=DIMENSION)


def grown(zsl: Observation, growth: float, seed: int) -> Observation:
    """ZSL plus a random update after which the state is `growth` times as long."""
    state = zsl.attention_output.double()
    direction = unit(torch.randn(state.shape, generator=torch.Generator().manual_seed(seed)).double(), dim=-1)
    along = unit(state, dim=-1)
    orthogonal = unit(direction - (direction * along).sum(-1, keepdim=True) * along, dim=-1)
    length = state.norm(dim=-1, keepdim=True) * (growth**2 - 1) ** 0.5
    return replace(zsl, attention_output=state + length * orthogonal)


def test_unrelated_updates_that_double_the_norm_have_a_normalised_similarity_of_a_quarter():
    zsl = wide_observation(0)
    icl, ft = grown(zsl, 2, seed=1), grown(zsl, 2, seed=2)
    assert float(aou.sim_aou(zsl, icl, ft, normalize=True).value.mean()) == pytest.approx(1 / 4, abs=0.01)
    assert float(aou.sim_aou(zsl, icl, ft).value.mean()) == pytest.approx(0, abs=0.01)


def test_norm_matched_random_pair_gives_a_quarter_when_the_true_updates_double_the_norm():
    zsl = wide_observation(0)
    icl = ft = grown(zsl, 2, seed=1)
    matched = aou.sim_aou_random_matched(zsl, icl, ft, torch.arange(20), normalize=True).value
    assert float(matched.mean()) == pytest.approx(1 / 4, abs=0.01)
    assert float(aou.sim_aou_random_matched(zsl, icl, ft, torch.arange(20)).value.mean()) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("growth", [(1.1, 1.1), (1.5, 3.0), (2.0, 2.0), (20.0, 20.0)])
def test_normalised_similarity_of_unrelated_updates_follows_the_formula(growth: tuple[float, float]):
    zsl = wide_observation(0)
    icl, ft = grown(zsl, growth[0], seed=1), grown(zsl, growth[1], seed=2)
    predicted = ((1 - 1 / growth[0]) * (1 - 1 / growth[1])) ** 0.5 / 2
    assert float(aou.sim_aou(zsl, icl, ft, normalize=True).value.mean()) == pytest.approx(predicted, abs=0.01)


def test_centred_random_updates_are_unrelated_and_uniform_ones_lean_to_the_ones_direction():
    zsl = wide_observation(0)
    ones = replace(zsl, attention_output=zsl.attention_output + 1)
    example = torch.arange(20)
    assert float(aou.sim_aou_random(zsl, ones, example, normal=True).value.mean()) == pytest.approx(0, abs=0.01)
    expected = 3**0.5 / 2  # E[r] / sqrt(E[r^2]) for r uniform on [0, 1)
    assert float(aou.sim_aou_random(zsl, ones, example).value.mean()) == pytest.approx(expected, abs=0.01)


@given(triples())
def test_similarity_is_bounded_and_symmetric(triple):
    zsl, icl, ft = triple
    for normalize in (False, True):
        value = aou.sim_aou(zsl, icl, ft, normalize).value
        assert value.shape == (len(zsl), 3)
        assert (value.nan_to_num().abs() <= 1).all()  # NaN: an update of zero
        assert torch.allclose(value, aou.sim_aou(zsl, ft, icl, normalize).value, equal_nan=True)


def test_identical_updates_have_similarity_one():
    zsl, icl = random_observation(0), random_observation(1)
    for similarity in (aou.sim_aou(zsl, icl, icl), aou.sim_aou(zsl, icl, icl, normalize=True)):
        assert torch.allclose(similarity.value, torch.ones_like(similarity.value))
        assert similarity.zero_updates.sum() == 0


def test_opposite_updates_have_similarity_minus_one():
    zsl, icl = random_observation(0), random_observation(1)
    ft = replace(zsl, attention_output=2 * zsl.attention_output - icl.attention_output)
    assert torch.allclose(aou.sim_aou(zsl, icl, ft).value, torch.tensor(-1.0, dtype=torch.float64))


def test_an_update_that_is_zero_or_rounding_has_no_similarity():
    zsl, icl = random_observation(0), random_observation(1)
    rounded = replace(zsl, attention_output=zsl.attention_output * (1 + 1e-6))
    similarities = [
        aou.sim_aou(zsl, icl, zsl),
        aou.sim_aou(zsl, icl, zsl, normalize=True),
        aou.sim_aou_projected(zsl, icl, zsl),
    ]
    for similarity in [*similarities, aou.sim_aou(zsl, icl, rounded), aou.sim_aou(zsl, rounded, icl, normalize=True)]:
        assert similarity.value.isnan().all()
        assert (similarity.zero_updates == 1).all()


def test_the_projected_version_is_free_of_lengths():
    """Updates orthogonal to each other and to the state that double its norm: 1/4 when normalised, 0 when projected."""
    states = 3 * torch.eye(4)[:3].reshape(3, 1, 1, 4)
    zsl, icl, ft = (replace(random_observation(0, n=1, layers=1), attention_output=state) for state in states)
    icl = replace(icl, attention_output=zsl.attention_output + 3**0.5 * icl.attention_output)
    ft = replace(ft, attention_output=zsl.attention_output + 3**0.5 * ft.attention_output)
    assert float(aou.sim_aou(zsl, icl, ft, normalize=True).value) == pytest.approx(0.25)
    assert float(aou.sim_aou_projected(zsl, icl, ft).value) == pytest.approx(0, abs=1e-12)
    both = replace(ft, attention_output=icl.attention_output + ft.attention_output)  # also along the state itself
    assert float(aou.sim_aou_projected(zsl, icl, both).value) == pytest.approx(0.5**0.5)


def test_tiny_updates_keep_their_direction():
    zsl, icl = random_observation(0), random_observation(1)
    zsl = replace(zsl, attention_output=torch.zeros_like(zsl.attention_output))
    tiny = replace(icl, attention_output=icl.attention_output * 1e-30)
    assert torch.allclose(aou.sim_aou(zsl, icl, tiny).value, torch.tensor(1.0, dtype=torch.float64))
