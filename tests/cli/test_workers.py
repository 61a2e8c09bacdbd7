"""`replicate workers=N`: processes by Dask on one folder; killed and frozen ones; nobody is left behind."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from fairseq_icl.commands.replicate import run_configuration
from fairseq_icl.replication import engine
from fairseq_icl.replication.configuration import ClusterSettings
from fairseq_icl.replication.run import threads_each
from tests.commands import BIN
from tests.replication.toy_run import configuration, run, settings, tables
from tests.world import World

CELLS = ("experiment=deutch2024", "init=pretrained,trained-embeddings", "method=gd,lcgd", "seed=3,4", "skip=[]")
CELLS += ("device=cpu",)  # its memory is what workers share; every GPU has a copy of the model


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tables of one process."""
    return tables(run(world, tmp_path_factory.mktemp("alone") / "run", *CELLS))


def wait_until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Worker processes below this one."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if b"spawn_main" in command_line(child.pid)]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def finished(out: Path) -> int:
    return len(list(out.glob("cells/[!.]*")))


WATCHER = """
import os
from pathlib import Path
from fairseq_icl.replication import engine

load = engine.load_from

def load_from(files, settings):
    name = f"load-{os.getpid()}-{settings.init}-{settings.seed if settings.init != 'pretrained' else 0}"
    (Path(os.environ["NOTES"]) / name).touch()
    return load(files, settings)

engine.load_from = load_from
"""


def test_two_workers_give_the_bytes_of_one_load_every_model_once_and_leave_nothing(
    world, alone, tmp_path, monkeypatch, capfd
):
    (tmp_path / "watcher.py").write_text(WATCHER)
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(engine, "load_from", engine.load_from)  # the plugin replaces it here as well
    out, environment = tmp_path / "run", dict(os.environ)
    run_configuration(configuration(world, out, *CELLS, "workers=2", "plugins=[watcher]", "quiet=false"))
    assert dict(os.environ) == environment
    assert tables(out) == alone
    loads = sorted(path.name.split("-", 2)[2] for path in tmp_path.glob("load-*"))
    assert loads == ["pretrained-0", *(f"trained-embeddings-{seed}" for seed in (3, 4))]
    said = capfd.readouterr().err
    assert "Dask's dashboard: http://" in said
    assert "distributed" not in said
    assert [path.name for name in ("observations", "models") for path in (out / name).iterdir()] == []


@contextmanager
def started(world: World, out: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command with two workers, in a session of its own; nobody of it outlives the test."""
    words = [str(BIN / "fairseq-icl"), "replicate", *settings(world, out, *CELLS), "workers=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | variables
    process = subprocess.Popen(words, text=True, stderr=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_worker_that_is_killed_and_one_that_is_frozen_are_replaced(world, alone, tmp_path):
    out = tmp_path / "run"
    with started(world, out, DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL="15s") as process:
        for number, how in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            wait_until(lambda number=number: finished(out) >= number and len(descendants(process.pid)) == 2)
            os.kill(descendants(process.pid)[0], how)
        _, said = process.communicate(timeout=240)
    assert (process.returncode, said) == (0, "")
    assert tables(out) == alone


def test_the_end_of_the_parent_is_the_end_of_its_workers(world, alone, tmp_path):
    out = tmp_path / "run"
    with started(world, out) as process:
        wait_until(lambda: finished(out) or process.poll() is not None)
        workers = descendants(process.pid) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert len(workers) == 2
    assert (process.returncode, said) == (143, "terminated; what is finished is kept\n")
    wait_until(lambda: not any(map(command_line, workers)))
    assert tables(run(world, out, *CELLS)) == alone


def test_a_failing_cell_of_a_worker_is_told_once(world, tmp_path, capfd):
    from fairseq_icl.errors import UserError

    words = ("experiment=deutch2024", "method=gd", "init=pretrained", "lr=0.1,1e38", "workers=2", "quiet=false")
    with pytest.raises(UserError, match=r"1 of 2 cells failed, the others are stored; .*NaN or infinite"):
        run_configuration(configuration(world, tmp_path / "run", *words))
    assert len(tables(tmp_path / "run")) == 1
    assert capfd.readouterr().err.count("NaN or infinite") == 1


def test_threads_are_shared(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_each(2, ClusterSettings()) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert [threads_each(count, ClusterSettings()) for count in (1, 2, 5, 16, 40)] == [16, 8, 3, 1, 1]
    assert threads_each(1, ClusterSettings(kind="slurm", cpus=6)) == 6
