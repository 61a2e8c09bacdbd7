"""Short circuits in a run: one cell a layer, scored cut and whole, and drawn."""

import pytest

from fairseq_icl.replication.report.figures import all_figures
from fairseq_icl.replication.report.run import load_run
from tests.replication.toy_run import run


@pytest.fixture(scope="module")
def short_circuits(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("depth") / "run"
    run(world, out, "experiment=short_circuit")
    return load_run(run(world, out, "experiment=deutch2024", "method=gd", "init=pretrained"))


def test_each_stands_for_every_layer_of_the_model(short_circuits):
    cut = short_circuits.planned[short_circuits.planned["method"] == "short_circuit"]
    assert cut["variant"].tolist() == ["layers=0", "layers=1", "layers=2"]
    assert cut["finished"].all()


def test_the_cut_at_the_last_layer_is_the_plain_run(short_circuits):
    values = short_circuits.values
    chosen = values[values["metric"].isin(["accuracy_ft", "sim_aou", "accuracy_by_depth_ft"])]
    columns = ["metric", "layer", "value", "low", "high"]
    last = chosen[chosen["variant"] == "layers=2"][columns].reset_index(drop=True)
    plain = chosen[chosen["method"] == "gd"][columns].reset_index(drop=True)
    assert len(last) > 6
    assert last.equals(plain)


def test_both_figures_are_drawn(short_circuits):
    charts = {chart.name: chart for chart in all_figures(short_circuits)}
    [panel] = charts["accuracy_by_depth_model_pretrained"].panels
    assert [series.label for series in panel.series] == ["ZSL", "ICL", "FT gd"]
    [panel] = charts["short_circuits_model"].panels
    assert [series.label for series in panel.series] == ["ZSL, cut", "ICL, cut", "FT, cut", "FT, whole"]
    assert all(series.x == [0, 1, 2] for series in panel.series)
