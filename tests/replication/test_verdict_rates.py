"""A small part of examples/verdict_rates.py: without an effect, verdicts are wrong no more often than they say.

Each of these was decided in 8 to 41 % of the repeats by intervals from a bootstrap over seeds; 2.5 % are meant.
"""

import pytest

from examples.verdict_rates import FORMS, rates

BY_NAME = {form.name: form for form in FORMS}


@pytest.mark.parametrize(
    ("name", "spread", "seeds", "places"),
    [
        ("every", "equal", 3, 6),
        ("most", "unequal", 2, 6),
        ("average", "unequal", 2, 6),
        ("every layer", "unequal", 3, 6),
        ("every, a share", "unequal", 2, 2),
    ],
)
def test_without_an_effect_few_claims_are_decided(name: str, spread: str, seeds: int, places: int):
    found = rates(BY_NAME[name], spread, seeds, places, repeats=150)
    assert max(found.holds, found.fails) <= 0.06  # three standard errors above 2.5 %
    assert found.of_places >= 0.93
    assert not found.of_average < 0.9  # one a repeat: three standard errors below 95 %
