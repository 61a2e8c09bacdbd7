"""The authors' own runs beside ours: in tables, as bands, step by step; and two runs beside each other."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.replication.artefacts import CellFolder
from fairseq_icl.replication.report import Contents, write_report
from fairseq_icl.replication.report.experiments import clipping, trajectory_tables
from fairseq_icl.replication.report.figures import gradient_norms, over_tasks, similarities
from fairseq_icl.replication.report.html import MOST_BYTES, page_examples
from fairseq_icl.replication.report.plotting import drawings
from fairseq_icl.replication.report.published import (
    FOLDER,
    RUN,
    all_logs,
    authors_gradients,
    authors_means,
    authors_noise,
    authors_prediction_changes,
    authors_runs,
    authors_trajectory,
    published_figures,
    zero_shot_errors,
)
from fairseq_icl.replication.report.run import Run, side_by_side, steps_of
from fairseq_icl.replication.report.tables import paper_tables
from fairseq_icl.replication.report.text import comma_separated, csv_of, plain
from tests.replication import claims_world as world


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return world.make(tmp_path_factory.mktemp("reference") / "run", world.SATISFIED, seeds=(1, 2))


def test_tables_show_what_the_authors_logs_average(run: Run):
    (table,) = paper_tables(replace(run, tables=["deutch2024_table1"]))
    rows = dict(table.rows)
    column = table.columns.index("mr")
    trained, embeddings = rows["SimAOU_norm, trained"][column], rows["SimAOU_norm, trained embeddings"][column]
    # fp16 over three seeds; fp32 is one run.
    assert trained.authors["fp16"] == pytest.approx((0.21568, 0.008816), abs=1e-5)
    assert trained.authors["fp32"] == (pytest.approx(0.2214), None)
    assert embeddings.authors["fp16"][0] == pytest.approx(0.2464)
    assert rows["SimAOU, trained"][column].authors == {}  # the logs are always normalised
    assert rows["SimAOU, trained embeddings"][column].doubtful.startswith("reads 0.24")
    assert rows["SimAOU, no training"][column].mean == pytest.approx(0.7, abs=0.01)  # of layer-norms
    assert "authors' runs, fp16" in plain(table)
    assert any(note.startswith("A suspicion") for note in table.notes)
    head, *lines = comma_separated([table]).splitlines()
    assert "authors_fp16,authors_fp32" in head
    assert any("0.2464" in line for line in lines)


def test_every_run_of_the_authors_is_there():
    runs = authors_runs()
    trained = runs[
        (runs["source"].str.startswith("master")) & (runs["metric"] == "sim_aou_norm") & runs["layer"].isna()
    ]
    assert trained.groupby("init").size().to_dict() == {"layer-norms": 15, "pretrained": 36, "trained-embeddings": 15}
    raw = pd.read_csv(FOLDER / "authors_runs.csv")
    assert len(raw.drop_duplicates([*RUN, "clip_norm", "precision", "source"])) == 91
    names = [*RUN, "k", "clip_norm", "precision", "source", "repeat"]
    more = pd.read_csv(FOLDER / "authors_runs_more.csv")
    assert len(more.drop_duplicates(names)) == 48  # six new configurations, 42 repeats
    assert set(raw.loc[raw["clip_norm"] == "different.layers.clipping", "precision"]) == {"fp32"}  # not fp16, as marked
    swept = runs[(runs["dataset"] == "subj") & (runs["metric"] == "sim_aou_norm") & runs["layer"].isna()]
    assert sorted(set(swept["clip_norm"])) == [0, 0.2, 0.5, 1, 2, 5, 7, 9, 12, 15]


def test_figures_by_layer_have_the_authors_band_and_all_tasks_together(run: Run):
    charts = {chart.name: chart for chart in (*over_tasks(run, "1.3b"), *similarities(run, "1.3b"))}
    together = {panel.title: panel for panel in charts["over_tasks_1.3b"].panels}["SimAOU_norm"]
    labels = [series.label for series in together.series]
    assert labels[:2] == ["gd, pretrained", "lcgd, pretrained"]
    assert {label for label in labels if label.startswith("authors' runs")} == {
        f"authors' runs: {name}" for name in labels if "linearized" not in name and "authors" not in name
    }
    ours = together.series[0]
    assert (ours.y[0], len(ours.y)) == (pytest.approx(0.5, abs=0.02), 24)
    band = next(series for series in together.series if series.reference)
    assert (band.x[0], band.x[-1]) == (0.0, 23.0)
    for drawing in drawings([charts["over_tasks_1.3b"]]):
        assert len(drawing.figure.axes) == 4


def test_the_clipping_sweep_stands_beside_the_authors(run: Run):
    values, configurations = run.values.copy(), {}
    for key, said in run.configurations.items():
        changed = json.loads(json.dumps(said))
        if key.endswith("lcgd2"):
            changed["cell"]["settings"] |= {"clip_norm": 12.0, "seed": 1}
            values.loc[values["key"] == key, "variant"] = "clip_norm=12"
        configurations[key] = changed
    swept = replace(run, values=values.assign(seed=1, dataset="subj"), configurations=configurations)
    (chart, *_) = clipping(swept, "1.3b")
    assert chart.ticks == ["0.2", "0.5", "1", "2", "5", "7", "9", "12", "15", "none"]
    ours, theirs = chart.panels[0].series
    assert ours.x == [7.0, 9.0]
    assert (len(theirs.x), theirs.y[theirs.x.index(7)]) == (10, pytest.approx(0.348))


def test_gradients_of_gd_are_on_a_linear_scale_and_those_of_lcgd_on_a_logarithmic_one(run: Run):
    grid = np.ones((4, 24))
    keys = {method: f"sst2pretrained{method}1" for method in ("gd", "lcgd")}
    grids = {"gradients": dict.fromkeys(keys.values(), grid), "whole_layers": dict.fromkeys(keys.values(), 9 * grid)}
    charts = list(gradient_norms(replace(run, **grids), "1.3b"))
    assert [chart.panels[0].logarithmic for chart in charts] == [False, True, False, True]
    assert [float(chart.panels[0].grid.mean()) for chart in charts] == [1, 1, 9, 9]
    assert charts[0].panels[0].grid.shape == (24, 4)
    assert len(list(drawings(charts))) == 4


def logged_run(folder: Path, **changes: object) -> Run:
    """A run whose steps are those of the authors' log."""
    level = {world.LCGD: world.SATISFIED[world.LCGD]}
    run = world.make(folder, level, seeds=(4,))
    key = "mrpretrainedlcgd4"
    planned = run.planned[run.planned["key"] == key].assign(**{"dataset": "subj", **changes})
    log = authors_trajectory()
    steps = pd.DataFrame({name: log[name] for name in ("loss_bits", "sample_size", "gradient_norm")})
    layers = int(changes.get("layers", 24))
    gradients = {key: np.ones((len(steps), layers))}
    planned = planned.drop(columns="layers", errors="ignore")
    return replace(run, planned=planned, experiments=["trajectory"], steps={key: steps}, gradients=gradients)


def test_the_trajectory_is_compared_step_by_step_with_the_log(tmp_path: Path):
    (table,) = trajectory_tables(logged_run(tmp_path))
    assert len(table.rows) == 32
    label, (loss, tokens, norm) = table.rows[0]
    assert (label, loss.published, tokens.published, norm.published) == ("step 1", 490.281, 28, 38.702)
    assert all(entry.difference == 0 for _, entries in table.rows for entry in entries)


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"model": "125m"}, "this is 125m"), ({"layers": 12}, "with 12"), ({"dataset": "sst2"}, "this is sst2")],
)
def test_what_is_not_the_logged_run_is_not_compared(tmp_path: Path, changes: dict, part: str):
    (table,) = trajectory_tables(logged_run(tmp_path, **changes))
    assert part in table.notes[0]
    assert table.notes[0].startswith("Cannot be compared")
    assert all(entry.published is None for _, entries in table.rows for entry in entries)


def test_steps_are_read_from_the_gradient_record():
    record = pd.DataFrame({"step": [0, 0, 1], "norm": [3.0, 4.0, 2.0], "loss_sum": [np.log(2) * 8, np.log(2) * 8, 0.0]})
    steps = steps_of(record.assign(sample_size=4))
    assert steps["loss_bits"].tolist() == pytest.approx([2.0, 0.0])
    assert steps["gradient_norm"].tolist() == [5.0, 2.0]


def test_two_runs_of_one_model_stand_side_by_side(run: Run, tmp_path: Path):
    level = {place: world.VIOLATED[place] for place in (world.GD, world.LCGD)}
    other = world.make(tmp_path / "other", level, seeds=(1, 2))
    both = side_by_side([run, other])
    assert list(both.planned["model"].drop_duplicates()) == ["1.3b [run]", "1.3b [other]"]
    contents = Contents.of(both)
    first, second = contents.verdicts.values()
    said = [(a.status, b.status) for a, b in zip(first, second, strict=True) if a.claim.name == "sim_am_grows"]
    assert said == [("holds", "does not hold")]
    text = write_report(contents, tmp_path / "report", ("html",))["html"].read_text()
    assert "here: 1.3b [run]" in text
    assert "here: 1.3b [other]" in text
    assert 'class="pair"' in text


def test_examples_are_kept_in_bounds_and_checked(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = run.cell_folder("1.3b", "sst2pretrainedgd1").path / "examples.json"
    kept = {"demonstrations": [["a", "b"]], "examples": []}
    path.write_text(json.dumps(kept))
    (group,) = page_examples(run)
    assert (group["dataset"], group["method"], group["demonstrations"]) == ("sst2", "gd", [["a", "b"]])
    monkeypatch.setattr("fairseq_icl.replication.report.html.MOST_BYTES", 10)
    assert page_examples(run) == []
    assert MOST_BYTES < 5_000_000
    for wrong in ("[]", "{", '{"demonstrations": [["a"]], "examples": [{"query": 1}]}'):
        path.write_text(wrong)
        with pytest.raises(UserError, match="remove the folder"):
            CellFolder(path.parent).examples()
    path.unlink()


def test_copied_tables_are_no_formulas():
    assert csv_of([["=1", "-0.5", "-x", "+1"]]) == "'=1,-0.5,'-x,'+1\n"


def test_chance_is_computed_from_the_first_papers_accuracies_and_the_authors_counts():
    rows = published_figures()["tables"]["dai2023_rec2ftp"]
    printed = dict(zip(rows["columns"], rows["rows"][1]["published"]["1.3b"]["values"], strict=True))
    mended = {"sst2": 227, "sst5": 181, "mr": 318, "subj": 435, "agnews": 782, "cb": 22}
    logs = all_logs()
    counts = logs[(logs["metric"] == "f2t_icl") & (logs["clip_norm"] == 0)]
    for dataset, number in mended.items():
        assert number in set(counts.loc[counts["dataset"] == dataset, "value"])
        assert printed[dataset] == pytest.approx(100 * number / zero_shot_errors(dataset), abs=0.005)


def test_every_difference_has_the_authors_own_noise_beside_it(run: Run):
    place = ("pretrained", 0.0)
    noise = authors_noise()
    assert noise["sim_aou_norm", "gd", *place, "sst2", "fp16"] == pytest.approx((0.0003, 0.0118), abs=1e-4)
    assert noise["sim_aou_norm", "lcgd", *place, "subj", "fp16"][1] < 0.0005
    assert noise["sim_am_delta", "gd", *place, "agnews", "fp16"] == pytest.approx((0.0625, 0.4142), abs=1e-4)
    (table,) = paper_tables(replace(run, tables=["deutch2024_table2"]))
    entry = dict(table.rows)["SimAOU_norm, GD"][table.columns.index("sst2")]
    assert entry.repeats == pytest.approx(0.0003)
    assert not entry.is_exact
    assert replace(entry, mean=entry.published + 0.0002).is_exact
    assert "their repeats" in plain(table)
    assert "exact" in plain(replace(table, rows=(("x", (replace(entry, mean=entry.published),)),), columns=("sst2",)))


def test_the_authors_rpa_is_recomputed_from_their_counts():
    means = authors_means()
    assert means["rpa_same_label", "gd", "pretrained", 0.0, "sst2", "fp16"][0] == pytest.approx(0.1684, abs=1e-4)
    changes = authors_prediction_changes()
    one_class = changes[(changes["dataset"] == "subj") & (changes["method"] == "lcgd")]
    assert one_class["ft_changed"].tolist() == [1304, 696]  # together all 2000: each says one label for everything


def test_the_authors_heat_map_stands_beside_ours(run: Run):
    assert authors_gradients().shape == (32, 24)
    keys = {"sst2pretrainedlcgd1": np.ones((4, 24))}
    (chart,) = [c for c in gradient_norms(replace(run, whole_layers=keys), "1.3b") if "whole" in c.name]
    assert [panel.title for panel in chart.panels] == ["sst2", "subj: the authors' run"]
    assert chart.panels[-1].grid[0, 0] == pytest.approx(2636.7449)


def test_a_model_that_gives_one_label_is_marked(run: Run):
    counts = run.values[run.values["metric"] == "examples"].assign(metric="labels_ft", value=1.0)
    both = replace(run, values=pd.concat([run.values, counts]), tables=["dai2023_rec2ftp"])
    (table, *_) = paper_tables(both)
    assert "(one label)" in plain(table)
    assert any("ICL's alone" in note for note in table.notes)
    several = replace(run, values=pd.concat([run.values, counts.assign(value=2.0)]), tables=["dai2023_rec2ftp"])
    assert "one label" not in plain(paper_tables(several)[0])


def test_the_authors_shares_of_predictions_stand_beside_ours(run: Run):
    (table,) = paper_tables(replace(run, tables=["authors_predictions"]))
    entries = dict(table.rows)
    column = table.columns.index("sst2")
    assert entries["Rec2FTP, GD"][column].authors["fp16"][0] == pytest.approx(92.16)
    assert entries["RPA (same label), LCGD"][column].authors["fp16"][0] == pytest.approx(32.42, abs=0.01)
