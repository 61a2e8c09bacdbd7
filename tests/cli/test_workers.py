"""`replicate workers=N`: N processes, one folder, one exit code; frozen and killed workers; nobody is left behind."""

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from fairseq_icl.replication import alive, locks
from fairseq_icl.replication.workers import is_stopped, threads_each
from tests.commands import BIN
from tests.replication.toy_run import configuration, run, settings, tables
from tests.world import World

CELLS = ("experiment=deutch2024", "init=pretrained", "method=gd,lcgd", "seed=3,4,5,6")


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tables of one process."""
    return tables(run(world, tmp_path_factory.mktemp("alone") / "run", *CELLS))


def at_work(out: Path) -> list[int]:
    """Processes that hold a lock of the folder."""
    return [int(path.name.split(".")[-1].split("-")[0]) for path in (out / "locks").glob(".alive-*")]


def wait_until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_one_of_them_frozen_compute_every_cell_once(world, alone, tmp_path, monkeypatch, capfd):
    from fairseq_icl.commands.replicate import run_configuration

    monkeypatch.setenv(locks.TELL_EVERY_VARIABLE, "1")
    monkeypatch.setenv(alive.SILENT_AFTER_VARIABLE, "8")
    out = tmp_path / "run"
    words = settings(world, out, *CELLS, "quiet=false")
    frozen: list[int] = []

    def freeze() -> None:
        wait_until(lambda: at_work(out))
        frozen.extend(at_work(out)[:1])
        os.kill(frozen[0], signal.SIGSTOP)

    actor = threading.Thread(target=freeze)
    actor.start()
    run_configuration(configuration(world, out, *CELLS, "workers=2", "quiet=false"), words)
    actor.join()
    said = capfd.readouterr().err
    assert re.search(rf"worker \d \(process {frozen[0]}\) stands still since \d+ s", said)
    assert f"kill -CONT {frozen[0]}" in said
    assert f"(process {frozen[0]}) stood still and was ended; another takes its place" in said
    assert tables(out) == alone
    assert len(re.findall(r"seed \d permutation 0 (?:gd|lcgd): [\d.]+ s", said)) == len(alone)  # each cell once
    assert at_work(out) == []
    assert list((out / "observations").iterdir()) == []


def test_the_end_of_the_parent_is_the_end_of_its_workers(world, alone, tmp_path):
    out = tmp_path / "run"
    words = [str(BIN / "fairseq-icl"), "replicate", *settings(world, out, *CELLS), "workers=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(words, text=True, stderr=subprocess.PIPE, env=environment)
    wait_until(lambda: at_work(out) or process.poll() is not None)
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (143, "terminated; what is finished is kept\n")
    assert not any(map(exists, workers))
    assert at_work(out) == []
    assert tables(run(world, out, *CELLS)) == alone


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_worker_whose_parent_was_killed_ends():
    script = """
import os, subprocess, sys, time
from fairseq_icl.replication import workers
os.environ[workers.PARENT_VARIABLE] = "1"
workers.follow_parent()
os.kill(os.getpid(), 2)  # Ctrl-C is the parent's affair
print("ready", flush=True)
time.sleep(600)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([str(BIN / "python"), "-c", script], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    process.stdin.close()  # as the system does when the parent dies
    assert process.wait(60) == -signal.SIGTERM
    process.stdout.close()


def test_threads_are_shared(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_each(2) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert [threads_each(count) for count in (1, 2, 5, 16, 40)] == [16, 8, 3, 1, 1]
    assert not is_stopped(os.getpid())


WATCHER = """
import os, signal
from pathlib import Path
import torch
from fairseq_icl.replication import sharing

notes = Path(os.environ["NOTES"])
if sharing.is_sharing():
    load, save = sharing.load_from, torch.save

    def load_from(files, settings):
        (notes / f"load-{os.getpid()}-{settings.init}-{settings.seed if settings.init != 'pretrained' else 0}").touch()
        return load(files, settings)

    def save_once_deadly(lm, path):
        if os.environ.get("DEADLY"):
            try:
                (notes / "killed").touch(exist_ok=False)
            except FileExistsError:
                return save(lm, path)
            Path(path).write_bytes(b"half of a model")
            os.kill(os.getpid(), signal.SIGKILL)
        return save(lm, path)

    sharing.load_from, torch.save = load_from, save_once_deadly
"""


@pytest.mark.parametrize("deadly", [False, True], ids=["in peace", "one killed while it writes"])
def test_workers_load_every_model_once_and_leave_nothing(world, tmp_path, monkeypatch, capfd, deadly):
    from fairseq_icl.commands.replicate import run_configuration

    cells = ("experiment=deutch2024", "init=pretrained,trained-embeddings", "method=gd", "seed=3,4")
    alone = tables(run(world, tmp_path / "alone", *cells))
    (tmp_path / "watcher.py").write_text(WATCHER)
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    if deadly:
        monkeypatch.setenv("DEADLY", "1")
    out, more = tmp_path / "run", (*cells, "plugins=[watcher]", "quiet=false")
    run_configuration(configuration(world, out, *more, "workers=2"), settings(world, out, *more))
    said = capfd.readouterr().err
    assert tables(out) == alone
    loads = sorted(path.name.split("-", 2)[2] for path in tmp_path.glob("load-*"))
    drawn = ["pretrained-0", "trained-embeddings-3", "trained-embeddings-4"]
    assert set(loads) == set(drawn)
    assert len(loads) == len(drawn) + deadly
    assert ("was killed by signal 9" in said) == deadly
    assert list(out.glob(".sharing-*")) == []
