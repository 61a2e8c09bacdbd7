"""The bounds: strict at the 125m shape, the older ones elsewhere."""

import pytest

from benchmarks import limits
from benchmarks.limits import Bound


@pytest.mark.parametrize(
    ("bound", "strict", "otherwise"),
    [
        (limits.ICL_SCORING, 40, 20),
        (limits.GEMM_SHARE, 0.85, 0.5),
        (limits.STEPS["ft"], 2, 1.3),
        (limits.STEPS["lcgd"], 4, 2),
        (limits.PIPELINE, 20, 10),
        (limits.WHOLE_PROMPTS, 35, 35),
        (limits.KEY_VALUE_CACHE, 1.8, 1.8),
    ],
)
def test_bounds_are_those_of_the_shape(bound: Bound, strict: float, otherwise: float) -> None:
    assert bound.at("125m") == strict
    assert bound.at("355m") == bound.at("tiny") == otherwise
