"""What differs is never averaged: runs with other settings, data or orders in one folder are told apart everywhere."""

import json

import pytest

from fairseq_icl.commands.report import report
from fairseq_icl.replication.report import Contents
from fairseq_icl.replication.report.run import load_run, side_by_side
from tests.replication.toy_run import run, tables

GD = ("experiment=deutch2024", "method=gd", "init=pretrained")


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("lr=0.05", "lr=0.2", {"model (lr=0.05)", "model (lr=0.2)"}),
        (
            "num_demonstrations=2",
            "num_demonstrations=4",
            {"model (num_demonstrations=2)", "model (num_demonstrations=4)"},
        ),
        ("limit=4", "limit=6", {"model (limit=4)", "model (limit=6)"}),
        ("position=query", "position=gold", {"model (position=query)", "model (position=gold)"}),
    ],
)
def test_two_commands_in_one_folder_are_two_rows(world, tmp_path, first, second, names):
    out = run(world, tmp_path / "run", *GD, "seed=3,4", first)
    run(world, out, *GD, "seed=3,4", second)
    found = load_run(out)
    assert set(found.planned["model"]) == names
    assert set(found.summary["runs"]) == {2}  # the seeds, and nothing else
    assert len(tables(out)) == 4
    contents = Contents.of(found)
    assert set(contents.verdicts) == names
    assert all(any(name in table.title for table in contents.papers) for name in names)


def test_a_list_in_one_command_is_told_apart_as_well_and_drawn_as_a_curve(world, tmp_path):
    out = run(world, tmp_path / "run", *GD, "num_demonstrations=1,2,4")
    found = load_run(out)
    assert {said["cell"]["settings"]["num_demonstrations"] for said in found.configurations.values()} == {1, 2, 4}
    assert len(set(found.planned["model"])) == 3
    curve = found.against("num_demonstrations")
    curve = curve[curve["metric"] == "accuracy_icl"]
    assert sorted(curve["num_demonstrations"]) == [1, 2, 4]
    assert set(curve["model"]) == {"model"}


def test_one_command_keeps_the_models_name(world, tmp_path):
    out = run(world, tmp_path / "run", *GD, "seed=3,4")
    assert set(load_run(out).planned["model"]) == {"model"}


def test_orders_are_averaged_only_where_the_experiment_says_so(world, tmp_path):
    out = run(world, tmp_path / "apart", *GD, "permutation=0,1")
    assert set(load_run(out).planned["model"]) == {"model (permutation=0)", "model (permutation=1)"}
    out = run(world, tmp_path / "averaged", *GD, "permutation=0,1", "average_over=[seed,permutation]")
    assert set(load_run(out).planned["model"]) == {"model"}


def test_other_data_under_the_same_settings_are_told_apart(world, tmp_path):
    from tests.world import make_world

    other = make_world(tmp_path / "other")
    with (other.data / "toy_valid.jsonl").open("a") as file:
        file.write('{"text": "word1 word2", "label": 0}\n')
    out = run(world, tmp_path / "run", *GD)
    run(other, out, *GD)
    assert len({name for name in load_run(out).planned["model"] if name.startswith("model (data ")}) == 2


def test_cells_of_several_versions_are_warned_of(world, tmp_path, capsys):
    out = run(world, tmp_path / "run", *GD, "seed=3,4")
    path = sorted(out.glob("cells/*/cell.json"))[0]
    said = json.loads(path.read_text())
    said["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(said))
    report(out, quiet=True)
    assert "several versions of torch (1.0, " in capsys.readouterr().err


def test_two_runs_of_order_side_by_side_are_a_report(world, tmp_path):
    words = ("experiment=order", "method=gd,gd_full_batch", "init=pretrained", "permutation=0,1", "variants={}")
    runs = [run(world, tmp_path / f"of_{seed}", *words, f"seed={seed}") for seed in (3, 4)]
    found = side_by_side([load_run(folder) for folder in runs])
    assert found.planned["finished"].all()
    report(runs, tmp_path / "report", quiet=True)
    assert (tmp_path / "report" / "report.html").is_file()


def test_a_report_is_made_again_only_if_something_changed(world, tmp_path, capsys):
    out = run(world, tmp_path / "run", *GD)
    report(out)
    first, page = capsys.readouterr().out, out / "report" / "report.html"
    page.write_text("still mine")
    report(out)
    assert capsys.readouterr().out == first
    assert page.read_text() == "still mine"
    run(world, out, *GD, "seed=4")
    report(out)
    assert "2 of 2 cells finished" in capsys.readouterr().out
    assert page.read_text() != "still mine"
    page.unlink()
    report(out)
    assert page.is_file()
