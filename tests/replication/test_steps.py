"""Equal steps in a run and in its report: better, or only bolder?"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.report import write_report
from fairseq_icl.replication.report.displacement import COLUMNS, equal_steps, steps_tables
from fairseq_icl.replication.report.run import load_run
from fairseq_icl.replication.report.tables import comparison_tables
from fairseq_icl.replication.report.text import plain
from tests.replication.toy_run import configuration, run
from tests.world import World

SIZES = (0.001, 0.1)


@pytest.fixture(scope="module")
def steps(world: World, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("steps") / "run"
    return load_run(run(world, out, "experiment=steps", f"vary.layer_step_size={list(SIZES)}"))


def test_every_step_of_every_layer_has_the_size_asked_for(steps):
    sizes = {key: said["cell"]["settings"]["layer_step_size"] for key, said in steps.configurations.items()}
    assert len(sizes) == 6
    for key, size in sizes.items():
        matrix = steps.step_sizes[key]  # (steps, layers)
        assert matrix.shape == (4, 3)
        if size is None:
            assert matrix.std() > 0.01 * matrix.mean()
        else:
            np.testing.assert_allclose(matrix, size, rtol=1e-4)


def test_the_table_compares_methods_at_equal_steps_and_at_the_learning_rate(steps):
    (table,) = steps_tables(steps)
    assert table.columns == COLUMNS
    rows = dict(table.rows)
    assert list(rows) == [
        *(f"{method}, step {size:g}" for size in SIZES for method in ("gd", "lcgd")),
        *(f"{method}, learning rate" for method in ("gd", "lcgd")),
    ]
    step, sim_aou, sim_am_delta, _ = rows["lcgd, step 0.1"]
    assert step.mean == pytest.approx(0.1, rel=1e-4)
    points = equal_steps(steps).set_index(["method", "layer_step_size", "metric"])["mean"]
    assert sim_aou.mean == pytest.approx(points["lcgd", 0.1, "sim_aou"])
    assert sim_am_delta.length_ratio == pytest.approx(points["lcgd", 0.1, "length_ratio_sim_am_delta"])
    lengths = [rows[f"gd, step {size:g}"][1].length_ratio for size in SIZES]
    assert lengths[1] > 10 * lengths[0]  # a longer step changes attention further
    assert "length ratio" in plain(table)


def test_a_length_ratio_stands_beside_the_cosines_of_every_table(steps):
    table, _ = comparison_tables(steps)
    entries = dict(zip(table.columns, dict(table.rows)["layer_step=equal layer_step_size=0.1"], strict=True))
    assert entries["sim_aou"].length_ratio is not None
    assert entries["sim_am_delta"].length_ratio is not None
    assert entries["accuracy_ft"].length_ratio is None
    assert entries["sim_aou_random"].length_ratio is None


def test_the_report_has_the_figures_of_steps(steps, tmp_path: Path):
    folder = tmp_path / "report"
    write_report(steps, folder, ("md", "csv"))
    names = {path.name.removesuffix(".png").rpartition("_")[0] for path in (folder / "figures").iterdir()}
    assert {"steps_sim_aou", "steps_sim_am_delta", "displacement", "step_sizes"} <= names
    text = (folder / "report.md").read_text()
    assert "Steps of one relative size" in text
    assert "length ratio" in text
    assert "length_ratio" in (folder / "report.csv").read_text().splitlines()[0]


def test_a_run_without_equal_steps_has_no_such_table(steps):
    values = steps.values[steps.values["variant"] == ""]
    assert steps_tables(replace(steps, values=values)) == []


@pytest.mark.parametrize("given", ["layer_step=equal", "layer_step_size=0.1"])
def test_half_a_setting_is_refused_before_anything_runs(world: World, tmp_path: Path, given: str):
    with pytest.raises(UserError, match=rf"^{given.partition('=')[0]}.*needs layer_step"):
        expand(configuration(world, tmp_path / "run", "experiment=deutch2024", given, "method=gd"))
