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
    drawings = {drawing.name: drawing for drawing in all_figures(short_circuits)}
    by_depth = drawings["accuracy_by_depth_model_pretrained"]
    labels = [text.get_text() for text in by_depth.figure.legends[0].get_texts()]
    assert labels == ["ZSL", "ICL", "FT gd"]
    lines = drawings["short_circuits_model"].figure.axes[0].containers
    assert [line.get_label() for line in lines] == ["ZSL, cut", "ICL, cut", "FT, cut", "FT, whole"]
    assert all(line.lines[0].get_xdata().tolist() == [1, 2, 3] for line in lines)
