"""Which process computes which cell when: any number of processes, of any number of hosts, on one results folder.

Nobody is in charge. A process walks through the cells, computes those that nobody has locked, and leaves the others to
whoever works on them; so does an observation that somebody is just making. Only when nothing else is left does it wait,
saying for whom, and not for ever: a holder without a sign of life is named at the end, with a way out.

Processes that know how many they are start at different places (`Share`), so that each loads one model and does not
wait for what its neighbour is making. Workers that share their models (sharing.py) go through these side by side.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.readers import read_split
from fairseq_icl.replication.alive import silent_after
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.locks import Held, Holder, tell_every
from fairseq_icl.replication.sharing import is_sharing
from fairseq_icl.replication.store import Store, StoreError
from fairseq_icl.training.methods import get_method

POLLS = (0.05, 2.0)
"""Seconds between two looks at what others hold: at first, and after a while."""
IDLE = 1.0
"""Seconds without work after which who helps leaves; a look at a lock holds it for a moment, which is no work."""
TRAINING = 4.0
"""What a step of fine-tuning costs, in observed queries; roughly: it only spreads the work."""
SESSION_VARIABLE = "FAIRSEQ_ICL_SESSION"
"""Processes of one command have the same text here: a cell that failed in one of them is not tried by another."""
Progress = Callable[[str | None], None]
"""Told of every cell: a line about it, or None if another process finished it."""


@dataclass(frozen=True)
class Share:
    """Part `number` of `parts` of a plan, written 2/8; 2/8+ helps with the others' parts afterwards."""

    number: int
    parts: int
    helps: bool

    @classmethod
    def of(cls, text: str) -> "Share":
        """What `share=` says."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})(\+?)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                f"share={text[:80]}: must be like 2/8 (the second of eight parts) or 2/8+ (helps others too)"
            )
        return cls(int(match[1]), int(match[2]), bool(match[3]))

    def order(
        self, cells: Sequence[Cell], weight: Callable[[Sequence[Cell]], float], *, abreast: bool = False
    ) -> list[Cell]:
        """The cells of this share in the order of the plan; then, if it helps, the others', from their ends.

        `abreast`: all shares go through the models at the same time.
        """
        parts = (split_each_model if abreast else split)(cells, self.parts, weight)
        others = parts[self.number :] + parts[: self.number - 1]
        return parts[self.number - 1] + [cell for part in reversed(others) for cell in reversed(part) if self.helps]


def split(cells: Sequence[Cell], parts: int, weight: Callable[[Sequence[Cell]], float]) -> list[list[Cell]]:
    """The plan in `parts` of about equal weight: neighbours, not torn where cells share model and prompts.

    Where there are more parts than such groups, cells are dealt one by one.
    """
    ordered = [group for groups in groups_by_model(cells) for group in groups]
    if len(ordered) < parts:
        ordered = [[cell] for group in ordered for cell in group]
    weights = [weight(group) for group in ordered]
    result: list[list[Cell]] = [[] for _ in range(parts)]
    before = 0.0
    for group, own in zip(ordered, weights, strict=True):
        middle = (before + own / 2) / (sum(weights) or 1.0)
        result[min(int(middle * parts), parts - 1)] += group
        before += own
    return result


def split_each_model(cells: Sequence[Cell], parts: int, weight: Callable[[Sequence[Cell]], float]) -> list[list[Cell]]:
    """The plan in `parts` of about equal weight, each with a part of every model's cells, model after model.

    So processes that share a model use it at the same time, and no process needs two. Neighbours stay together as in
    `split`; what one part has too much of a model, it has too little of the next.
    """
    models = groups_by_model(cells)
    if sum(map(len, models)) < parts:
        models = [[[cell] for group in groups for cell in group] for groups in models]
    result: list[list[Cell]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for groups in models:
        weights = [weight(group) for group in groups]
        left = sum(weights)
        waiting = sorted(range(parts), key=loads.__getitem__)
        for group, own in zip(groups, weights, strict=True):
            while len(waiting) > 1:
                even = (left + sum(loads[part] for part in waiting)) / len(waiting)
                if loads[waiting[0]] + own / 2 <= even:
                    break
                del waiting[0]  # it has its part of this model
            result[waiting[0]] += group
            loads[waiting[0]] += own
            left -= own
    return result


def groups_by_model(cells: Sequence[Cell]) -> list[list[list[Cell]]]:
    """For each model the groups of cells that share it and their prompts, in the order of the plan."""
    models: dict[Any, dict[Any, list[Cell]]] = {}
    for cell in cells:
        models.setdefault(cell.model_key(), {}).setdefault(cell.prompts_key(), []).append(cell)
    return [list(groups.values()) for groups in models.values()]


def number_of_groups(cells: Sequence[Cell]) -> int:
    """How many processes can start without sharing model and prompts with another."""
    return len({(cell.model_key(), cell.prompts_key()) for cell in cells})


def work_in(data: Path) -> Callable[[Sequence[Cell]], float]:
    """A measure of the work in some cells: queries observed, and steps of fine-tuning; what they share counts once."""
    rows: dict[str, int] = {}

    def weight(cells: Sequence[Cell]) -> float:
        total = 0.0
        seen = set()
        for cell in cells:
            if cell.source not in rows:
                rows[cell.source] = len(read_split(data, cell.spec, "valid"))
            queries = min(rows[cell.source], cell.settings.limit or rows[cell.source])
            trained = [(cell.changed(method=name), "ft") for name in get_method(cell.method).trained]
            for other, setting in ((cell, "zsl"), (cell, "icl"), *trained):
                if (work := other.observed(setting)) not in seen:
                    seen.add(work)
                    total += queries + (setting == "ft") * TRAINING * cell.settings.num_demonstrations
        return total

    return weight


def run(
    engine: Engine, cells: Sequence[Cell], progress: Progress = lambda line: None, share: Share | None = None
) -> int:
    """Compute what is not there yet, or a share of it; returns how many cells this process computed.

    A cell whose fine-tuning fails does not stop the others; the failures are reported together when all else is done.
    """
    store = engine.store
    store.sweep_unfinished()
    plan = {engine.key(cell): cell for cell in cells}
    todo = plan
    if share is not None:
        unique = list(plan.values())
        todo = {engine.key(cell): cell for cell in share.order(unique, work_in(engine.data), abreast=is_sharing())}
    unfinished = {key: cell for key, cell in todo.items() if not store.is_finished(key)}
    turn = Turn(engine, plan, unfinished, progress)
    waiting = Waiting(store)
    while turn.todo:
        before = len(turn.todo)
        held = turn.take()
        if len(turn.todo) < before:
            waiting = Waiting(store)
        elif share is not None and share.helps and waiting.is_idle and all(key == lock for key, lock in held.items()):
            break  # somebody works on every one of them; to wait would keep a processor or a GPU from others
        else:
            waiting.wait({key: plan[key].label for key in turn.todo}, held)
    engine.drop_observations(plan)
    turn.tell_failures(len(todo))
    return turn.computed


@dataclass
class Turn:
    """One process's walk through the cells."""

    engine: Engine
    plan: dict[str, Cell]
    todo: dict[str, Cell]
    """Cells that are neither finished nor failed, by key."""
    progress: Progress
    computed: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def take(self) -> dict[str, str]:
        """Compute every cell that can be; returns key of cell -> key of the lock that keeps us from it."""
        held = {}
        for key, cell in list(self.todo.items()):
            try:
                self._take(key, cell)
                del self.todo[key]
            except Held as error:
                held[key] = error.key
        return held

    def _take(self, key: str, cell: Cell) -> None:
        store = self.engine.store
        if self._is_done(key, cell):
            return
        if store.locks.is_held(key):
            raise Held(key)
        for need, _, _ in self.engine.needs(cell):
            if not store.observation_folder(need).exists() and store.locks.is_held(need):
                raise Held(need)
        with store.working_on(key) as mine:
            if not mine:
                raise Held(key)
            if self._is_done(key, cell):
                return
            start = time.perf_counter()
            try:
                self.engine.compute(cell, self.plan)
            except StoreError:
                raise
            except UserError as error:
                self._fail(key, cell, str(error))
                return
        self.computed += 1
        self.progress(f"{cell.label}: {time.perf_counter() - start:.1f} s")

    def _is_done(self, key: str, cell: Cell) -> bool:
        """Whether another process finished the cell, or failed to in this session."""
        if self.engine.store.is_finished(key):
            self.progress(None)
            return True
        said = self.engine.store.failure(key)
        if said and said.get("session") == os.environ.get(SESSION_VARIABLE):
            self.failures[key] = f"{cell.label}: {said.get('error')}"
            self.progress(None)
            return True
        return False

    def _fail(self, key: str, cell: Cell, error: str) -> None:
        session = os.environ.get(SESSION_VARIABLE)
        if session is not None:
            self.engine.store.fail(key, {"cell": cell.label, "error": error, "session": session})
        self.failures[key] = f"{cell.label}: {error}"
        self.progress(f"failed: {self.failures[key]}")

    def tell_failures(self, planned: int) -> None:
        """All failures in one error."""
        if self.failures:
            raise UserError(told_failures(self.failures, planned))


def told_failures(failures: dict[str, str], planned: int) -> str:
    """One line about the cells that failed."""
    first = next(iter(failures.values()))
    if len(failures) == planned:
        return first
    return f"{len(failures)} of {planned} cells failed, the others are stored; {first}"


class Waiting:
    """Waits for other processes with words, and gives up when none of them lives any more."""

    def __init__(self, store: Store):
        self.store = store
        self.start = self.told = time.monotonic()
        self.pause = POLLS[0]

    @property
    def is_idle(self) -> bool:
        """Whether there has been nothing to do for more than a moment."""
        return time.monotonic() - self.start >= IDLE

    def wait(self, labels: dict[str, str], held: dict[str, str]) -> None:
        """A moment; `held` has the lock that keeps us from each of the cells."""
        now = time.monotonic()
        if now - self.told >= tell_every():
            self.told = now
            for lock in dict.fromkeys(held.values()):
                path = self.store.locks.path(lock)
                self.store.say(f"{path}: waiting since {now - self.start:.0f} s for {holder(path)}")
        if now - self.start >= silent_after() and all_silent(self.store, held.values()):
            raise UserError(told_held(self.store, labels, held))
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, POLLS[1])


def holder(path: Path) -> str:
    """Who holds a lock, and how long it has been silent if it is."""
    found = Holder.of(path)
    if found is None:
        return "another process"
    silence = found.silence()
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.since))
    quiet = f", without a sign of life for {silence:.0f} s" if silence >= silent_after() else ""
    return f"process {found.pid} on {found.host}, which holds it since {since}{quiet}; {found.remedy}"


def all_silent(store: Store, locks: Any) -> bool:
    """Whether every holder of these locks has given no sign of life for long."""
    found = [Holder.of(store.locks.path(lock)) for lock in set(locks)]
    return all(one is not None and one.silence() >= silent_after() for one in found)


def told_held(store: Store, labels: dict[str, str], held: dict[str, str]) -> str:
    """One line about the cells that others hold and do not finish."""
    by_lock: dict[str, list[str]] = {}
    for key, lock in held.items():
        by_lock.setdefault(lock, []).append(labels[key])
    parts = [f"{', '.join(cells)}: held by {holder(store.locks.path(lock))}" for lock, cells in by_lock.items()]
    return (
        f"{len(held)} cell{'s are' if len(held) > 1 else ' is'} not finished, all else is stored; "
        f"{'; '.join(parts)}; then give the same command again"
    )
