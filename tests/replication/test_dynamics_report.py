"""Dynamics in a run: the cell keeps its curve, the report draws it."""

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.replication.report.figures import all_figures
from fairseq_icl.replication.report.run import load_run
from tests.replication.toy_run import run

WORDS = ("experiment=dynamics", "method=gd", "curve_examples=5")


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("dynamics") / "run"
    run(world, out, *WORDS, "limit=6")
    return run(world, out, *WORDS, "limit=5")


def test_the_curve_ends_in_the_plain_run(folder):
    results = load_run(folder)
    assert len(results.curves) == 2
    for key, curve in results.curves.items():
        limit = results.configurations[key]["cell"]["settings"]["limit"]
        assert sorted(set(curve["demonstrations"])) == [1, 2, 3, 4]
        last = curve[curve["demonstrations"] == 4].set_index("metric")
        overall = results.values[(results.values["key"] == key) & results.values["layer"].isna()].set_index("metric")
        for metric in ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "sim_aou", "sim_am_delta"):
            same = [last.loc[metric, name] == overall.loc[metric, name] for name in ("value", "low", "high")]
            assert all(same) or limit == 6


def test_curves_are_drawn(folder):
    charts = {chart.name: chart for chart in all_figures(load_run(folder))}
    model = "model (limit=6)"  # two runs with different limits are two models
    names = {f"dynamics_{name}_{model}" for name in ("accuracy", "sim_aou", "sim_am_delta")}
    assert names <= charts.keys()
    [panel] = charts[f"dynamics_accuracy_{model}"].panels
    assert [series.label for series in panel.series] == ["ZSL", "ICL", "FT gd"]


def test_a_damaged_curve_is_told(folder):
    (path, *_) = folder.glob("cells/*/curve.parquet")
    content = path.read_bytes()
    path.write_bytes(b"no")
    try:
        with pytest.raises(UserError, match=r"curve.parquet: damaged.*replicate command again"):
            load_run(folder)
    finally:
        path.write_bytes(content)
