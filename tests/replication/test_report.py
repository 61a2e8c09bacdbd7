"""Tables and figures from results written by the real writer."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fairseq_icl.commands.report import main
from fairseq_icl.errors import UserError
from fairseq_icl.replication.artefacts import CellFolder
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.report import Contents, html, write_report
from fairseq_icl.replication.report.experiments import switched_labels
from fairseq_icl.replication.report.plotting import drawings
from fairseq_icl.replication.report.published import published_figures
from fairseq_icl.replication.report.run import Run, load_run
from fairseq_icl.replication.report.tables import Entry, comparison_tables, paper_tables
from fairseq_icl.replication.report.text import escaped, latex, markdown, plain, shown
from fairseq_icl.results import COLUMNS

DATASETS = ("sst2", "sst5", "mr", "subj", "agnews", "cb")
LAYERS = 3
SHARES = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp", "rpa")
SIMILARITIES = ("sim_aou", "sim_aou_norm", "sim_am_before", "sim_am_after", "sim_am_delta", "alpha")
COUNTS = [f"changed_{who}_{how}" for who in ("both", "only_icl", "only_ft") for how in ("correct", "incorrect")]


def table_of(dataset: str, seed: int, method: str, init: str) -> pd.DataFrame:
    """A cell's table with recognisable numbers: seeds differ by 0.1, layers by 0.01."""
    base = 0.1 * seed
    rows = [(metric, None, base, base - 0.05, base + 0.05) for metric in (*SHARES, *SIMILARITIES)]
    rows += [(metric, layer, base + 0.01 * layer, None, None) for metric in SIMILARITIES for layer in range(LAYERS)]
    rows += [(metric, None, 2.0, None, None) for metric in COUNTS] + [("examples", None, 20.0, None, None)]
    frame = pd.DataFrame(rows, columns=["metric", "layer", "value", "low", "high"])
    frame = frame.assign(dataset=dataset, seed=seed, permutation=0, method=method, init=init, example=pd.NA)
    examples = frame.iloc[:1].assign(example=0, value=1.0)
    return pd.concat([frame, examples])[list(COLUMNS)].astype(COLUMNS)


def make_run(folder: Path, tables_shown: list[str], variants: tuple[str, ...] = ("",), missing: str = "") -> Run:
    """A results folder with two methods, three seeds and every dataset; the cells of `missing` are not finished."""
    store = ResultsFolder(folder)
    entries = []
    for number, variant in enumerate(variants):
        for dataset in DATASETS:
            for method in ("gd", "lcgd"):
                for seed in (1, 2, 3):
                    key = f"{dataset}{method}{seed}v{number}"
                    place = {"model": "125m", "init": "pretrained", "dataset": dataset, "method": method}
                    entries.append({**place, "variant": variant, "seed": seed, "permutation": 0, "key": key})
                    if dataset != missing:
                        write_cell(store, key, dataset, seed, method, 0.01 * 3**number)
    store.add_plan({"experiment": "test", "tables": tables_shown, "cells": entries})
    return load_run(folder)


def write_cell(store: ResultsFolder, key: str, dataset: str, seed: int, method: str, rate: float) -> None:
    settings = {"lr": rate, "num_demonstrations": 8, "switch_labels": "none", "switch_fraction": 1.0}
    configuration = {"cell": {"method": method, "settings": settings}}

    def write(cell: CellFolder) -> None:
        cell.write(configuration, table_of(dataset, seed, method, "pretrained"), configuration, seconds=1.0)

    store.finish(key, write)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), ["deutch2024_table2", "dai2023_accuracy"])


def test_every_published_table_is_well_formed():
    figures = published_figures()
    for name, said in figures["tables"].items():
        assert said["paper"] in figures["papers"], name
        for row in said["rows"]:
            for figure in row.get("published", {}).values():
                assert len(figure["values"]) == len(said["columns"]), (name, row["label"])
                assert len(figure.get("sd", said["columns"])) == len(said["columns"])
            assert set(row.get("doubtful", {})) <= set(said["columns"])


def test_published_numbers_are_those_of_the_papers():
    """Spot checks against the papers, and their printed averages against their own columns."""
    said = published_figures()["tables"]
    assert said["dai2023_accuracy"]["rows"][2]["published"]["2.7b"]["values"] == [95.0, 46.5, 91.3, 90.3, 80.3, 55.4]
    assert said["deutch2024_table1"]["rows"][2]["doubtful"]["subj"].startswith("reads 0.06")
    for name, table in said.items():
        for row in table["rows"]:
            for figure in row.get("published", {}).values():
                if "avg" in figure:
                    assert np.mean(figure["values"]) == pytest.approx(figure["avg"], abs=0.006), (name, row["label"])


def test_ours_stands_beside_the_published_figure(complete):
    table2, accuracy, larger = paper_tables(complete)
    label, entries = table2.rows[0]
    assert label == "SimAOU_norm, GD"
    first, average = entries[0], entries[-1]
    assert first.mean == pytest.approx(0.2)
    assert first.sd == pytest.approx(0.1)
    assert (first.low, first.high) == pytest.approx((0.15, 0.25))
    assert (first.published, first.published_sd) == (0.11, 0.00)
    assert first.difference == pytest.approx(0.09)
    assert (average.mean, average.published) == pytest.approx((0.2, 0.187))
    assert accuracy.rows[0][1][0].mean == pytest.approx(20.0)
    assert "Ours: 125m; published: 1.3b." in table2.notes
    # A model that the paper does not have stands beside each one that it has.
    assert (accuracy.name, larger.name) == ("dai2023_accuracy_1.3b", "dai2023_accuracy_2.7b")
    assert (accuracy.rows[0][1][0].published, larger.rows[0][1][0].published) == (70.5, 71.4)


def test_missing_cells_are_shown_as_missing(tmp_path):
    run = make_run(tmp_path, ["deutch2024_table2"], missing="mr")
    assert len(run.missing) == 6
    (table,) = paper_tables(run)
    entry = table.rows[0][1][table.columns.index("mr")]
    assert (entry.mean, entry.planned, entry.published) == (None, 3, 0.22)
    assert table.rows[0][1][-1].mean is None  # an average over other datasets than the paper's would mislead
    assert "missing" in plain(table)
    assert "missing" in markdown(table)


def test_a_share_of_no_examples_is_not_called_missing(complete):
    values = complete.values.copy()
    values.loc[(values["metric"] == "rec2ftp") & (values["dataset"] == "mr"), "metric"] = "undefined_rec2ftp"
    table, _ = paper_tables(replace(complete, values=values, tables=["dai2023_rec2ftp"]))
    (label, entries), *_ = table.rows
    assert [entry.is_undefined for entry in entries] == [column == "mr" for column in table.columns]
    assert "0/0" in plain(table)
    assert "missing" not in plain(replace(table, rows=((label, entries),)))
    assert any(note.startswith("0/0") for note in table.notes)


def test_other_datasets_keep_the_papers_rows_and_have_their_own_columns(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.replication.test_report.DATASETS", ("demo_a", "demo_b"))
    for table in paper_tables(make_run(tmp_path, ["deutch2024_table1", "deutch2024_table2"])):
        assert table.columns == ("demo_a", "demo_b", "average")
        assert table.rows[0][0].startswith("SimAOU")
        assert all(entry.published is None for _, entries in table.rows for entry in entries)


def test_datasets_that_a_table_of_the_paper_lacks_take_no_part_in_its_average(complete):
    values = complete.values.copy()
    values.loc[values["dataset"] == "agnews", "value"] += 100.0
    (table,) = paper_tables(replace(complete, values=values, tables=["deutch2024_table1"]))
    (_, entries), *_ = table.rows
    assert table.columns == ("sst2", "sst5", "mr", "subj", "cb", "agnews", "average")
    assert (entries[-2].mean, entries[-1].mean) == pytest.approx((100.2, 0.2))


def test_variants_are_compared_with_the_plain_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.replication.test_report.DATASETS", ("sst2",))
    run = make_run(tmp_path, [], variants=("", "lr_scale=3"))
    first, second = comparison_tables(run)
    assert first.columns[:3] == ("accuracy_zsl", "accuracy_icl", "accuracy_ft")
    assert [label for label, _ in first.rows] == ["(plain)", "lr_scale=3"]
    assert first.rows[1][1][0].difference == pytest.approx(0.0)
    assert "lcgd" in second.title


def test_curves_over_switched_labels_begin_at_the_plain_run(complete):
    changed = {key: json.loads(json.dumps(said)) for key, said in complete.configurations.items()}
    values = complete.values.assign(variant=np.where(complete.values["method"] == "lcgd", "switched", ""))
    for key, said in changed.items():
        if "lcgd" in key:
            said["cell"]["settings"].update(switch_labels="both", switch_fraction=0.5)
    run = replace(complete, values=values.assign(method="gd"), configurations=changed)
    charts = {chart.name.removesuffix("_125m"): chart for chart in switched_labels(run, "125m")}
    assert list(charts) == [f"switched_both_{m}" for m in ("accuracy_ft", *SIMILARITIES[:2], *SIMILARITIES[3:5])]
    line = charts["switched_both_sim_aou"].panels[0].series[0]
    assert line.x == [0.0, 0.5]
    (drawing,) = drawings([charts["switched_both_sim_aou"]])
    assert list(drawing.figure.axes[0].lines[0].get_xdata()) == [0.0, 0.5]


def test_text_forms_hold_every_number(complete):
    table = paper_tables(complete)[0]
    assert "| SimAOU_norm, GD | ours | 0.20 ± 0.10 |" in markdown(table)
    assert r"SimAOU\_norm, GD & ours & 0.20 $\pm$ 0.10" in latex(table)
    assert escaped(r"50 % of {a_b} \ x") == r"50 \% of \{a\_b\} \textbackslash{} x"
    assert "+0.09" in plain(table)


class Page(HTMLParser):
    """What an HTML page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images, self.links, self.ids, self.tags, self.data, self.inside = [], [], set(), [], "", False
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.data += data if self.inside else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        self.inside = tag == "script" and found.get("type") == "application/json"
        self.ids.add(found.get("id"))
        if tag == "img":
            self.images.append(found)
        if "href" in found:
            self.links.append(found["href"])


def test_the_page_is_self_contained_and_every_link_has_a_target(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.replication.test_report.DATASETS", ("sst2", "mr"))
    run = make_run(tmp_path / "run", ["deutch2024_table2"], variants=("", "lr_scale=3", "lr_scale=9"))
    written = write_report(run, tmp_path / "report", ("html",))
    text = written["html"].read_text()
    page = Page(text)
    data = json.loads(page.data)
    assert len(data["charts"]) >= 8
    assert all(chart["panels"] and chart["title"] and chart["caption"] for chart in data["charts"])
    assert page.images == []
    inner = [link[1:] for link in page.links if link.startswith("#")]
    assert inner
    assert set(inner) <= page.ids
    assert [link for link in page.links if not link.startswith("#")] == ["data:,"]
    assert not re.search(r"""(src|href)=["']?(https?:|//|/)""", text)
    assert "@import" not in text


def test_the_same_numbers_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.replication.test_report.DATASETS", ("sst2",))
    run = make_run(tmp_path / "run", ["deutch2024_table2"])
    first, second = (write_report(run, tmp_path / name) for name in ("a", "b"))
    for name in first:
        assert first[name].read_bytes() == second[name].read_bytes(), name
    figures = sorted((tmp_path / "a" / "figures").iterdir())
    assert figures
    assert all(path.read_bytes() == (tmp_path / "b" / "figures" / path.name).read_bytes() for path in figures)


def test_csv_has_a_line_for_every_place(complete, tmp_path):
    path = write_report(complete, tmp_path, ("csv",))["csv"]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 * 7 + 2 * 3 * 7 + 4 * 4  # the overview: ZSL, ICL, gd, lcgd
    assert rows[0]["published"] == "0.11"
    assert rows[0]["cells"].split() == ["sst2gd1v0", "sst2gd2v0", "sst2gd3v0"]
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert {"mean", "sd", "low", "high", "runs", "keys"} <= set(summary)


def test_the_overview_has_every_method_and_the_metrics_of_the_user(complete):
    configurations = {key: said | {"metrics": {"mine": "plugin.mine"}} for key, said in complete.configurations.items()}
    mine = complete.values[(complete.values["metric"] == "sim_aou") & (complete.values["method"] == "lcgd")]
    own = mine.assign(metric="mine", method="my_method", value=0.25)
    planned = complete.planned[complete.planned["method"] == "lcgd"].assign(method="my_method")
    run = replace(
        complete,
        configurations=configurations,
        values=pd.concat([complete.values, own]),
        planned=pd.concat([complete.planned, planned]),
    )
    contents = Contents.of(run)
    (table,) = contents.overviews
    assert table.title == "125m: means over 6 datasets and 3 seeds"
    rows = {label: dict(zip(table.columns, entries, strict=True)) for label, entries in table.rows}
    assert list(rows) == ["ZSL", "ICL", "gd", "lcgd", "my_method"]
    assert rows["my_method"]["mine"].mean == pytest.approx(0.25)
    assert rows["ZSL"]["mine"].mean is None
    expected = complete.summary[(complete.summary["metric"] == "sim_aou") & (complete.summary["method"] == "gd")]
    assert rows["gd"]["SimAOU"].mean == pytest.approx(expected["mean"].mean())
    printed = contents.plain()
    assert printed.index("On 125m, of the papers'") < printed.index(table.title) < printed.index("authors' runs")
    assert "no data" not in printed.split("authors' runs")[0]


def test_updates_that_were_skipped_are_named(complete):
    row = complete.values.iloc[:1].assign(metric="skipped_updates", layer=None, value=3.0)
    run = replace(complete, values=pd.concat([complete.values, row], ignore_index=True))
    assert complete.warnings == []
    (warning,) = run.warnings
    assert warning.startswith("Updates of fine-tuning were skipped in 1 cells")
    assert "(sst2, gd, seed 1: 3)" in warning
    assert warning in html.page(Contents.of(run), []).replace("&#39;", "'")


def test_tables_have_no_columns_for_datasets_that_are_not_in_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.replication.test_report.DATASETS", ("mr", "sst2"))
    (table,) = paper_tables(make_run(tmp_path / "run", ["deutch2024_table2"]))
    assert table.columns == ("sst2", "mr", "average")


def test_the_command_prints_tables_and_refuses_other_folders(complete, tmp_path, capsys):
    assert main([str(complete.folder), "--to", str(tmp_path / "r"), "--format", "md"]) == 0
    printed = capsys.readouterr().out
    assert "Similarities of vanilla (GD) and layer-causal (LCGD)" in printed
    assert "36 of 36 cells finished" in printed
    assert [path.name for path in (tmp_path / "r").glob("report.*")] == ["report.md"]
    with pytest.raises(UserError, match="not a results folder"):
        main([str(tmp_path)])
    ResultsFolder(tmp_path / "empty")
    with pytest.raises(UserError, match="nothing was planned"):
        main([str(tmp_path / "empty")])


@pytest.mark.parametrize(
    ("mean", "sd", "text"),
    [
        (3e-5, 0.02, "3e-05 ± 0.0200"),
        (-4e-5, 2e-5, "-4e-05 ± 2e-05"),
        (6e-5, 0.0, "0.0001 ± 0.0000"),
        (0.0, 1e-17, "0.0000 ± 0.0000"),
    ],
)
def test_what_is_not_zero_is_not_shown_as_zero_unless_it_is_rounding(mean, sd, text):
    assert shown(Entry(mean, sd), 4, "published")["ours"] == text
