"""Cells -> the tasks that compute them, each with a key and what it needs; what is on disk is not among them.

    prompts ----+--> zsl, icl, ft ----> cell
    model   ----+

An observation is a task of its own where several unfinished cells share it (ZSL by all seeds and methods, ICL by the
methods of a seed); one that a single cell needs is made by that cell. Models are tasks where workers share them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fairseq_icl.replication.cells import Cell, Keys
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.training.methods import get_method, method_names


@dataclass(frozen=True)
class Task:
    """One piece of work; a pure function of its key."""

    key: str
    kind: str  # prompts, model, an observation of a condition (zsl, icl, ft), or cell
    cell: Cell
    needs: tuple[str, ...] = ()  # keys of the tasks that come before it


def observations_of(cell: Cell, keys: Keys) -> list[Task]:
    """The observations that the cell compares: ZSL, ICL, and a fine-tuned model (two, where a method compares two)."""
    trained = [(cell.changed(method=name), "ft") for name in get_method(cell.method).trained]
    compared = ((cell, "zsl"), (cell, "icl"), *trained)
    return [Task(keys.of(other, condition), condition, other) for other, condition in compared]


def limits_of(cell: Cell, keys: Keys) -> Task | None:
    """`layer_clip_value: METHOD`: the fine-tuning by METHOD whose gradients limit those of the cell."""
    value = cell.settings.layer_clip_value
    if cell.settings.layer_clip == "none" or value not in method_names():
        return None
    other = cell.changed(method=value, layer_clip="none", layer_clip_value=None)
    return Task(keys.of(other, "ft"), "ft", other)


def watches(cell: Cell) -> bool:
    """Whether the cell looks at its model after every demonstration, and so fine-tunes it itself."""
    return bool(cell.settings.curve_examples) and get_method(cell.method).trains


def graph_of(cells: Sequence[Cell], keys: Keys, folder: ResultsFolder, *, share_models: bool = False) -> list[Task]:
    """The tasks of all cells (which are unfinished), in the order of the plan and every task after what it needs."""
    stored = {path.name for path in folder.observations.iterdir()}
    # Observations that another task may make: not a fine-tuned model that the cell itself watches learning.
    awaited = {cell: observations_of(cell, keys)[: 2 if watches(cell) else None] for cell in cells}
    uses = Counter(observation.key for needed in awaited.values() for observation in needed)
    tasks: dict[str, Task] = {}
    for cell, needed in awaited.items():
        made = [Task(keys.of(cell, kind), kind, cell) for kind in ("prompts", "model")[: 2 if share_models else 1]]
        sources = needs = tuple(task.key for task in made)  # methods differ in neither
        for observation in (one for one in needed if one.key not in stored):
            limit = limits_of(observation.cell, keys) if observation.kind == "ft" else None
            before: tuple[str, ...] = ()
            if limit is not None and limit.key not in stored:
                made.append(replace(limit, needs=sources))
                before = (limit.key,)
            if uses[observation.key] > 1:
                made.append(replace(observation, needs=sources + before))
                before = (observation.key,)
            needs += before
        made.append(Task(keys.of(cell), "cell", cell, tuple(dict.fromkeys(needs))))
        for task in made:
            tasks.setdefault(task.key, task)
    return list(tasks.values())


def kept_for(cells: Sequence[Cell], keys: Keys) -> dict[str, set[str]]:
    """Key -> cells that need it: their model, what they compare, what limits the gradients of their own training."""
    kept: dict[str, set[str]] = {}
    for cell in cells:
        needs = observations_of(cell, keys)
        limits = [limits_of(need.cell, keys) for need in needs if need.kind == "ft"]
        for key in (keys.of(cell, "model"), *(need.key for need in (*needs, *limits) if need is not None)):
            kept.setdefault(key, set()).add(keys.of(cell))
    return kept
