"""The results folder: one command at a time, kills, full disks and foreign folders."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.files import HOST, write_atomically
from fairseq_icl.replication.folders import ResultsFolder


def write_number(number: int):
    def write(folder):
        (folder.path / "results.txt").write_text(str(number))

    return write


def test_a_finished_cell_is_there_completely(tmp_path):
    store = ResultsFolder(tmp_path / "run")
    assert not store.cell("k").path.is_dir()
    store.finish("k", write_number(7))
    assert store.cell("k").path.is_dir()
    assert (store.cell("k").path / "results.txt").read_text() == "7"
    assert [entry.name for entry in (tmp_path / "run" / "cells").iterdir()] == ["k"]


def test_a_failure_while_writing_leaves_nothing(tmp_path):
    store = ResultsFolder(tmp_path)

    def fail(folder):
        (folder.path / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        store.finish("k", fail)
    assert list((tmp_path / "cells").iterdir()) == []
    assert list((tmp_path / "observations").iterdir()) == []


def test_torch_reports_of_a_full_disk_are_clear(tmp_path):
    def fail(path):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    with pytest.raises(UserError, match="PytorchStreamWriter failed"):
        ResultsFolder(tmp_path).finish("o", lambda folder: write_atomically(folder.path / "x", fail))


def test_folders_of_another_version_or_of_others_are_refused(tmp_path):
    run = tmp_path / "run"
    ResultsFolder(run)
    (run / "store.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="another version"):
        ResultsFolder(run)
    (run / "store.json").write_text("{")
    with pytest.raises(UserError, match="not readable"):
        ResultsFolder(run)
    other = tmp_path / "home"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        ResultsFolder(other)
    assert [entry.name for entry in other.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="not a results folder"):
        ResultsFolder(tmp_path / "nowhere", create=False)
    assert not (tmp_path / "nowhere").exists()


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        ResultsFolder(tmp_path / "file" / "run")


HOLDER = """
import sys, time
from fairseq_icl.replication.folders import ResultsFolder
sys.argv[0:1] = ["fairseq-icl"]
with ResultsFolder(sys.argv[1]).owned(sys.argv[2] if len(sys.argv) > 2 else ""):
    print("mine", flush=True)
    time.sleep(600)
"""


@contextmanager
def held_elsewhere(folder, *share):
    words = [sys.executable, "-c", HOLDER, str(folder), *share]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "mine\n"
        try:
            yield process
        finally:
            process.kill()


def test_one_command_at_a_time_and_the_second_hears_who_has_the_folder(tmp_path):
    run = tmp_path / "run"
    with held_elsewhere(run) as process:
        with pytest.raises(UserError, match="in use by") as caught, ResultsFolder(run).owned():
            pass
        told = str(caught.value)
        assert f"process {process.pid} on {socket.gethostname()} since 20" in told
        assert "wait for its end, end it, or choose another out=DIR" in told
        with pytest.raises(UserError, match="in use by"), ResultsFolder(run).owned("1/2"):
            pass
    with ResultsFolder(run).owned():  # whoever was killed holds nothing
        pass
    assert not (run / "running.json").exists()


def test_shares_go_side_by_side_but_each_once_and_not_beside_the_whole(tmp_path):
    with held_elsewhere(tmp_path, "1/2"):
        with ResultsFolder(tmp_path).owned("2/2"):
            pass
        for share in ("1/2", ""):
            with pytest.raises(UserError, match="in use by"), ResultsFolder(tmp_path).owned(share):
                pass


def test_the_second_to_finish_a_cell_loses_without_harm(tmp_path):
    first, second = ResultsFolder(tmp_path), ResultsFolder(tmp_path)

    def write_late(folder):
        first.finish("k", write_number(1))
        write_number(2)(folder)

    second.finish("k", write_late)
    assert (tmp_path / "cells" / "k" / "results.txt").read_text() == "1"
    assert [entry.name for entry in (tmp_path / "cells").iterdir()] == ["k"]


def dead_process() -> int:
    """Number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftovers_of_killed_processes_are_swept_and_living_ones_spared(tmp_path):
    store = ResultsFolder(tmp_path)
    dead = f"{HOST}.{dead_process()}-x1"
    for name in (f"cells/.gone-{dead}", f"cells/.mine-{HOST}.{os.getpid()}-x1"):
        (tmp_path / name).mkdir()
    swept = [f".store.json-{dead}", f"plans/.p.json-{dead}", f"observations/.o-{dead}", f"models/.m.pt-{dead}"]
    for name in (*swept, "plans/.p.json-elsewhere.1-x1", "observations/.o-elsewhere.1-x1", "plans/.p.json-old"):
        (tmp_path / name).write_text("")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / "plans" / ".p.json-old", (two_days_ago, two_days_ago))
    store.shared_model("k").write_text("of a run that was killed")
    store.sweep(alone=False)
    assert store.shared_model("k").is_file()
    store.sweep(alone=True)
    assert not store.shared_model("k").exists()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob(".*")}
    living = {f"cells/.mine-{HOST}.{os.getpid()}-x1", "plans/.p.json-elsewhere.1-x1", "observations/.o-elsewhere.1-x1"}
    assert left == living


def test_everything_has_reached_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    store, events = ResultsFolder(tmp_path), []
    fsync, rename = os.fsync, os.rename

    def spied_sync(handle):
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def spied_rename(source, target):
        events.append(("rename", str(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spied_sync)
    monkeypatch.setattr(os, "rename", spied_rename)
    store.finish("k", write_number(1))
    (place,) = [name for kind, name in events if kind == "rename"]
    before = events[: events.index(("rename", place))]
    assert {("sync", f"{place}/results.txt"), ("sync", place)} <= set(before)
    assert events[-1] == ("sync", str(tmp_path / "cells"))
    events.clear()
    store.add_plan({"experiment": "a", "cells": []})
    assert [kind for kind, _ in events] == ["sync", "rename", "sync"]
    assert events[-1] == ("sync", str(tmp_path / "plans"))


def test_plans_are_remembered_once(tmp_path):
    store = ResultsFolder(tmp_path)
    for _ in range(2):
        store.add_plan({"experiment": "b", "cells": []})
    store.add_plan({"experiment": "a", "cells": []})
    assert [plan.experiment for plan in store.plans()] == ["a", "b"]


def test_links_that_lead_nowhere_and_pipes_are_told_in_one_line(tmp_path):
    folder = ResultsFolder(tmp_path / "run")
    (folder.folder / "cells" / "loop").symlink_to("loop")
    (folder.folder / "cells" / "pipe").mkdir()
    os.mkfifo(folder.folder / "cells" / "pipe" / "cell.json")
    os.mkfifo(folder.folder / "plans" / "pipe.json")
    for key, told in (("loop", "cells/loop: not a folder; remove it"), ("pipe", "cell.json: damaged.*not a file")):
        with pytest.raises(UserError, match=told):
            folder.check_cells([key])
    assert folder.plans() == []
    (folder.folder / "models" / "link.pt").symlink_to(tmp_path)
    folder.sweep(alone=True)
    assert tmp_path.is_dir()
    (tmp_path / "run" / "running.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"cannot be written .Too many levels of symbolic links"), folder.owned():
        pass
    assert not (tmp_path / "elsewhere").exists()
