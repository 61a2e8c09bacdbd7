"""Run a graph: in a plain loop here, or by Dask in processes of this machine, jobs of a cluster, a running scheduler.

Which process computes a task, on which host, after whose death, is Dask's business: it starts workers again that were
killed, replaces those that are frozen (`distributed.scheduler.worker-ttl`, five minutes) and gives their tasks to
others; jobs that end by their time limit are replaced. Ours: a task is a pure function of its key, finished work is
found again, and of two that finish the same the second loses without harm (folders.py).
"""

import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fairseq_icl import tasks  # noqa: F401 - registers task and criterions, which training asks fairseq for
from fairseq_icl.errors import UserError, out_of_memory
from fairseq_icl.replication.cells import Cell, Keys, foreign_metrics
from fairseq_icl.replication.configuration import LOCAL, QUEUES, SCHEDULER, ClusterSettings
from fairseq_icl.replication.engine import Engine, Job, import_plugin
from fairseq_icl.replication.find_model import find_model
from fairseq_icl.replication.folders import ResultsFolder, StoreError
from fairseq_icl.replication.graph import Task, graph_of, kept_for

if TYPE_CHECKING:
    from distributed import Client, Future

Tell = Callable[[str], None]  # takes a line for the user
Outcomes = Callable[[Job, Sequence[Task]], Iterator["Outcome"]]
"""A way to run a graph: yields what became of its tasks, in any order in which each comes after what it needs."""
_one_at_a_time = threading.Lock()
"""Fine-tuning changes the module that it shares: a process does one task at a time, whoever calls."""
_engine: tuple[Job, Engine] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    key: str
    value: Any = None
    failure: str = ""  # why it failed, or something that it needs
    is_fatal: bool = False  # whether no further cell could be stored either


def engine_of(job: Job) -> Engine:
    """This process's engine for the job; the model it has loaded stays."""
    global _engine
    if _engine is None or _engine[0] != job:
        logging.getLogger("fairseq").setLevel(logging.WARNING)  # training tells of every step
        for module in job.plugins:
            import_plugin(module)
        files = find_model(json.loads(job.model), job.out)
        vars(files)["sha256"] = job.sha256  # a cached property
        _engine = (job, Engine(Keys(files, job.data), ResultsFolder(job.out)))
    return _engine[1]


def attempt(job: Job, task: Task, *needs: Outcome) -> Outcome:
    """Do one task, in whatever process this is; what the user can mend is an outcome, not an exception."""
    for failed in (need for need in needs if need.failure):
        return replace(failed, key=task.key)
    try:
        with _one_at_a_time:
            return Outcome(task.key, engine_of(job).perform(task, {need.key: need.value for need in needs}))
    except torch.OutOfMemoryError as error:
        return Outcome(task.key, failure=f"running a cell: {out_of_memory(error)}")
    except UserError as error:
        return Outcome(task.key, failure=str(error), is_fatal=isinstance(error, StoreError))


def in_this_process(job: Job, graph: Sequence[Task]) -> Iterator[Outcome]:
    """A plain loop: the order of the graph has everything after what it needs."""
    left, found = Counter(need for task in graph for need in task.needs), dict[str, Outcome]()
    for task in graph:
        found[task.key] = outcome = attempt(job, task, *(found[need] for need in task.needs))
        for need in task.needs:  # prompts are let go as soon as nobody needs them
            left[need] -= 1
            if not left[need]:
                del found[need]
        yield outcome


def unfinished(cells: Sequence[Cell], engine: Engine) -> dict[str, Cell]:
    """The cells without results by their keys; one whose table lacks a metric of a plugin is computed again."""
    by_key = {engine.keys.of(cell): cell for cell in cells}
    found = {key: engine.folder.cell(key) for key in by_key}
    there = [key for key, folder in found.items() if folder.path.is_dir()]
    metrics = foreign_metrics() if there else {}
    whole = {key for key in there if not metrics or metrics.items() <= found[key].description().metrics.items()}
    return {key: cell for key, cell in by_key.items() if key not in whole}


def run(
    job: Job, cells: Sequence[Cell], tell: Tell, outcomes: Outcomes = in_this_process, share: tuple[int, int] = (1, 1)
) -> None:
    """Compute what is not finished. Failures of single cells are told together when all else is done."""
    engine = engine_of(job)
    folder, keys = engine.folder, engine.keys
    folder.sweep(alone=share == (1, 1))
    todo = unfinished(part_of(cells, *share) if share != (1, 1) else cells, engine)
    for key in todo:
        if folder.cell(key).path.is_dir():  # it lacks a metric
            folder.drop(key)
    graph = graph_of(list(todo.values()), keys, folder, share_models=outcomes is not in_this_process)
    waiting = kept_for(list(unfinished(cells, engine).values()), keys)
    failures: dict[str, str] = {}
    for outcome in outcomes(job, graph):
        if outcome.is_fatal:
            raise StoreError(outcome.failure)
        if outcome.key not in todo:
            continue
        line = todo[outcome.key].label
        if outcome.failure:
            failures[outcome.key] = f"{line}: {outcome.failure}"
            line = f"failed: {failures[outcome.key]}"
        tell(line)
        for key in [key for key, users in waiting.items() if outcome.key in users]:
            waiting[key] -= {outcome.key}
            if all(folder.cell(user).path.is_dir() for user in waiting[key]):
                folder.drop(key)
    if failures:
        first = next(iter(failures.values()))
        some = f"{len(failures)} of {len(todo)} cells failed, the others are stored; {first}"
        raise UserError(first if len(failures) == len(todo) else some)


def part_of(cells: Sequence[Cell], number: int, parts: int) -> list[Cell]:
    """Part `number` of `parts` of the plan (share=2/8): neighbours; groups with one model and prompts are not torn.

    Where there are more parts than such groups, cells are dealt one by one.
    """
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model_key(), cell.prompts_key()), []).append(cell)
    ordered = list(groups.values()) if len(groups) >= parts else [[cell] for cell in cells]
    chosen, before = [], 0
    for group in ordered:
        middle = (before + len(group) / 2) / max(1, len(cells))
        if min(int(middle * parts), parts - 1) == number - 1:
            chosen += group
        before += len(group)
    return chosen


def by_dask(job: Job, graph: Sequence[Task], *, workers: int, cluster: ClusterSettings, say: Tell) -> Iterator[Outcome]:
    """Every task as one of Dask's; results of prompts stay with the workers."""
    if not all(map(find_spec, ("distributed", "dask_jobqueue"))):
        given = f"workers={workers}" if cluster.kind == LOCAL else f"cluster={cluster.kind}"
        raise UserError(f"{given}: needs Dask, which is not installed; pip install 'fairseq-icl[cluster]'")
    if not graph:
        return
    from distributed import as_completed
    from distributed.scheduler import KilledWorker

    by_key = {task.key: task for task in graph}
    left = Counter(need for task in graph for need in task.needs)
    with client_of(workers, cluster, job.out / "jobs", say) as client:
        futures: dict[str, Future] = {}
        for number, task in enumerate(graph):
            needs = [futures[need] for need in task.needs]
            # In the order of the plan: neighbours share the model that a worker has loaded.
            futures[task.key] = client.submit(attempt, job, task, *needs, key=task.key, priority=-number)
        for future in as_completed([futures[task.key] for task in graph if task.kind != "prompts"]):
            task = by_key[future.key]
            try:
                yield future.result()
            except KilledWorker:
                reason = "its worker died again and again, perhaps for want of memory; give fewer workers, or one"
                yield Outcome(task.key, failure=reason)
            for need in (task.key, *task.needs):
                left[need] -= need != task.key
                if not left[need] and (need != task.key or task.kind == "cell"):
                    futures.pop(need, None)  # Dask forgets what nobody holds


@contextmanager
def client_of(workers: int, cluster: ClusterSettings, logs: Path, say: Tell) -> "Iterator[Client]":
    """A client of the workers that the settings ask for; those that it starts end with it."""
    import dask
    from distributed import Client, LocalCluster

    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = threads_each(workers if cluster.kind == LOCAL else 1, cluster)
    variables = {f"{name}_NUM_THREADS": threads for name in ("OMP", "MKL", "OPENBLAS")}
    with ExitStack() as opened, dask.config.set({"distributed.nanny.pre-spawn-environ": variables}):
        opened.callback(os.environ.update, dict(os.environ))  # Dask leaves here what it sets for its workers:
        opened.callback(os.environ.clear)  # first this, then what was there before
        if cluster.kind.startswith(SCHEDULER):
            try:
                client = opened.enter_context(Client(cluster.kind, timeout="10s"))
            except (OSError, ValueError) as error:
                problem = "no scheduler answers there; start one with dask scheduler"
                raise UserError(f"cluster={cluster.kind}: {problem}") from error
        elif cluster.kind == LOCAL:
            silent: dict[str, Any] = {"silence_logs": logging.CRITICAL, "dashboard_address": ":0", "memory_limit": 0}
            local = LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, **silent)
            client = opened.enter_context(Client(opened.enter_context(local)))
        else:
            queue = opened.enter_context(_jobs(cluster, logs))
            client = opened.enter_context(Client(queue))
            _submit(queue, cluster)
            say(f"waiting for the first of {cluster.jobs} jobs; their scripts are like this:\n{queue.job_script()}")
        say(f"Dask's dashboard: {client.dashboard_link}")
        if cluster.kind == LOCAL and torch.cuda.device_count() > 1:
            client.register_plugin(_one_gpu_each())
        client.wait_for_workers(1, timeout=24 * 3600)  # as long the first job may wait in its queue
        yield client


def _jobs(cluster: ClusterSettings, logs: Path) -> Any:
    """The cluster whose workers are jobs; a worker ends shortly before its job's time does, and another follows."""
    interrupt = signal.getsignal(signal.SIGINT)
    import dask_jobqueue  # which makes an interrupt end the process without a word

    signal.signal(signal.SIGINT, interrupt)
    command = QUEUES[cluster.kind]
    if shutil.which(command) is None:
        raise UserError(f"cluster={cluster.kind}: no {command} on this machine; start this where jobs are submitted")
    if len(str(logs).split()) > 1:
        raise UserError(f"out={logs.parent}: job scripts cannot name a folder with blanks; choose another for cluster=")
    minutes = cluster.walltime
    margin = min(5.0, minutes / 4)
    lifetime = ["--lifetime", f"{60 * (minutes - margin):.0f}s", "--lifetime-stagger", f"{30 * margin:.0f}s"]
    options = {
        "cores": 1,  # a worker does one task at a time, with as many threads as it has processors
        "processes": 1,
        "job_cpu": cluster.cpus,
        "memory": cluster.memory,
        "walltime": f"{int(minutes) // 60:02d}:{int(minutes) % 60:02d}:00",
        "queue": cluster.queue,
        "account": cluster.account,
        "interface": cluster.interface,
        "python": sys.executable,
        "worker_extra_args": lifetime,
        "log_directory": str(logs),
        "job_script_prologue": [f"export OMP_NUM_THREADS={cluster.cpus}"],
        "scheduler_options": {"dashboard_address": ":0"},
    }
    given = {name: value for name, value in options.items() if value is not None} | cluster.options
    try:
        name = "HTCondor" if cluster.kind == "htcondor" else cluster.kind.upper()
        return getattr(dask_jobqueue, f"{name}Cluster")(**given)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"cluster={cluster.kind}: dask-jobqueue refuses these options ({error})") from error


def _submit(queue: Any, cluster: ClusterSettings) -> None:
    """Submit the jobs once in plain sight (`adapt` tries again and again in silence), then keep their number."""
    from distributed.core import Status

    async def submitted() -> None:
        queue.scale(jobs=cluster.jobs)
        await queue._correct_state()  # what scale() asks for, and then lets nobody see the end of

    try:
        queue.sync(submitted)
    except RuntimeError as error:  # holds the submitting command's stderr, after a line "stderr:"
        for job in queue.workers.values():
            job.status = Status.failed  # without it Dask does not close
        words = str(error).partition("stderr:")[2].strip() or str(error)
        raise UserError(f"cluster={cluster.kind}: no job could be submitted ({' '.join(words.split())})") from error
    queue.adapt(minimum_jobs=cluster.jobs, maximum_jobs=cluster.jobs)


def threads_each(count: int, cluster: ClusterSettings) -> int:
    """Threads of each process: what OMP_NUM_THREADS says, else an equal part of this machine or a job's processors."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) // count) if cluster.kind == LOCAL else cluster.cpus


def _one_gpu_each() -> Any:
    """A plugin of the workers: each sees one GPU of the machine, by its number."""
    from distributed import WorkerPlugin

    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))

    class OneGpu(WorkerPlugin):
        """Chooses the GPU before torch looks for one."""

        def setup(self, worker: Any) -> None:
            devices = visible.split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker.name) % len(devices)]

    return OneGpu()
