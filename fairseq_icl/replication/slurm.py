"""`launcher=slurm`: the work of a plan as an array of SLURM jobs, each the same command with a share of its own.

    RUN/slurm/NAME.sh         the script that was given to sbatch; NAME is a hash of the command
    RUN/slurm/NAME.job        the number of the array
    RUN/slurm/ARRAY_TASK.log  what a job says

A job is a command that can be given again at any time: there is nothing to serialize or to restore. When SLURM wants
its node back (preemption, time is up) it sends SIGTERM, the command drops the cell it is at and ends with code 143, and
the script puts the job back into the queue. After a node's failure SLURM does that itself (--requeue).
"""

import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.cost import Cost, estimate
from fairseq_icl.replication.scheduling import number_of_groups, told_failures
from fairseq_icl.replication.store import Store
from fairseq_icl.replication.workers import command

LOOK, ASK = 1.0, 15.0
"""Seconds between two looks at the results folder, and between two questions to SLURM, whom many ask."""
WORK_SECONDS = 3600.0
"""Work that a job should have: much more than it takes to load a model."""
MARGIN, START_MINUTES = 2.0, 10
"""Time asked for: so many times the estimate, for nodes slower than this machine, and for starting."""
MEMORY_MARGIN = 1.25
WARNING_SECONDS = 60
"""How long before the end of its time a job is told."""
TERMINATED = 143
MOST_REQUEUES = 100
"""After so many a job is given up: a cell that takes longer than the job's time would never end."""
SCRIPT = """\
#!/bin/bash
{options}
# Written by fairseq-icl replicate launcher=slurm; can be given to sbatch again.
export OMP_NUM_THREADS={threads}
export FAIRSEQ_ICL_SESSION=slurm-$SLURM_ARRAY_JOB_ID
echo "job ${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID on $(hostname), requeued ${{SLURM_RESTART_COUNT:-0}} times"
srun --ntasks=1 --cpus-per-task={cpus} {command}
code=$?
# {terminated}: told to end, because another job wants the node or the time is up. What is finished is kept; unless
# somebody cancelled the job it goes on when there is a node again.
if [ $code -eq {terminated} ] && [ ${{SLURM_RESTART_COUNT:-0}} -lt {most} ] &&
    [ "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%T)" = RUNNING ]; then
    echo "put back into the queue"
    scontrol requeue $SLURM_JOB_ID
fi
exit $code
"""


@dataclass(frozen=True)
class Request:
    """What is asked of SLURM."""

    jobs: int
    minutes: int
    megabytes: int


def request(config: dict[str, Any], todo: Sequence[Cell], data: Path, cost: Cost | None = None) -> Request:
    """Size of the array, time and memory of a job: what the configuration says, else from the plan's estimate."""
    slurm = config["slurm"]
    jobs, minutes, memory = slurm["jobs"], slurm["time"], slurm["memory"]
    if None in (jobs, minutes, memory):
        cost = cost or estimate_jobs(config, todo, data)
        jobs = jobs or max(1, min(math.ceil(cost.seconds / WORK_SECONDS), number_of_groups(todo)))
        minutes = minutes or MARGIN * cost.seconds / jobs / 60 + START_MINUTES
        memory = memory or MEMORY_MARGIN * cost.bytes / 2**30
    return Request(jobs, math.ceil(minutes), math.ceil(1024 * memory))


def estimate_jobs(config: dict[str, Any], todo: Sequence[Cell], data: Path) -> Cost:
    """The plan's estimate with the threads that a job has."""
    torch.set_num_threads(min(config["slurm"]["cpus"], len(os.sched_getaffinity(0))))
    return estimate(config, todo, data)


def job_script(config: dict[str, Any], asked: Request, words: Sequence[str]) -> str:
    """The script of the array."""
    slurm = config["slurm"]
    folder = str(slurm_folder(config).resolve()).replace("%", "%%")
    options = {
        "job-name": "fairseq-icl",
        "array": f"1-{asked.jobs}",
        "partition": slurm["partition"],
        "time": asked.minutes,
        "mem": f"{asked.megabytes}M",
        "cpus-per-task": slurm["cpus"],
        "gres": "gpu:1" if slurm["gpus"] else None,
        "signal": f"TERM@{WARNING_SECONDS}",
        "open-mode": "append",
        "output": f"{folder}/%A_%a.log",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    share = "SHARE"
    text = shlex.join(command(words, share)).replace(f"share={share}", f"share=$SLURM_ARRAY_TASK_ID/{asked.jobs}+")
    said = os.environ.get("OMP_NUM_THREADS", "")
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", *slurm["options"]]),
        threads=said if said.isdigit() else slurm["cpus"],
        cpus=slurm["cpus"],
        command=text,
        terminated=TERMINATED,
        most=MOST_REQUEUES,
    )


def slurm_folder(config: dict[str, Any]) -> Path:
    """Where scripts and logs are."""
    return Path(config["out"]) / "slurm"


def run_jobs(
    config: dict[str, Any],
    words: Sequence[str],
    store: Store,
    plan: dict[str, Cell],
    data: Path,
    tell: Callable[[float, list[str]], None],
) -> None:
    """Submit the jobs of a plan, unless they are in the queue already, and watch them until all cells are there."""
    todo = [cell for key, cell in plan.items() if not store.is_finished(key)]
    if not todo:
        return
    if shutil.which("sbatch") is None:
        raise UserError("launcher=slurm: no sbatch on this machine; give the command on a login node of the cluster")
    name = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    note = slurm_folder(config) / f"{name}.job"
    array = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    queued = states(array) if array else Counter()
    if queued is None:
        raise UserError(f"squeue gives no answer about the jobs {array} of this command; try again later")
    if queued:
        tell(len(plan) - len(todo), [f"jobs {array} of this command are in the queue already"])
    else:
        array = _submit(slurm_folder(config) / f"{name}.sh", job_script(config, request(config, todo, data), words))
        write_atomically(note, f"{array}\n")
        tell(len(plan) - len(todo), [f"submitted {array}; logs: {slurm_folder(config)}/{array}_*.log"])
    if not config["slurm"]["wait"]:
        return
    try:
        failures = _watch(array, store, plan, tell)
    except BaseException:
        said = f"the jobs go on; give the same command to watch them again, or end them: scancel {array}"
        tell(sum(map(store.is_finished, plan)), [said])
        raise
    left = [key for key in plan if not store.is_finished(key)]
    if len(left) == len(failures):  # whoever still waits for a node has nothing to do there
        subprocess.run(["scancel", "--state=PENDING", array], capture_output=True, check=False)
    if failures:
        raise UserError(told_failures(failures, len(plan)))
    if left:
        raise UserError(
            f"the jobs {array} have ended, {len(left)} of {len(plan)} cells are not finished"
            f"{_last_words(slurm_folder(config), array)}; the same command submits the rest"
        )


def _submit(path: Path, script: str) -> str:
    """Give a script to sbatch; returns the number of the array."""
    write_atomically(path, script)
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        raise UserError(f"sbatch {path}: {said}; see slurm.partition, slurm.time, slurm.memory and slurm.options")
    return done.stdout.strip().split(";")[0]


def states(array: str) -> Counter[str] | None:
    """How many jobs of an array are in which state; none if all have ended; None if SLURM gives no answer."""
    asked = ["squeue", "--noheader", "--array", f"--jobs={array}", "--format=%T"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Counter(done.stdout.split())
    return Counter() if re.search("invalid job id", done.stderr, re.IGNORECASE) else None


def _watch(array: str, store: Store, plan: dict[str, Cell], tell: Callable[[float, list[str]], None]) -> dict[str, str]:
    """Wait until all cells are there or no job is left; returns what failed."""
    asked, before = time.monotonic(), None
    while True:
        left = [key for key in plan if not store.is_finished(key)]
        said = {key: store.failure(key) for key in left}
        failures = {
            key: f"{plan[key].label}: {one.get('error')}"
            for key, one in said.items()
            if one.get("session") == f"slurm-{array}"
        }
        lines = []
        now = None
        if time.monotonic() - asked >= ASK:
            asked = time.monotonic()
            now = states(array)
            if now is not None and now != before:
                lines = [", ".join(f"{count} {state.lower()}" for state, count in sorted(now.items())) or "no job left"]
            before = now
        tell(len(plan) - len(left), lines)
        if len(failures) == len(left) or (now is not None and not now):
            return failures
        time.sleep(LOOK)


def _last_words(folder: Path, array: str) -> str:
    """The last line of a log of the array, which says most if a job did not get far."""
    for log in sorted(folder.glob(f"{array}_*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return f"; {log} ends with: {lines[-1].strip()[:200]}"
    return f"; no log in {folder}"
