"""Cells -> the tasks that compute them, each with a key and what it needs; what is on disk is not among them.

    prompts ----+--> zsl, icl, ft ----> cell
    model   ----+

An observation is a task of its own where several unfinished cells share it (ZSL by all seeds and methods, ICL by the
methods of a seed); one that a single cell needs is made by that cell. Models are tasks where workers share them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fairseq_icl.replication.cells import Cell, Keys
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.training.methods import get_method, method_names


@dataclass(frozen=True)
class Task:
    """One piece of work; a pure function of its key."""

    key: str
    kind: str
    """prompts, model, zsl, icl, ft or cell."""
    cell: Cell
    needs: tuple[str, ...] = ()
    """Keys of the tasks that come before it."""


@dataclass(frozen=True)
class Need:
    """An observation that a cell is computed from."""

    key: str
    cell: Cell
    condition: str
    """zsl, icl or ft."""


def observations_of(cell: Cell, keys: Keys) -> list[Need]:
    """The observations that the cell compares: ZSL, ICL, and a fine-tuned model (two, where a method compares two)."""
    trained = [(cell.changed(method=name), "ft") for name in get_method(cell.method).trained]
    compared = ((cell, "zsl"), (cell, "icl"), *trained)
    return [Need(keys.of(other, condition), other, condition) for other, condition in compared]


def limits_of(cell: Cell, keys: Keys) -> Need | None:
    """`layer_clip_value: METHOD`: the fine-tuning by METHOD whose gradients limit those of the cell."""
    value = cell.settings.layer_clip_value
    if cell.settings.layer_clip == "none" or value not in method_names():
        return None
    other = cell.changed(method=value, layer_clip="none", layer_clip_value=None)
    return Need(keys.of(other, "ft"), other, "ft")


def graph_of(cells: Sequence[Cell], keys: Keys, folder: ResultsFolder, *, share_models: bool = False) -> list[Task]:
    """The tasks of all cells (which are unfinished), in the order of the plan and every task after what it needs."""
    uses = Counter(need.key for cell in cells for need in _awaited(cell, keys))
    tasks: dict[str, Task] = {}

    def add(kind: str, key: str, cell: Cell, needs: Sequence[str] = ()) -> str:
        tasks.setdefault(key, Task(key, kind, cell, tuple(dict.fromkeys(needs))))
        return key

    def sources(cell: Cell) -> list[str]:
        """Prompts and, where it is shared, the model."""
        needed = [add("prompts", keys.of_prompts(cell), cell)]
        return [*needed, add("model", keys.of_model(cell), cell)] if share_models else needed

    def limiting(need: Need) -> list[str]:
        """The fine-tuning whose gradients limit those of this one, where there is such a one and it is not stored."""
        limit = limits_of(need.cell, keys) if need.condition == "ft" else None
        return [] if limit is None or folder.observation(limit.key).is_there else [observe(limit)]

    def observe(need: Need) -> str:
        return add(need.condition, need.key, need.cell, [*sources(need.cell), *limiting(need)])

    for cell in cells:
        needs = sources(cell)
        for need in _awaited(cell, keys):
            if not folder.observation(need.key).is_there:
                needs += [observe(need)] if uses[need.key] > 1 else limiting(need)
        add("cell", keys.of(cell), cell, needs)
    return list(tasks.values())


def _awaited(cell: Cell, keys: Keys) -> list[Need]:
    """The observations that another task may make: not a fine-tuned model that the cell itself watches learning."""
    return observations_of(cell, keys)[: 2 if watches(cell) else None]


def watches(cell: Cell) -> bool:
    """Whether the cell looks at its model after every demonstration, and so fine-tunes it itself."""
    return bool(cell.settings.curve_examples) and get_method(cell.method).trains


def kept_for(cells: Sequence[Cell], keys: Keys) -> dict[str, set[str]]:
    """Key of an observation or of a model -> the keys of the cells that need it.

    A cell needs its model, what it compares, and a fine-tuning whose gradients limit those of its own.
    """
    kept: dict[str, set[str]] = {}
    for cell in cells:
        needs = observations_of(cell, keys)
        limits = [limits_of(need.cell, keys) for need in needs if need.condition == "ft"]
        for key in (keys.of_model(cell), *(need.key for need in (*needs, *limits) if need is not None)):
            kept.setdefault(key, set()).add(keys.of(cell))
    return kept
