"""Draws addressed by example, independent of batching and distributed as promised; cosines defined everywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from fairseq_icl.metrics import vectors
from fairseq_icl.metrics.vectors import cosine, gaussian, l2_norm, uniform


@given(st.permutations(range(8)), st.integers(1, 7))
def test_draws_do_not_depend_on_order_or_batching(order, cut):
    whole = uniform(torch.arange(8), (2, 3), "a")
    order = torch.tensor(order)
    parts = torch.cat([uniform(order[:cut], (2, 3), "a"), uniform(order[cut:], (2, 3), "a")])
    assert torch.equal(parts, whole[order])


def test_uniform_draws_have_the_moments_of_the_uniform_distribution():
    draws = uniform(torch.arange(100), (1000,), "a")
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 0.005
    assert abs(float(draws.var()) - 1 / 12) < 0.002
    assert len(draws.unique()) == draws.numel()


def test_gaussian_draws_have_the_moments_of_the_normal_distribution():
    draws = gaussian(torch.arange(100), (1000,), "a")
    assert abs(float(draws.mean())) < 0.02
    assert abs(float(draws.var()) - 1) < 0.02


def test_draws_made_on_a_gpu_are_those_of_the_cpu():
    """The way of the GPU, run on the CPU: the same bits, and normal numbers that differ by the straight lines."""
    example, shape = torch.tensor([0, 3, 871]), (24, 50)
    drawn = vectors._drawn_by_torch(example, shape, "a")
    assert torch.equal(drawn, uniform(example, shape, "a"))
    exact = vectors._quantile(drawn)
    assert float((gaussian(example, shape, "a") - exact).abs().max()) < 2e-6
    rounded = vectors.uniform_float32(example, shape, "a")
    assert float((rounded - uniform(example, shape, "a")).abs().max()) < 1e-7


@given(st.integers(1, 70), st.integers(0, 3))
def test_zeros_in_front_that_fill_whole_steps_change_no_bit_of_a_product(size, steps):
    a, b = uniform(torch.arange(3), (size,), "a") - 0.5, uniform(torch.arange(3), (size,), "b")
    plain = [pad(x, (-size % vectors.STEP, 0)) for x in (a, b)]
    longer = [pad(x, (steps * vectors.STEP, 0)) for x in plain]
    assert torch.equal(*vectors.dots(tuple(longer)), *vectors.dots(tuple(plain)))


def test_streams_and_examples_are_uncorrelated():
    a, b = uniform(torch.arange(2), (20000,), "a"), uniform(torch.arange(2), (20000,), "b")
    correlation = torch.corrcoef(torch.cat([a, b]))
    assert (correlation - torch.eye(4)).abs().max() < 0.03


@pytest.mark.parametrize("shape", [(), (0,), (7,), (1024,), (3, 1025), (16, 1025), (2048, 2048), (5_000_001,)])
def test_the_norm_of_millions_of_numbers_is_exact_to_six_digits(shape: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = float(x.double().square().sum().sqrt())
    assert float(l2_norm(x)) == pytest.approx(expected, rel=1e-6)
    assert float(l2_norm(x.t() if x.dim() == 2 else x)) == pytest.approx(expected, rel=1e-6)


def test_the_cosine_with_a_zero_vector_is_a_counted_zero():
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]])
    value, zero, _ = cosine(a, torch.tensor([[4.0, 3.0], [1.0, 0.0], [1e-30, 0.0]]))
    assert value.tolist() == [24 / 25, 0.0, 1.0]
    assert zero.tolist() == [0, 1, 0]
