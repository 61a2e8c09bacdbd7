"""Metrics are found by name; new ones are one function, here or in an installed package."""

import inspect
from pathlib import Path

import pytest
import torch

from fairseq_icl import metrics
from fairseq_icl.errors import UserError
from fairseq_icl.metrics import default_names, get_metric, metric, metric_names, shown_as
from fairseq_icl.results.collector import Collector
from fairseq_icl.settings import Settings
from tests.metrics.observations import random_observation


@pytest.fixture
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    monkeypatch.setattr(metrics, "_metrics", dict(metrics._metrics))


def test_every_name_leads_to_a_metric_that_says_what_it_is():
    for name in metric_names():
        assert get_metric(name).compute.__doc__


def test_plain_names_follow_the_reading():
    assert get_metric("sim_am_delta").name == "sim_am_delta_scores"
    assert get_metric("sim_am_delta", Settings.of("paper")).name == "sim_am_delta_softmax"
    assert get_metric("sim_aou_random").name == "sim_aou_random_uniform"
    assert get_metric("sim_aou_random", Settings.of("paper")).name == "sim_aou_random_gaussian"


def test_by_default_every_metric_is_computed_once():
    names = default_names()
    assert len({get_metric(name).name for name in names}) == len(names)
    assert {"sim_am_delta", "sim_am_delta_softmax", "sim_aou_random", "sim_aou_random_gaussian"} <= set(names)
    assert not {"sim_am_delta_scores", "sim_aou_random_uniform"} & set(names)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match=r"'sim_auo' is not known; choose from .*sim_aou"):
        get_metric("sim_auo")


@pytest.mark.usefixtures("own_metrics")
def test_a_new_metric_appears_in_the_table():
    @metric("agreement", conditions=("icl", "ft"))
    def agreement(icl, ft):
        return (icl.prediction == ft.prediction).double()

    zsl, icl, ft = (random_observation(seed) for seed in range(3))
    collector = Collector(["agreement"])
    collector.add(range(6), zsl, icl, ft)
    table = collector.table()
    mean = table[(table["metric"] == "agreement") & table["example"].isna()]
    assert mean["value"].item() == float((icl.prediction == ft.prediction).double().mean())


@pytest.mark.usefixtures("own_metrics")
def test_the_metrics_of_the_guide_work():
    guide = Path(__file__).parents[2] / "docs" / "adding_a_metric.md"
    first_block = guide.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(first_block, {"__name__": "my_metrics"})
    collector = Collector(["gold_gain", "update_length"])
    collector.add(range(6), *(random_observation(seed) for seed in range(3)))
    table = collector.table()
    assert (table["metric"] == "gold_gain").sum() == 1 + 6  # the mean and every example
    assert (table["metric"] == "update_length").sum() == 1 + 3 + 6 * 3


@pytest.mark.usefixtures("own_metrics")
def test_one_name_cannot_mean_two_functions():
    @metric("twice")
    def first(zsl, icl, ft):
        return torch.zeros(1)

    with pytest.raises(ValueError, match="registered twice"):

        @metric("twice")
        def second(zsl, icl, ft):
            return torch.zeros(1)


def test_a_name_that_follows_the_reading_cannot_be_taken():
    with pytest.raises(ValueError, match="stands for sim_am_delta_scores, sim_am_delta_softmax"):
        metric("sim_am_delta")(lambda zsl, icl, ft: torch.zeros(1))


def test_unknown_settings_and_extras_are_refused_at_once():
    with pytest.raises(ValueError, match="unknown fs; choose from zsl, icl, ft"):
        metric("wrong", conditions=("fs",))
    with pytest.raises(ValueError, match="unknown gradient; choose from example, attention, other_ft, weights"):
        metric("wrong", needs=("gradient",))


@pytest.mark.usefixtures("own_metrics")
def test_metrics_of_installed_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "their_metrics.py").write_text(
        "from fairseq_icl.metrics import metric\n\n\n"
        '@metric("theirs", conditions=("icl",))\ndef theirs(icl):\n    return icl.gold.double()\n'
    )
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fairseq_icl.metrics]\ntheirs = their_metrics\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    metrics._load_entry_points.cache_clear()
    assert metric_names()[-1] == "theirs"


def test_titles_and_units_stand_on_the_metric() -> None:
    assert shown_as("sim_aou") == ("SimAOU", "cosine", 1.0)
    assert shown_as("accuracy_icl") == ("ICL accuracy", "percent", 100.0)
    assert shown_as("sim_am_after") == shown_as("sim_am_after_softmax") == ("SimAM", "cosine", 1.0)
    assert shown_as("of_a_package_that_is_not_here") == ("of_a_package_that_is_not_here", "", 1.0)


def test_a_metric_with_a_given_argument_is_still_its_functions():
    known = get_metric("sim_aou_norm")
    assert known.compute.__module__ == "fairseq_icl.metrics.attention_outputs"
    assert "def sim_aou(" in inspect.getsource(inspect.unwrap(known.compute))
