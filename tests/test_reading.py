"""Two named readings and single overrides."""

from dataclasses import asdict

import pytest

from fairseq_icl.reading import CHOICES, PAPER, Reading


def test_default_is_what_the_authors_ran():
    assert asdict(Reading()) == {name: values[0] for name, values in CHOICES.items()}
    assert Reading.of("authors") == Reading()


def test_paper_sets_every_difference_at_once():
    assert asdict(Reading.of("paper")) == PAPER
    assert set(PAPER) == set(CHOICES)


def test_single_flags_override_the_reading():
    reading = Reading.of("paper", loss_on="all", biases=None)
    assert (reading.loss_on, reading.biases, reading.position) == ("all", "frozen", "query")


def test_unknown_value_is_refused():
    with pytest.raises(ValueError, match="loss_on='some': choose from all, label"):
        Reading(loss_on="some")
