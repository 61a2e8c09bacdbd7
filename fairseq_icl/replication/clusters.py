"""The graph run by Dask: worker processes of this machine, jobs of a cluster, or the workers of a running scheduler.

Dask starts workers again that were killed, replaces those that are frozen (`distributed.scheduler.worker-ttl`, five
minutes) and gives their tasks to others; jobs that end by their time limit are replaced by new ones.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fairseq_icl.errors import UserError
from fairseq_icl.replication.configuration import LOCAL, QUEUES, SCHEDULER, ClusterSettings
from fairseq_icl.replication.engine import Job
from fairseq_icl.replication.folders import LOGS
from fairseq_icl.replication.graph import Task, number_of_uses
from fairseq_icl.replication.run import Outcome, Outcomes, attempt, in_this_process

if TYPE_CHECKING:
    from distributed import Client, Future

FIRST_WORKER = 24 * 3600
"""Seconds that the first job may wait in its queue."""


def way_to_run(workers: int, cluster: ClusterSettings, say: Callable[[str], None]) -> Outcomes:
    """How a run with these settings is computed: in this process, or by Dask."""
    if workers == 1 and cluster.kind == LOCAL:
        return in_this_process
    try:
        import dask_jobqueue  # noqa: F401
        import distributed  # noqa: F401
    except ImportError as error:
        given = f"workers={workers}" if cluster.kind == LOCAL else f"cluster={cluster.kind}"
        raise UserError(f"{given}: needs Dask, which is not installed; pip install 'fairseq-icl[cluster]'") from error
    return partial(by_dask, workers=workers, cluster=cluster, say=say)


def by_dask(
    job: Job, graph: Sequence[Task], *, workers: int, cluster: ClusterSettings, say: Callable[[str], None]
) -> Iterator[Outcome]:
    """Every task as one of Dask's; results of prompts stay with the workers."""
    from distributed import as_completed

    if not graph:
        return
    by_key = {task.key: task for task in graph}
    left = number_of_uses(graph)
    with client_of(workers, cluster, job.out / LOGS, say) as client:
        futures: dict[str, Future] = {}
        for place, task in enumerate(graph):
            needs = [futures[need] for need in task.needs]
            # In the order of the plan: neighbours share the model that a worker has loaded.
            futures[task.key] = client.submit(attempt, job, task, *needs, key=task.key, priority=-place)
        for future in as_completed([futures[task.key] for task in graph if task.kind != "prompts"]):
            task = by_key[future.key]
            yield _outcome_of(future)
            for need in (task.key, *task.needs):
                left[need] -= need != task.key
                if not left[need] and (need != task.key or task.kind == "cell"):
                    futures.pop(need, None)  # Dask forgets what nobody holds


def _outcome_of(future: "Future") -> Outcome:
    from distributed.scheduler import KilledWorker

    try:
        outcome: Outcome = future.result()
        return outcome
    except KilledWorker:
        said = "its worker died again and again, perhaps for want of memory; give fewer workers, or one"
        return Outcome(str(future.key), failure=said)


@contextmanager
def client_of(workers: int, cluster: ClusterSettings, logs: Path, say: Callable[[str], None]) -> "Iterator[Client]":
    """A client of the workers that the settings ask for; those that it starts end with it."""
    import dask
    from distributed import Client, LocalCluster

    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = threads_each(workers if cluster.kind == LOCAL else 1, cluster)
    variables = {f"{name}_NUM_THREADS": threads for name in ("OMP", "MKL", "OPENBLAS")}
    with ExitStack() as opened, dask.config.set({"distributed.nanny.pre-spawn-environ": variables}):
        opened.callback(_restore, dict(os.environ))  # Dask leaves in this process what it sets for its workers
        if cluster.kind.startswith(SCHEDULER):
            client = opened.enter_context(_connected(cluster.kind))
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
        client.wait_for_workers(1, timeout=FIRST_WORKER)
        yield client


def _restore(variables: dict[str, str]) -> None:
    """Make these the environment variables of the process."""
    os.environ.clear()
    os.environ.update(variables)


def _connected(address: str) -> "Client":
    from distributed import Client

    try:
        return Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise UserError(f"cluster={address}: no scheduler answers there; start one with dask scheduler") from error


def _jobs(cluster: ClusterSettings, logs: Path) -> Any:
    """The cluster whose workers are jobs; a worker ends shortly before its job's time does, and another follows."""
    import dask_jobqueue

    name, command = QUEUES[cluster.kind]
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
        return getattr(dask_jobqueue, name)(**given)
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
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said):
        return int(said)
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
