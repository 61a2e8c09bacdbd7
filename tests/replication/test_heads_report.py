"""Similarities by head in a run: a heat map layer x head, and keys that stay where no head is recorded."""

from dataclasses import replace

import numpy as np

from fairseq_icl.models.files import find_files
from fairseq_icl.replication import cells
from fairseq_icl.replication.cells import Keys
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.report.figures import all_figures
from fairseq_icl.replication.report.run import load_run
from tests.replication.toy_run import configuration, run

SMALL = ("experiment=deutch2024", "method=gd", "init=pretrained")


def test_the_heat_map_has_every_layer_and_head(world, tmp_path):
    loaded = load_run(run(world, tmp_path / "run", *SMALL, "head_outputs=recorded"))
    (chart,) = [chart for chart in all_figures(loaded) if chart.name == "heads_model_pretrained_gd"]
    (panel,) = chart.panels
    known = loaded.layers.set_index(["metric", "layer"])["mean"]
    heads = loaded.layers["metric"].drop_duplicates().str.fullmatch(r"sim_aou_heads_\d+").sum()
    expected = [[known[f"sim_aou_heads_{head}", layer] for head in range(heads)] for layer in range(3)]
    np.testing.assert_array_equal(panel.grid, np.array(expected, dtype=float))
    assert heads > 1
    assert chart.kind == "heat"
    assert (chart.x, chart.y) == ("head", "layer")


def test_only_cells_with_recorded_heads_have_other_keys(world, tmp_path, monkeypatch):
    (cell,) = expand(configuration(world, tmp_path, *SMALL))
    recorded = replace(cell, settings=replace(cell.settings, head_outputs="recorded"))
    files = find_files(world.model, bpe=None, name="toy")
    for kind in ("zsl", "icl", "ft", "cell"):
        key = Keys(files, world.data).of(cell, kind)
        assert key != Keys(files, world.data).of(recorded, kind)
        with monkeypatch.context() as patch:
            patch.setattr(cells, "LATER", ())
            assert key != Keys(files, world.data).of(cell, kind)  # the setting would be in it
