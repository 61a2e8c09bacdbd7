"""The results folder: what lies in it, who has it, and how something gets into it completely or not at all.

What each file and folder in it is, docs/results_folder.md says. Folders of cells and observations are filled under
another name and renamed in one step: they are there completely or not at all, and of two processes that finish the same
key the second loses without harm. Names of unfinished files say which process of which host writes them (files.py): the
next run removes those whose process is gone.
"""

import hashlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from fairseq_icl.errors import UserError
from fairseq_icl.files import in_one_step, is_abandoned, reason_of, remedy_for, remove, sha256_of, write_atomically
from fairseq_icl.observing import Observation
from fairseq_icl.observing.saved import load_observations, save_observations
from fairseq_icl.replication.artefacts import AGAIN, GRADIENTS, CellFolder, FolderFormat, Observed, PlanFile, SumsFile
from fairseq_icl.results import read_gradient_record, write_gradient_record
from fairseq_icl.typed import read_json, read_typed, validated

FORMAT = 3
OBSERVATION, SUMS = "observation.safetensors", "sums.json"
FOLDERS = ("plans", "cells", "observations", "models")
OTHERS = ("store.json", "stand_in", "report", "running.lock", "running.json", "jobs")
"""What else may lie in a results folder, besides the locks of shares."""


class StoreError(UserError):
    """The results folder cannot be used: no further cell could be stored either."""


class ResultsFolder:
    """A results folder. `create=False` opens an existing one for reading."""

    def __init__(self, folder: str | Path, *, create: bool = True):
        self.folder = Path(folder)
        self.observations = self.folder / "observations"
        marker = self.folder / "store.json"
        if marker.is_dir():
            raise UserError(f"{marker}: a folder where a file should be; remove it, or choose another out=DIR")
        is_new = not marker.is_file()
        if is_new and not create:
            raise UserError(f"{self.folder}: not a results folder of fairseq-icl replicate (no store.json in it)")
        with _clear_errors(self.folder):
            if create:
                self.folder.mkdir(parents=True, exist_ok=True)
                there = {entry.name for entry in self.folder.iterdir() if not entry.name.startswith((".", "running"))}
                if is_new and (others := there - {*OTHERS, *FOLDERS}):
                    other = f"holds other files ({min(others)})"
                    raise UserError(f"{self.folder}: {other}; choose an empty folder: out=DIR")
                for path in (self.folder / name for name in FOLDERS):
                    try:
                        path.mkdir(exist_ok=True)
                    except FileExistsError as error:
                        problem = "cannot be written, a file where a folder should be; remove it"
                        raise StoreError(f"{path}: {problem}") from error
                if is_new:
                    write_atomically(marker, json.dumps({"format": FORMAT}) + "\n")
                elif not os.access(self.folder / "cells", os.W_OK):
                    raise UserError(f"{self.folder}: cannot be written; choose another results folder: out=DIR")
            try:
                found = read_typed(FolderFormat, marker).format
            except UserError as error:
                raise UserError(
                    f"{marker}: not readable as JSON with a format number; if the folder is one of this version, write "
                    f'{{"format": {FORMAT}}} into it, else choose another out=DIR'
                ) from error
        if found != FORMAT:
            other = f"results of another version (format {found}, this version writes {FORMAT})"
            raise UserError(f"{self.folder}: {other}; choose another folder with out=DIR")

    @contextmanager
    def owned(self, share: str = "") -> Iterator[None]:
        """Hold the folder for one command; a UserError says who has it. Shares (2/8) go together, but each once."""
        whole, running = self.folder / "running.lock", self.folder / "running.json"
        own = self.folder / f"running-{share.replace('/', '-of-')}.lock" if share else whole
        others = [] if share else sorted(self.folder.glob("running-*.lock"))
        with ExitStack() as held:
            with _clear_errors(self.folder):
                try:
                    for path in (own, *others):
                        held.enter_context(FileLock(path, timeout=0))
                    if share:
                        with FileLock(whole, timeout=0):  # nobody has the whole folder
                            pass
                except Timeout as error:
                    owner = "another command"
                    with suppress(UserError, KeyError, TypeError):
                        known = read_json(running)
                        command = f"fairseq-icl {known['command'][:200]}"
                        owner = f"process {known['pid']} on {known['host']} since {known['since']} ({command})"
                    raise UserError(
                        f"{self.folder}: in use by {owner}; wait for its end, end it, or choose another out=DIR"
                    ) from error
                who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
                write_atomically(running, json.dumps(who | {"command": shlex.join(sys.argv[1:])}))
            held.callback(running.unlink, missing_ok=True)
            yield

    def add_plan(self, plan: dict[str, Any]) -> None:
        """Remember what was asked for. The same plan again changes nothing."""
        validated(PlanFile, plan)
        text = json.dumps(plan, sort_keys=True, indent=1)
        path = self.folder / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        if not path.exists():
            with _clear_errors(self.folder):
                write_atomically(path, text)

    def plans(self) -> list[PlanFile]:
        """All plans of the folder, in the order of their experiments' names and content."""
        plans = []
        for path in sorted((self.folder / "plans").glob("[!.]*.json")):
            try:
                plans.append(read_typed(PlanFile, path, f"remove it {AGAIN}"))
            except UserError as error:  # the others are as good as before
                self.say(f"left out: {error}")
        return sorted(plans, key=lambda plan: plan.experiment)

    def cell(self, key: str) -> CellFolder:
        """The folder of a cell, finished or not."""
        return CellFolder(self.folder / "cells" / key)

    def check_cells(self, keys: Iterable[str]) -> None:
        """Refuse a folder in which one of these cells is there but cannot be read, before others are computed."""
        for cell in map(self.cell, dict.fromkeys(keys)):
            if cell.path.is_dir():
                cell.read()
            elif os.path.lexists(cell.path):
                raise UserError(f"{cell.path}: not a folder; remove it {AGAIN}")

    def finish(self, key: str, write: Callable[[CellFolder], None]) -> None:
        """Store a cell: `write` fills a folder, which becomes the cell's in one step."""
        self._put(self.cell(key).path, lambda path: write(CellFolder(path)))

    def observation(self, key: str) -> Observed | None:
        """The observation that was kept, if its files are to the last byte those that were written; else it goes."""
        folder = self.observations / key
        if not os.path.lexists(folder):
            return None
        try:
            sums = read_typed(SumsFile, folder / SUMS)
            found = {file.name: sha256_of(file) for file in folder.iterdir() if file.name != SUMS}
            if sums.key != key or sums.files != found:
                raise UserError(f"{folder}: damaged, its files are not those that were written")
            _, seen = load_observations(folder / OBSERVATION)
            if "seen" not in seen:
                raise UserError(f"{folder / OBSERVATION}: not an observation of a run")
            gradients = folder / GRADIENTS
            return seen["seen"], read_gradient_record(gradients)[0] if gradients.is_file() else None
        except (UserError, OSError) as error:
            problem = f"{folder}: cannot be read ({reason_of(error)})" if isinstance(error, OSError) else error
            self.say(f"{problem}: it is made again")
            self.drop(key)
            return None

    def keep_observation(self, key: str, observation: Observation, gradients: tuple[pd.DataFrame, Any] | None) -> None:
        """Keep an observation, with the gradient record and the decoder it was made with if it has one."""

        def write(folder: Path) -> None:
            save_observations(folder / OBSERVATION, {"seen": observation})
            if gradients is not None:
                write_gradient_record(folder / GRADIENTS, *gradients)
            sums = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
            (folder / SUMS).write_text(json.dumps({"key": key, "files": sums}), encoding="utf-8")

        self._put(self.observations / key, write)

    def drop(self, key: str) -> None:
        """Forget what has this key: an observation or a shared model that nobody needs, a cell to be computed again."""
        with _clear_errors(self.folder):
            for path in (self.observations / key, self.shared_model(key), self.cell(key).path):
                remove(path)

    def shared_model(self, key: str) -> Path:
        """The file of a base model that workers share."""
        return self.folder / "models" / f"{key}.pt"

    def _put(self, target: Path, write: Callable[[Path], None]) -> None:
        """Make a folder in one step."""
        with _clear_errors(self.folder):
            try:
                with in_one_step(target, is_folder=True) as unfinished:
                    write(unfinished)
            except UserError as error:  # of a writer of files
                raise StoreError(str(error)) from error

    def say(self, line: str) -> None:
        """A line for the user about the folder's state."""
        print(line, file=sys.stderr, flush=True)

    def sweep(self, *, alone: bool) -> None:
        """Remove what killed processes left half-written and, if no share can be using them, models they shared."""
        worked_on = [self.folder / name for name in (".", *FOLDERS, "stand_in", "report", "report/figures")]
        unfinished = (path for folder in worked_on for path in folder.glob(".*") if is_abandoned(path))
        for path in (*unfinished, *((self.folder / "models").glob("[!.]*") if alone else ())):
            remove(path)


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """Disk full, read-only and the like in one line."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({reason_of(error)}); {remedy_for(error)} out=DIR") from error
