"""The numerical spread, warnings about mixed machines, and marks on numbers that look better than they are."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fairseq_icl.criterions.icl_similarity import summary
from fairseq_icl.models.pretrained_lm import perturb
from fairseq_icl.replication.report import Contents, html, markdown_page
from fairseq_icl.replication.report.experiments import spreads, stability_tables
from fairseq_icl.replication.report.run import load_run
from fairseq_icl.replication.report.tables import comparison_tables, paper_tables
from fairseq_icl.replication.report.text import markdown, plain
from fairseq_icl.results import means, read_results
from fairseq_icl.settings import OBSERVED, Settings
from tests.replication.toy_run import run
from tests.world import World


def test_every_weight_moves_by_one_unit_in_the_last_place():
    model = nn.Linear(50, 40)
    with torch.no_grad():
        model.bias[0] = 0.0
    before = [parameter.detach().clone() for parameter in model.parameters()]
    perturb(model, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    perturb(model, 3)
    for now, old in zip(model.parameters(), before, strict=True):
        up, down = (torch.nextafter(old, torch.full_like(old, limit)) for limit in (torch.inf, -torch.inf))
        assert bool(((now == up) | (now == down) | (old == 0)).all())
    moved_up = (model.weight > before[0]).float().mean()
    assert 0.4 < moved_up < 0.6
    assert model.bias[0] == 0
    other = nn.Linear(50, 40)
    other.load_state_dict(dict(zip(("weight", "bias"), before, strict=True)))
    perturb(other, 4)
    assert not torch.equal(other.weight, model.weight)


def test_all_observations_depend_on_the_perturbation():
    for stages in OBSERVED.values():
        assert Settings(perturbation=2).relevant_to(stages).perturbation == 2


@pytest.fixture(scope="module")
def spread(world: World, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("spread") / "run"
    chosen = ["method=gd", "init=pretrained", "seed=3,4", "vary={perturbation: [1, 2]}"]
    return load_run(run(world, out, "experiment=stability", *chosen))


def test_the_table_has_three_spreads(spread):
    (table,) = stability_tables(spread)
    assert table.columns == ("mean", "SD over perturbations", "SD over seeds beyond that", "half width of the interval")
    entries = dict(table.rows)["toy: sim_aou"]
    chosen = spread.values[(spread.values["metric"] == "sim_aou") & spread.values["layer"].isna()]
    assert len(chosen) == 6
    assert entries[0].mean == pytest.approx(chosen["value"].mean())
    by_seed = [np.var(group["value"], ddof=1) for _, group in chosen.groupby("seed")]
    assert entries[1].mean == pytest.approx(np.sqrt(np.mean(by_seed)), rel=1e-6)
    of_means = np.var([group["value"].mean() for _, group in chosen.groupby("seed")], ddof=1)
    assert entries[2].mean == pytest.approx(np.sqrt(of_means - np.mean(by_seed) / 3), rel=1e-6)
    assert entries[3].mean == pytest.approx(((chosen["high"] - chosen["low"]) / 2).mean())
    assert 0 < entries[1].mean < entries[2].mean


def test_seeds_are_not_given_the_spread_of_rounding():
    rng = np.random.default_rng(0)
    drawn = pd.DataFrame([(seed, draw) for seed in range(400) for draw in range(3)], columns=["seed", "draw"])
    own = rng.normal(0, 2, 400)[drawn["seed"]]
    for sd in (0.0, 2.0):
        values = drawn.assign(value=own * sd / 2 + rng.normal(0, 1, len(drawn)))
        assert spreads(values, ["seed"]) == pytest.approx((1, sd), abs=0.25)


def test_a_spread_beyond_the_interval_is_said(spread):
    values = spread.values.copy()
    shift = values["variant"].map({"": 0.0, "perturbation=1": 10.0, "perturbation=2": 20.0})
    values["value"] += shift.where(values["metric"] == "sim_aou", 0.0)
    (table,) = stability_tables(replace(spread, values=values))
    assert table.notes[-1].startswith("The numerical spread exceeds the examples' interval in: ")
    assert "toy: sim_aou," in table.notes[-1] or table.notes[-1].endswith("toy: sim_aou.")


def test_runs_without_perturbations_have_no_such_table(world, tmp_path):
    out = run(world, tmp_path / "run", "experiment=deutch2024", "method=gd", "init=pretrained")
    assert stability_tables(load_run(out)) == []


def test_a_borrowed_learning_rate_is_warned_of(spread):
    borrowed = {key: said | {"lr_made_for": "1.3b"} for key, said in spread.configurations.items()}
    (warning,) = replace(spread, configurations=borrowed).warnings
    assert "the learning rate is the paper's for 1.3b, not one for model" in warning


def test_a_folder_of_different_machines_is_warned_of(spread):
    assert spread.warnings == []
    changed = {key: json.loads(json.dumps(said)) for key, said in spread.configurations.items()}
    next(iter(changed.values()))["machine"]["threads"] = 64
    mixed = replace(spread, configurations=changed)
    (warning,) = mixed.warnings
    assert "different threads (1, 64)" in warning or "64" in warning
    contents = Contents.of(mixed)
    assert warning in markdown_page(contents, [])
    assert warning in html.page(contents, [])


def test_rows_that_are_not_the_papers_or_not_all_the_same_are_warned_of(spread):
    changed = {key: json.loads(json.dumps(said)) for key, said in spread.configurations.items()}
    first, second = list(changed.values())[:2]
    assert set(first["rows"]) == {"train", "valid"}
    assert first["rows"] == second["rows"]
    first["rows"]["train"]["sha256"] = "0" * 64
    first["rows"]["valid"]["likeness"] = "other"
    del second["rows"]  # as results of earlier versions
    others, papers = replace(spread, configurations=changed).warnings
    assert others == "toy: cells of this folder read different train rows, or in different orders."
    assert papers.startswith("toy: its valid rows are not, or not surely, row for row those of the papers")


@pytest.fixture(scope="module")
def nothing(world: World, tmp_path_factory: pytest.TempPathFactory):
    """Fine-tuning that changes nothing, scored on one example."""
    out = tmp_path_factory.mktemp("nothing") / "run"
    chosen = ["method=gd", "init=pretrained", "lr=0", "limit=1", "vary={clip_norm: [1]}"]
    return load_run(run(world, out, "experiment=deutch2024", *chosen))


def test_one_example_and_no_update_are_marked_where_they_are_read(nothing):
    table = next(table for table in paper_tables(nothing) if table.name.startswith("deutch2024_table2"))
    for text in (plain(table), markdown(table), html.page(Contents.of(nothing), [])):
        assert "no update" in text
        assert "(n=1)" in text
        assert "no update: no update is above rounding here" in text
        assert "n=1: a single validation example" in text
    row = next(line for line in markdown(table).splitlines() if "95 % interval" in line)
    (comparison,) = comparison_tables(nothing)
    assert "(n=1)" in plain(comparison)
    assert "[" not in row or "n=1" in markdown(table)


def test_the_summary_of_validation_marks_them_too(nothing):
    key = nothing.planned["key"].iloc[0]
    table, _ = read_results(nothing.folder / "cells" / key / "results.parquet")
    lines = {line.split()[0]: line for line in summary(means(table)).splitlines()}
    assert "sim_aou" not in lines  # it has no value, and is counted
    assert lines["accuracy_icl"].endswith("none (n=1)")
    assert "no update" not in lines["accuracy_icl"]
    assert "sim_aou" in lines["cosines"]


def test_ordinary_numbers_have_no_mark(spread):
    assert isinstance(spread.summary, pd.DataFrame)
    (table,) = comparison_tables(spread)
    assert "no update" not in plain(table)
    assert "(n=1)" not in plain(table)
