"""Who computes what when: shares of a plan, cells that others hold, holders that are frozen."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.files import HOST
from fairseq_icl.replication import alive, locks
from fairseq_icl.replication.configuration import compose_configuration
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.scheduling import (
    SESSION_VARIABLE,
    Share,
    groups_by_model,
    number_of_groups,
    split,
    split_each_model,
)
from fairseq_icl.replication.stand_in import find_model
from fairseq_icl.replication.store import Store, StoreError
from tests.replication.toy_run import configuration, run, tables

HOLDER = """
import sys, time
from fairseq_icl.replication.store import Store
with Store(sys.argv[1]).working_on(sys.argv[2]) as mine:
    print(mine, flush=True)
    time.sleep(600)
"""
CELLS = ("experiment=deutch2024", "method=gd,lcgd", "init=pretrained")
FOUR = (*CELLS, "seed=3,4")


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tables of one process in peace."""
    return tables(run(world, tmp_path_factory.mktemp("whole") / "run", *FOUR))


def keys(world, out, setting: str = "") -> list[str]:
    """Keys of the cells, or of their observations of `setting`."""
    config = configuration(world, out, *FOUR)
    engine = Engine(find_model(config["model"], out), world.data, Store(out))
    return [engine.key(cell, setting) for cell in expand(config)]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv(locks.TELL_EVERY_VARIABLE, "0.3")
    monkeypatch.setenv(alive.SILENT_AFTER_VARIABLE, "1")


def holding(folder, key) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder, key], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "True"
    process.stdout.close()
    return process


def test_shares_are_the_plan_in_parts_that_load_one_model_each():
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))
    parts = split(cells, 4, len)
    assert sorted(map(id, cells)) == sorted(id(cell) for part in parts for cell in part)
    place = {(cell.model_key(), cell.prompts_key()): number for number, part in enumerate(parts) for cell in part}
    assert all(place[cell.model_key(), cell.prompts_key()] == n for n, part in enumerate(parts) for cell in part)
    assert max(map(len, parts)) < 1.5 * len(cells) / 4
    pretrained = {n for n, part in enumerate(parts) for cell in part if cell.init == "pretrained"}
    assert pretrained == set(range(len(pretrained)))  # the model's cells are neighbours
    many = number_of_groups(cells) + 1
    assert sum(map(bool, split(cells, many, len))) > number_of_groups(cells) // 2  # then cells are dealt one by one


@pytest.mark.parametrize("parts", [2, 4, 7])
def test_workers_that_share_models_go_through_them_side_by_side(parts):
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))
    shares = split_each_model(cells, parts, len)
    assert sorted(map(id, cells)) == sorted(id(cell) for share in shares for cell in share)
    assert max(map(len, shares)) - min(map(len, shares)) <= max(len(g) for m in groups_by_model(cells) for g in m)
    place = {(cell.model_key(), cell.prompts_key()): number for number, share in enumerate(shares) for cell in share}
    assert all(place[cell.model_key(), cell.prompts_key()] == n for n, share in enumerate(shares) for cell in share)
    assert all(any(cell.init == "pretrained" for cell in share) for share in shares)  # it has most of the cells
    assert [share[0].init for share in shares] == ["pretrained"] * parts


def test_fewer_groups_than_workers_are_dealt_cell_by_cell():
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))[:2]
    assert [len(share) for share in split_each_model(cells, 3, len)] == [1, 1, 0]


def test_a_share_that_helps_has_all_cells_and_begins_with_its_own():
    cells = expand(compose_configuration(["experiment=deutch2024", "model=1.3b", "data=."]))
    parts = split(cells, 3, len)
    assert Share.of("2/3").order(cells, len) == parts[1]
    helping = Share.of("2/3+").order(cells, len)
    assert helping[: len(parts[1])] == parts[1]
    assert helping[len(parts[1])] == parts[0][-1]
    assert len(helping) == len(cells)


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "2/3-", "a/b", "-1/3", "1/0", "1/3 "])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UserError, match="must be like 2/8"):
        Share.of(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workers=0"], "workers=0: must be a number from 1 to 1000"),
        (["workers=true"], "workers=True: must be a number"),
        (["workers=2", "share=1/2"], "workers: neither with"),
        (["launcher=slrum"], "launcher=slrum: .*slurm"),
        (["slurm.time=1"], "slurm.time=1: must be a number from 5"),
        (["slurm.partition=a b"], "slurm.partition=a b: must be"),
        (["slurm.options=[rm]"], "slurm.options=rm: must be"),
    ],
)
def test_numbers_of_processes_are_checked(world, tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        configuration(world, tmp_path, *CELLS, *words)


def test_shares_together_are_the_whole_and_no_cell_is_computed_twice(world, whole, tmp_path):
    out = run(world, tmp_path / "parts", *FOUR, "share=2/2")
    second = {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert len(second) == 2
    run(world, out, *FOUR, "share=1/2")
    assert second.items() <= {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}.items()
    assert tables(out) == whole
    assert list((out / "observations").iterdir()) == []


@pytest.mark.parametrize("what", ["", "icl"])
def test_a_frozen_process_blocks_nobody_without_a_word(world, whole, tmp_path, impatient, capsys, what):
    """The others' cells are computed; in the end who holds the rest, since when, and the way out are told."""
    out = tmp_path / "run"
    held = keys(world, out, what)[0]
    process = holding(out, held)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match="not finished, all else is stored") as caught:
            run(world, out, *FOUR)
        told = str(caught.value)
        assert len(tables(out)) == (2 if what else 3)  # gd and lcgd of the other seed
        assert f"held by process {process.pid} on {socket.gethostname()}, which holds it since 20" in told
        assert re.search(r"without a sign of life for \d+ s", told)
        assert f"kill -KILL {process.pid}" in told
        assert "seed 3 permutation 0 gd" in told
        assert f"{held}.lock: waiting since" in capsys.readouterr().err
    finally:
        process.kill()
        process.wait()
    assert tables(run(world, out, *FOUR)) == whole


def test_a_process_that_works_is_waited_for(world, whole, tmp_path, impatient):
    out = tmp_path / "run"
    process = holding(out, keys(world, out)[-1])
    threading.Timer(2.5, process.kill).start()  # until then it gives signs of life
    start = time.monotonic()
    assert tables(run(world, out, *FOUR)) == whole
    assert time.monotonic() - start > 2
    process.wait()


@pytest.mark.parametrize("soft", [False, True])
def test_removing_the_file_takes_a_lock_over_and_the_old_holder_does_no_harm(tmp_path, soft):
    first, second = Store(tmp_path), Store(tmp_path)
    if soft:
        (tmp_path / "locks" / locks.SOFT).write_text("")
    with first.working_on("k") as mine:
        assert mine
        first.locks.path("k").unlink()
        with second.working_on("k") as also_mine:
            assert also_mine
            second.finish("k", lambda folder: (folder / "x").write_text("second") and None)
            first.finish("k", lambda folder: (folder / "x").write_text("first") and None)
            assert (first.cell_folder("k") / "x").read_text() == "second"
            assert list((tmp_path / "cells").glob(".*")) == []
            assert Store(tmp_path).locks.is_held("k")
    assert not second.locks.is_held("k")


def test_signs_of_life_are_given_while_a_lock_is_held_and_only_then(tmp_path, impatient):
    store = Store(tmp_path)
    sign = tmp_path / "locks" / f".alive-{HOST}.{os.getpid()}-x"
    with store.working_on("a"):
        with store.working_on("b"):
            time.sleep(0.1)
            before = sign.stat().st_mtime_ns
        time.sleep(0.6)
        assert sign.stat().st_mtime_ns > before
    assert not sign.exists()


def test_locks_that_do_not_hold_between_hosts_are_found_out(tmp_path, impatient):
    """Another host works on what we could lock: it is named in the file and goes on giving signs of life."""
    store = Store(tmp_path)
    folder = tmp_path / "locks"
    (folder / "k.lock").write_text("77\nother-host\n")
    sign = folder / ".alive-other_host.77-x"
    sign.touch()
    with store.working_on("k") as mine:  # it was killed: no further sign
        assert mine
    (folder / "k.lock").write_text("77\nother-host\n")
    sign.touch()
    threading.Timer(0.2, sign.touch).start()
    said = r"process 77 on other-host holds it and works: .* touch .*locks/SOFT"
    with pytest.raises(StoreError, match=said), store.working_on("k"):
        pass
    assert not store.locks.is_held("k")


def test_a_cell_that_failed_in_one_process_is_not_tried_by_its_siblings(world, tmp_path, monkeypatch):
    wrong = ["experiment=deutch2024", "method=gd", "init=pretrained", "vary={lr: [1.0e+38]}"]
    monkeypatch.setenv(SESSION_VARIABLE, "one")
    with pytest.raises(UserError, match="1 of 2 cells failed"):
        run(world, tmp_path, *wrong)
    (note,) = (tmp_path / "failures").iterdir()
    before = note.stat().st_mtime_ns
    with pytest.raises(UserError, match=r"1 of 2 cells failed.*NaN or infinite"):
        run(world, tmp_path, *wrong)
    assert note.stat().st_mtime_ns == before
    monkeypatch.setenv(SESSION_VARIABLE, "two")  # the next command tries again
    with pytest.raises(UserError, match="1 of 2 cells failed"):
        run(world, tmp_path, *wrong)
    assert note.stat().st_mtime_ns > before
