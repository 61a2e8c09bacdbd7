"""`replicate launcher=slurm` on a real SLURM of one machine: an array of jobs, one told to end midway and requeued."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairseq_icl.commands.replicate import run_configuration
from fairseq_icl.errors import UserError
from fairseq_icl.replication import slurm
from fairseq_icl.replication.configuration import compose_configuration, friendly
from tests.conftest import has_slurm
from tests.replication.toy_run import configuration, settings, tables
from tests.world import World

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "slurm.sh"
CELLS = ("experiment=deutch2024", "init=pretrained", "method=gd,lcgd,linearized", "seed=3,4,5,6")
DEMO = ("experiment=audit", "audit=false", "model=demo", "dataset=demo_sentiment", "init=pretrained", "method=gd,lcgd")
SWEEP = (*DEMO, "seed=1,2", "vary.lr_scale=[0.5]", "num_demonstrations=6", "limit=8")
JOBS = ("launcher=slurm", "slurm.jobs=2", "slurm.cpus=1", "slurm.time=5", "slurm.memory=1")
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
    """The sweep on the demo model, in this process as far as it is not for others."""
    words = [*SWEEP, f"out={out}"]
    run_configuration(compose_configuration(friendly([*words, *more], sweep=False)), words)


def log_of(out: Path, task: int) -> str:
    return "".join(path.read_text() for path in (out / "slurm").glob(f"*_{task}.log"))


@needs_slurm
def test_an_array_of_jobs_one_of_them_ended_and_requeued(cluster, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(slurm, "ASK", 1.0)
    out = tmp_path / "a run"  # names may hold spaces
    seen: list[str] = []

    def end_one() -> None:
        """As preemption does: SIGTERM to the job's processes once it has finished something."""
        deadline = time.monotonic() + 300
        while " s\n" not in log_of(out, 1) and time.monotonic() < deadline:
            time.sleep(0.02)
        (job,) = (path.read_text().strip() for path in (out / "slurm").glob("*.job"))
        subprocess.run(["scancel", "--signal=TERM", f"{job}_1"], check=True)
        subprocess.run(["scancel", f"{job}_2"], check=True)  # the other is cancelled, so that work is left
        while "requeued 1 times" not in log_of(out, 1) and time.monotonic() < deadline:
            seen.append(subprocess.run(["squeue", "-h", "-r", "-o", "%K %T"], capture_output=True, text=True).stdout)
            time.sleep(0.2)

    actor = threading.Thread(target=end_one)
    actor.start()
    demo(out, *JOBS)
    actor.join()
    first, second = log_of(out, 1), log_of(out, 2)
    assert "submitted" in capfd.readouterr().err
    print(f"job 1:\n{first}\njob 2:\n{second}\njob 1 in the queue: {' '.join(dict.fromkeys(''.join(seen).split()))}")
    assert "requeued 0 times" in first
    assert "terminated; what is finished is kept" in first
    assert "put back into the queue" in first
    assert "requeued 1 times" in first.split("put back into the queue")[1]
    assert "put back" not in second  # who is cancelled stays so
    assert any("1 PENDING" in states for states in seen)
    demo(tmp_path / "local", "quiet=true")
    assert tables(out) == tables(tmp_path / "local")
    finished = [line for line in (first + second).splitlines() if line.endswith(" s")]
    assert len(finished) == len(set(finished)) == 8  # no cell twice


@needs_slurm
def test_what_slurm_refuses_is_one_line(world: World, cluster, tmp_path):
    config = configuration(world, tmp_path / "run", *CELLS, *JOBS, "slurm.partition=nowhere")
    with pytest.raises(UserError, match=r"sbatch .*invalid partition.*see slurm.partition"):
        run_configuration(config, settings(world, tmp_path / "run", *CELLS))


def test_without_slurm_it_says_so(world: World, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no sbatch on this machine"):
        run_configuration(configuration(world, tmp_path / "run", *CELLS, *JOBS))


def test_size_time_and_memory_of_jobs_come_from_the_plans_estimate(world: World, tmp_path, monkeypatch):
    from fairseq_icl.replication.cost import Cost
    from fairseq_icl.replication.plan import expand

    config = configuration(world, tmp_path / "run", *CELLS, "launcher=slurm", "slurm.gpus=1", "slurm.partition=gpu")
    cells = expand(config)
    monkeypatch.setattr(slurm, "estimate", lambda *arguments: Cost(3 * 3600.0, [], 2**31))
    asked = slurm.request(config, cells, world.data)
    assert asked == slurm.Request(jobs=3, minutes=130, megabytes=2560)  # an hour each, twice that and ten minutes
    monkeypatch.setattr(slurm, "estimate", lambda *arguments: Cost(1e6, [], 2**31))
    assert slurm.request(config, cells, world.data).jobs == 4  # as many as can start with a model and prompts each
    script = slurm.job_script(config, asked, ["experiment=deutch2024", "out=a b", "launcher=slurm", "slurm.gpus=1"])
    for line in ("--array=1-3", "--partition=gpu", "--time=130", "--mem=2560M", "--gres=gpu:1", "--requeue"):
        assert f"#SBATCH {line}\n" in script
    assert "replicate experiment=deutch2024 'out=a b' share=$SLURM_ARRAY_TASK_ID/3+\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
