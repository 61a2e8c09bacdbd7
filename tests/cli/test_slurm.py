"""`replicate cluster=slurm` on a real SLURM of one machine: one worker is killed, one job ends by its time limit."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fairseq_icl.commands.replicate import run_configuration
from fairseq_icl.errors import UserError
from fairseq_icl.replication.configuration import compose_configuration, friendly
from tests.conftest import has_slurm
from tests.replication.toy_run import tables

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "slurm.sh"
DEMO = ("experiment=audit", "audit=false", "model=demo", "dataset=demo_sentiment", "init=pretrained", "method=gd,lcgd")
SWEEP = (*DEMO, "seed=1,2", "vary.lr_scale=[0.5]", "num_demonstrations=6", "limit=8")
JOBS = ("cluster=slurm", "cluster.jobs=2", "cluster.cpus=1", "cluster.memory=800MB", "cluster.interface=lo")
needs_slurm = pytest.mark.skipif(not has_slurm(), reason="no SLURM here (slurmctld, slurmd, munge), or not root")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A SLURM with one node of two processors, in a folder of its own."""
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("slurm")))
    for place in (folder, *folder.parents):  # munge runs as another user and has to reach its files
        if place.owner() == "root" and not place.stat().st_mode & 0o001:
            place.chmod(place.stat().st_mode | 0o011)
    started = subprocess.run(["bash", SCRIPT, "start", folder], capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stdout + started.stderr
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    yield folder
    subprocess.run(["scancel", "--user=root"], check=False)
    subprocess.run(["bash", SCRIPT, "stop", folder], check=True)
    del os.environ["SLURM_CONF"]
    if before is not None:
        os.environ["SLURM_CONF"] = before


def demo(out: Path, *more: str) -> None:
    """The run on the demo model."""
    run_configuration(compose_configuration(friendly([*SWEEP, f"out={out}", *more])))


def jobs() -> list[str]:
    listed = subprocess.run(["squeue", "-h", "-o", "%i", "-t", "RUNNING"], capture_output=True, text=True, check=False)
    return listed.stdout.split()


def workers() -> list[int]:
    """Worker processes of all jobs (each below its nanny)."""
    found = [process for process in psutil.process_iter(["cmdline"]) if "spawn_main" in str(process.info["cmdline"])]
    return [process.pid for process in found if "SLURM_JOB_ID" in process.environ()]


@needs_slurm
def test_a_worker_is_killed_and_a_job_ends_and_the_tables_are_those_of_a_local_run(cluster, tmp_path, capfd):
    out, done = tmp_path / "run", []

    def strike() -> None:
        """First a worker, whose nanny starts another; then a whole job, as its time limit would end it."""
        deadline = time.monotonic() + 300
        while len(list(out.glob("cells/[!.]*"))) < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        (victim, *_) = workers()
        os.kill(victim, signal.SIGKILL)
        (job, *_) = jobs()
        subprocess.run(["scontrol", "update", f"JobId={job}", "TimeLimit=0-00:00:01"], check=True)
        done.append((victim, job))

    actor = threading.Thread(target=strike)
    actor.start()
    demo(out, *JOBS)
    actor.join()
    assert done
    assert "#SBATCH --cpus-per-task=1" in capfd.readouterr().err
    demo(tmp_path / "local", "quiet=true")
    assert tables(out) == tables(tmp_path / "local")
    assert len(tables(out)) == 8
    assert list((out / "jobs").glob("dask-worker-*.out"))
    deadline = time.monotonic() + 60
    while jobs() and time.monotonic() < deadline:  # the jobs end with the command
        time.sleep(0.2)
    assert jobs() == []


def test_without_the_command_that_submits_jobs_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delitem(sys.modules, "dask_jobqueue.runner", raising=False)  # whose import takes the signal
    monkeypatch.delitem(sys.modules, "dask_jobqueue", raising=False)
    interrupt = signal.getsignal(signal.SIGINT)
    with pytest.raises(UserError, match="cluster=pbs: no qsub on this machine"):
        demo(tmp_path / "run", "cluster=pbs", "quiet=true")
    assert signal.getsignal(signal.SIGINT) is interrupt


@needs_slurm
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Dask's own clean-up of half a cluster
def test_what_dask_jobqueue_refuses_is_one_line(cluster, tmp_path):
    with pytest.raises(UserError, match=r"cluster=slurm: dask-jobqueue refuses these options"):
        demo(tmp_path / "run", *JOBS, "cluster.options.nonsense=3")


@needs_slurm
def test_jobs_that_cannot_be_submitted_are_one_line(cluster, tmp_path):
    with pytest.raises(UserError, match=r"cluster=slurm: no job could be submitted \(.*invalid partition"):
        demo(tmp_path / "run", *JOBS, "cluster.queue=nowhere")
    with pytest.raises(UserError, match=r"out=.*a run: job scripts cannot name a folder with blanks"):
        demo(tmp_path / "a run", *JOBS)
