"""Cells in one process: shared work, undone fine-tuning, failures, and nothing computed twice."""

import json

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.replication.folders import StoreError
from fairseq_icl.replication.report.run import load_run
from fairseq_icl.results import read_results
from tests.replication.toy_run import run, tables
from tests.world import World

METHODS = ("gd", "lcgd", "linearized", "linearized_lcgd")


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory):
    """A run with every method and two inits."""
    methods = "method=gd,lcgd,linearized,linearized_lcgd,alpha,none"
    out = tmp_path_factory.mktemp("whole") / "run"
    return run(world, out, "experiment=deutch2024", methods, "init=pretrained,trained-embeddings", "skip=[]")


def test_every_cell_has_its_metrics(whole):
    results = load_run(whole)
    assert results.planned["finished"].all()
    assert len(results.planned) == 12
    found = results.summary.groupby(["init", "method"])["metric"].agg(set)
    for method in METHODS:
        assert {"accuracy_ft", "sim_aou", "sim_am_delta", "kendall_tokens", "examples"} <= found["pretrained", method]
    assert "alpha" in found["pretrained", "alpha"]
    assert "accuracy_icl" in found["pretrained", "none"]
    assert not {"accuracy_ft", "sim_aou"} & found["pretrained", "none"]


def test_a_cell_does_not_depend_on_what_ran_before_it(world, whole, tmp_path):
    last = ["method=linearized_lcgd", "init=trained-embeddings", "skip=[]"]
    alone = run(world, tmp_path / "alone", "experiment=deutch2024", *last)
    (key, table), *rest = tables(alone).items()
    assert not rest
    assert tables(whole)[key] == table


def test_the_same_run_twice_gives_the_same_bytes(world, whole, tmp_path):
    again = run(world, tmp_path / "again", "experiment=deutch2024", "method=gd,lcgd,alpha", "init=pretrained")
    first = tables(whole)
    assert len(tables(again)) == 3
    assert all(first[key] == table for key, table in tables(again).items())


def test_finished_cells_are_left_alone_and_observations_go(world, tmp_path):
    out = run(world, tmp_path / "run", "experiment=deutch2024", "method=gd", "init=pretrained")
    before = {path: path.stat().st_mtime_ns for path in (out / "cells").rglob("*")}
    run(world, out, "experiment=deutch2024", "method=gd,lcgd", "init=pretrained")
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert len(tables(out)) == 2
    assert list((out / "observations").iterdir()) == []


def test_a_cell_tells_its_configuration_and_what_made_it(whole, world):
    for cell in (whole / "cells").iterdir():
        described = json.loads((cell / "cell.json").read_text())
        table, made_by = read_results(cell / "results.parquet")
        assert made_by["config"] == described
        assert set(table["method"]) == {described["cell"]["method"]}
        assert described["model"]["path"] == str(world.model)
        if described["cell"]["method"] in METHODS:
            assert described["command"].startswith("fairseq-train --user-dir fairseq_icl")
            assert (cell / "gradients.parquet").is_file()


def test_audit_variants_share_training_where_only_metrics_differ(world, tmp_path):
    variants = ["vary={attention_similarity: [scores, probabilities]}", "plain=false", "init=pretrained"]
    out = run(world, tmp_path / "run", "experiment=deutch2024", "method=gd", *variants)
    results = load_run(out)
    values = results.summary.set_index(["variant", "metric"])["mean"]
    scores, probabilities = "attention_similarity=scores", "attention_similarity=probabilities"
    assert values[scores, "sim_am_delta"] == values[probabilities, "sim_am_delta_scores"]
    assert values[probabilities, "sim_am_delta"] == values[scores, "sim_am_delta_softmax"]
    assert values[scores, "sim_aou"] == values[probabilities, "sim_aou"]


def test_layers_can_be_held_to_the_norms_of_vanilla_fine_tuning(world, tmp_path):
    limits = ["layer_clip=norm", "layer_clip_value=gd", "init=pretrained"]
    out = run(world, tmp_path / "run", "experiment=deutch2024", "method=lcgd", *limits)
    free = run(world, tmp_path / "free", "experiment=deutch2024", "method=lcgd", "init=pretrained")
    assert list(tables(out).values()) != list(tables(free).values())


def test_a_diverging_cell_does_not_stop_the_others(world, tmp_path):
    with pytest.raises(UserError, match=r"1 of 2 cells failed.*lr=1e\+38.*NaN or infinite"):
        run(world, tmp_path / "run", "experiment=deutch2024", "method=gd", "init=pretrained", "vary={lr: [1.0e+38]}")
    assert len(tables(tmp_path / "run")) == 1
    assert [path.name for path in (tmp_path / "run" / "cells").iterdir()] == list(tables(tmp_path / "run"))


def test_other_data_or_another_model_make_other_cells(world, tmp_path):
    from tests.world import make_world

    other = make_world(tmp_path / "other")
    with (other.data / "toy_valid.jsonl").open("a") as file:
        file.write('{"text": "word1 word2", "label": 0}\n')
    out = run(world, tmp_path / "run", "experiment=deutch2024", "method=gd", "init=pretrained")
    run(other, out, "experiment=deutch2024", "method=gd", "init=pretrained")
    assert len(tables(out)) == 2


def test_a_full_disk_stops_the_run_at_once(world, tmp_path):
    out = run(world, tmp_path / "run", "experiment=deutch2024", "method=none", "init=pretrained")
    (out / "cells").rename(tmp_path / "gone")
    (out / "cells").write_text("not a folder any more")
    with pytest.raises(StoreError, match="cannot be written"):
        run(world, out, "experiment=deutch2024", "method=gd,lcgd", "init=pretrained")
