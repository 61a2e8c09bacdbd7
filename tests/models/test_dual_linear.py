"""Linear layers on dual numbers agree with torch's own forward differentiation, at less work."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from fairseq_icl.compat.models import replaced_linear
from fairseq_icl.models.linearized_lm import dual_linear

SHAPES = {"input": (2, 3, 4), "weight": (5, 4), "bias": (5,)}


def arguments(with_tangent: dict[str, bool]) -> dict[str, Tensor]:
    """Random arguments of a linear layer, dual where asked; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    primals = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tangents = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {
        name: forward_ad.make_dual(primals[name], tangents[name]) if dual else primals[name]
        for name, dual in with_tangent.items()
    }


@pytest.mark.parametrize("duals", list(product([False, True], repeat=3)))
@pytest.mark.parametrize("biased", [True, False])
def test_equals_torch_for_every_choice_of_tangents(duals, biased):
    names = SHAPES if biased else ("input", "weight")
    with torch.no_grad(), forward_ad.dual_level():
        given = arguments(dict(zip(names, duals, strict=False)))
        ours = forward_ad.unpack_dual(dual_linear(**given))
        theirs = forward_ad.unpack_dual(functional.linear(**given))
        assert torch.equal(ours.primal, theirs.primal)
        if any(duals[: len(names)]):
            torch.testing.assert_close(ours.tangent, theirs.tangent)
        else:
            assert ours.tangent is None


def test_a_frozen_layer_costs_two_products():
    layer = torch.nn.Linear(4, 5)
    with torch.no_grad(), forward_ad.dual_level(), replaced_linear(dual_linear):
        given = arguments({"input": True})["input"]
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            layer(given)
    products = [event for event in profiler.events() if event.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert len(products) == 2
