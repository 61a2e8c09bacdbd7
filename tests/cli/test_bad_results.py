"""Results folders that cannot be used or filled: one clear line, exit code 2, and what was there is as it was."""

import json
from pathlib import Path

from tests.commands import assert_one_clear_line, run, succeeded
from tests.replication.toy_run import settings
from tests.world import World

CELL = ("experiment=deutch2024", "method=gd", "init=pretrained", "seed=3", "limit=4")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_results_of_another_version(world: World, tmp_path: Path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "store.json").write_text(json.dumps({"format": 99}))
    before = contents(tmp_path)
    for command in (("replicate", *settings(world, out, *CELL)), ("report", out)):
        assert_one_clear_line(run("fairseq-icl", *command), str(out), "another version")
    assert contents(tmp_path) == before


def test_a_folder_of_something_else(world: World, tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("finished")
    result = run("fairseq-icl", "replicate", *settings(world, tmp_path, *CELL))
    assert_one_clear_line(result, "thesis.tex")
    assert contents(tmp_path) == {"thesis.tex": b"finished"}


def test_a_disk_that_fills_up_costs_only_the_cell_in_work(world: World, tmp_path: Path):
    """A limit on the size of files stands in for the full disk; with room again the same command goes on."""
    out = tmp_path / "run"
    words = ("replicate", *settings(world, out, *CELL))
    assert_one_clear_line(run("fairseq-icl", *words, shell_prefix="ulimit -f 8;"), "cannot be written")
    assert not [path for path in (out / "cells").rglob("*") if path.is_file()]
    result = succeeded(run("fairseq-icl", *words))
    assert "1 of 1 cells finished" in result.stdout


def test_a_read_only_place(world: World, tmp_path: Path):
    """Below /proc nobody may make a folder, not even the administrator that tests often run as."""
    result = run("fairseq-icl", "replicate", *settings(world, Path("/proc/run"), *CELL))
    assert_one_clear_line(result, "/proc/run", "cannot be written")
