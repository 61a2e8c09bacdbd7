"""The results folder under concurrency, kills, full disks and foreign folders."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.files import HOST, write_atomically
from fairseq_icl.replication.store import Store


def write_number(number: int):
    def write(folder):
        (folder / "results.txt").write_text(str(number))

    return write


def test_a_finished_cell_is_there_completely(tmp_path):
    store = Store(tmp_path / "run")
    assert not store.is_finished("k")
    store.finish("k", write_number(7))
    assert store.is_finished("k")
    assert (store.cell_folder("k") / "results.txt").read_text() == "7"
    assert [entry.name for entry in (tmp_path / "run" / "cells").iterdir()] == ["k"]


def test_a_failure_while_writing_leaves_nothing(tmp_path):
    store = Store(tmp_path)

    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        store.finish("k", fail)
    with pytest.raises(UserError, match="cannot be written"):
        store.save_observation("o", fail)
    assert list((tmp_path / "cells").iterdir()) == []
    assert list((tmp_path / "observations").iterdir()) == []


def test_torch_reports_of_a_full_disk_are_clear(tmp_path):
    def fail(path):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    with pytest.raises(UserError, match="PytorchStreamWriter failed"):
        Store(tmp_path).save_observation("o", lambda folder: write_atomically(folder / "x", fail))


def test_folders_of_another_version_or_of_others_are_refused(tmp_path):
    run = tmp_path / "run"
    Store(run)
    (run / "store.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="another version"):
        Store(run)
    (run / "store.json").write_text("{")
    with pytest.raises(UserError, match="not readable"):
        Store(run)
    other = tmp_path / "home"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        Store(other)
    assert [entry.name for entry in other.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="not a results folder"):
        Store(tmp_path / "nowhere", create=False)
    assert not (tmp_path / "nowhere").exists()


def test_a_place_that_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Store(tmp_path / "file" / "run")


def test_a_lock_keeps_others_out_and_is_free_afterwards(tmp_path):
    first, second = Store(tmp_path), Store(tmp_path)
    with first.working_on("k") as mine:
        assert mine
        with second.working_on("k") as also_mine:
            assert not also_mine
        with second.working_on("other") as other:
            assert other
    with second.working_on("k") as mine:
        assert mine


WORKER = """
import sys, time
from pathlib import Path
from fairseq_icl.replication.store import Store
store = Store(sys.argv[1])
for key in ("a", "b", "c", "d", "e", "f"):
    with store.working_on(key, wait=True):
        if not store.is_finished(key):
            with open(Path(sys.argv[1]) / ".log", "a") as log:
                log.write(key + "\\n")
            time.sleep(float(sys.argv[2]))
            store.finish(key, lambda folder: (folder / "results.txt").write_text(key))
"""


def worker(folder, seconds):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(seconds)])


def test_processes_on_one_folder_never_duplicate(tmp_path):
    processes = [worker(tmp_path, 0.02) for _ in range(3)]
    assert [process.wait(300) for process in processes] == [0, 0, 0]
    assert sorted((tmp_path / ".log").read_text().split()) == list("abcdef")
    assert sorted(entry.name for entry in (tmp_path / "cells").iterdir()) == list("abcdef")


def test_a_killed_process_loses_only_its_cell(tmp_path):
    process = worker(tmp_path, 0.3)
    deadline = time.time() + 300
    while len(list((tmp_path / "cells").glob("?"))) < 2 and time.time() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = {entry.name: entry.stat().st_mtime_ns for entry in (tmp_path / "cells").glob("?")}
    assert len(finished) >= 2
    assert worker(tmp_path, 0.0).wait(300) == 0
    after = {entry.name: entry.stat().st_mtime_ns for entry in (tmp_path / "cells").glob("?")}
    assert sorted(after) == list("abcdef")
    assert all(after[name] == finished[name] for name in finished)


def dead_process() -> int:
    """Number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftovers_of_killed_processes_are_swept_and_living_ones_spared(tmp_path):
    store = Store(tmp_path)
    dead = f"{HOST}.{dead_process()}-x1"
    for name in (f"cells/.gone-{dead}", f"cells/.locked-{dead}", f"cells/.mine-{HOST}.{os.getpid()}-x1"):
        (tmp_path / name).mkdir()
    swept = [f".store.json-{dead}", f"plans/.p.json-{dead}", f"observations/.o-{dead}", f"locks/.probe-{dead}"]
    for name in (*swept, "plans/.p.json-elsewhere.1-x1", "observations/.o-elsewhere.1-x1", "plans/.p.json-old"):
        (tmp_path / name).write_text("")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / "plans" / ".p.json-old", (two_days_ago, two_days_ago))
    with store.working_on("locked"):
        Store(tmp_path).sweep_unfinished()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob(".*")}
    assert left == {
        f"cells/.locked-{dead}",
        f"cells/.mine-{HOST}.{os.getpid()}-x1",
        "plans/.p.json-elsewhere.1-x1",
        "observations/.o-elsewhere.1-x1",
    }


def test_everything_has_reached_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    store, events = Store(tmp_path), []
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
    assert [kind for kind, _ in events] == ["sync", "sync"]
    assert events[-1] == ("sync", str(tmp_path / "plans"))


def test_plans_are_remembered_once(tmp_path):
    store = Store(tmp_path)
    for _ in range(2):
        store.add_plan({"experiment": "b", "cells": []})
    store.add_plan({"experiment": "a", "cells": []})
    assert [plan["experiment"] for plan in store.plans()] == ["a", "b"]
