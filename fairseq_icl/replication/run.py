"""Run a graph: in a plain loop here, or by Dask in processes of this machine, jobs of a cluster, a running scheduler.

Which process computes a task, on which host, after whose death, is Dask's business. Ours: a task is a pure function of
its key, finished work is found again, and of two that finish the same the second loses without harm (folders.py).
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairseq_icl import tasks  # noqa: F401 - registers task and criterions, which training asks fairseq for
from fairseq_icl.devices import within_memory
from fairseq_icl.errors import UserError
from fairseq_icl.replication.cells import Cell, foreign_metrics
from fairseq_icl.replication.engine import Engine, Job, import_plugins
from fairseq_icl.replication.folders import ResultsFolder, StoreError
from fairseq_icl.replication.graph import Task, graph_of, kept_for, number_of_uses

Tell = Callable[[str], None]
"""Told of every cell that is done, in a line."""
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
    failure: str = ""
    """Why it failed, or something that it needs."""
    is_fatal: bool = False
    """Whether no further cell could be stored either."""


def engine_of(job: Job) -> Engine:
    """This process's engine for the job; the model it has loaded stays."""
    global _engine
    if _engine is None or _engine[0] != job:
        logging.getLogger("fairseq").setLevel(logging.WARNING)  # training tells of every step
        import_plugins(job.plugins)
        _engine = (job, Engine(job.files(), job.data, ResultsFolder(job.out)))
    return _engine[1]


def attempt(job: Job, task: Task, *needs: Outcome) -> Outcome:
    """Do one task, in whatever process this is; what the user can mend is an outcome, not an exception."""
    failed = next((need for need in needs if need.failure), None)
    if failed is not None:
        return replace(failed, key=task.key)
    try:
        with _one_at_a_time, within_memory("running a cell"):
            return Outcome(task.key, engine_of(job).perform(task, {need.key: need.value for need in needs}))
    except UserError as error:
        return Outcome(task.key, failure=str(error), is_fatal=isinstance(error, StoreError))


def in_this_process(job: Job, graph: Sequence[Task]) -> Iterator[Outcome]:
    """A plain loop: the order of the graph has everything after what it needs."""
    left, found = number_of_uses(graph), dict[str, Outcome]()
    for task in graph:
        outcome = attempt(job, task, *(found[need] for need in task.needs))
        found[task.key] = outcome
        for need in task.needs:  # prompts are let go as soon as nobody needs them
            left[need] -= 1
            if not left[need]:
                del found[need]
        yield outcome


def unfinished(cells: Sequence[Cell], engine: Engine) -> list[Cell]:
    """The cells without results, each once; one whose table lacks a metric of a plugin is computed again."""
    by_key = {engine.keys.of(cell): cell for cell in cells}
    metrics = foreign_metrics()
    found = [(engine.folder.cell(key), cell) for key, cell in by_key.items()]
    return [cell for folder, cell in found if not folder.is_finished or not folder.has_metrics(metrics)]


def run(
    job: Job, cells: Sequence[Cell], tell: Tell, outcomes: Outcomes = in_this_process, share: tuple[int, int] = (1, 1)
) -> None:
    """Compute what is not finished. Failures of single cells are told together when all else is done."""
    engine = engine_of(job)
    folder, keys = engine.folder, engine.keys
    folder.sweep(alone=share == (1, 1))
    todo = unfinished(part_of(cells, *share), engine)
    for cell in todo:
        folder.drop_cell(keys.of(cell))  # where it lacks a metric
    graph = graph_of(todo, keys, folder, share_models=outcomes is not in_this_process)
    labels = {keys.of(cell): cell.label for cell in todo}
    waiting = kept_for(unfinished(cells, engine), keys)
    failures: dict[str, str] = {}
    for outcome in outcomes(job, graph):
        if outcome.is_fatal:
            raise StoreError(outcome.failure)
        if outcome.key not in labels:
            continue
        if outcome.failure:
            failures[outcome.key] = f"{labels[outcome.key]}: {outcome.failure}"
        tell(f"failed: {failures[outcome.key]}" if outcome.failure else labels[outcome.key])
        for key in [key for key, users in waiting.items() if outcome.key in users]:
            waiting[key] -= {outcome.key}
            if all(folder.cell(user).is_finished for user in waiting[key]):
                folder.drop(key)
    if failures:
        first = next(iter(failures.values()))
        told = f"{len(failures)} of {len(todo)} cells failed, the others are stored; {first}"
        raise UserError(first if len(failures) == len(todo) else told)


def part_of(cells: Sequence[Cell], number: int, parts: int) -> list[Cell]:
    """Part `number` of `parts` of the plan (share=2/8): neighbours, not torn where cells share model and prompts.

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
