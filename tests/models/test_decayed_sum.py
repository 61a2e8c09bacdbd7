"""Momentum attention: the scan against the loop of the formula, its gradient, and going on behind earlier tokens."""

import pytest
import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.models.attention import Rule, decayed_sum

EXACT = 1e-10


def naive(values: Tensor, eta: float | Tensor) -> Tensor:
    """The formula as it stands, token by token."""
    rows = []
    for t in range(values.shape[-2]):
        row = torch.zeros_like(values[..., 0, :])
        for i in range(t):
            power = eta[..., 0] ** (t - i) if isinstance(eta, Tensor) else eta ** (t - i)
            row = row + power * values[..., i, :]
        rows.append(row)
    return torch.stack(rows, dim=-2)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 37])
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.99])
def test_scan_equals_loop(length: int, eta: float) -> None:
    values = draw(2, 3, length, 4)
    sums, state = decayed_sum(values, eta)
    assert relative_error(sums, naive(values, eta)) < EXACT
    assert relative_error(state, eta * (sums + values)[..., -1:, :]) < EXACT


def test_gradients_of_values_and_of_eta_per_head() -> None:
    eta = torch.tensor([0.2, 0.9], dtype=torch.float64)[:, None, None].requires_grad_()
    values, weights = draw(2, 2, 19, 3).requires_grad_(), draw(2, 2, 19, 3, seed=1)
    scan = torch.autograd.grad((decayed_sum(values, eta)[0] * weights).sum(), [values, eta])
    loop = torch.autograd.grad((naive(values, eta) * weights).sum(), [values, eta])
    assert all(relative_error(ours, theirs) < EXACT for ours, theirs in zip(scan, loop, strict=True))


@pytest.mark.parametrize("pieces", [[1] * 11, [4, 7], [6, 1, 4]])
def test_going_on_in_pieces_gives_the_same(pieces: list[int]) -> None:
    values = draw(2, 3, 11, 4)
    whole, end = decayed_sum(values, 0.7)
    state, sums = None, []
    for part in values.split(pieces, dim=2):
        sum_, state = decayed_sum(part, 0.7, state)
        sums.append(sum_)
    assert state is not None
    assert relative_error(torch.cat(sums, dim=2), whole) < EXACT
    assert relative_error(state, end) < EXACT


def test_momentum_attention_is_causal_attention_plus_the_sum() -> None:
    query, key, value = (draw(1, 2, 9, 4, seed=seed) for seed in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    assert relative_error(Rule(momentum=0.0).attend(query, key, value), plain) < EXACT
    with_sum = Rule(momentum=0.6).attend(query, key, value)
    assert relative_error(with_sum, plain + naive(value, 0.6)) < EXACT
    later = value.clone()
    later[:, :, -1] += 1
    assert torch.equal(Rule(momentum=0.6).attend(query, key, later)[:, :, :-1], with_sum[:, :, :-1])


def test_forgotten_state_breaks_decoding() -> None:
    values = draw(1, 8, 4)
    whole = decayed_sum(values, 0.9)[0]
    assert relative_error(decayed_sum(values[:, 4:], 0.9)[0], whole[:, 4:]) > 0.1


@pytest.mark.parametrize("eta", [-0.1, 1.0, torch.tensor([0.5, 1.2])[:, None, None]])
def test_eta_outside_of_its_range_is_refused(eta: float | Tensor) -> None:
    with pytest.raises(UserError, match="below 1"):
        decayed_sum(draw(2, 5, 3), eta)
