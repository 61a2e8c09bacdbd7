"""The results folder: every finished cell once and whole, whatever is killed and however many processes write.

    RUN/store.json            format of the folder
    RUN/plans/HASH.json       what was asked for: the cells of each command, by key
    RUN/cells/KEY/            a finished cell: results.parquet, cell.json (its configuration), time.json
    RUN/observations/KEY/     observations that unfinished cells still share
    RUN/failures/KEY.json     why a cell could not be computed, until it is
    RUN/locks/                held while a process works on a key (locks.py)
    RUN/.sharing-...          models that workers share while they run (sharing.py)

A cell is written into a folder of its own beside its place and renamed in one step, so it is there completely or not
at all. Names of unfinished files and folders say which process of which host writes them (files.py): the next run
removes those whose process is gone.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.files import (
    TEMPORARY,
    is_abandoned,
    reason_of,
    remedy_for,
    remove,
    sha256_of,
    sync,
    temporary_prefix,
    write_atomically,
)
from fairseq_icl.replication.locks import Locks, StoreError

FORMAT = 2
FOLDERS = ("plans", "cells", "observations", "failures", "locks")
OTHERS = ("store.json", "stand_in", "report", "slurm")
"""What else may lie in a results folder."""
SUMS = "sums.json"
"""In an observation's folder: its key, and the SHA-256 of its files."""
KEY = re.compile(r"[^./\\\0][^/\\\0]*")
SWEPT = ("plans", "failures", "locks", "stand_in", "report", "report/figures")
"""Folders that only single files are written into."""
PLAN_TEXTS = ("model", "init", "dataset", "method", "variant", "key")
PLAN_NUMBERS = ("seed", "permutation")


class Store:
    """A results folder. `create=False` opens an existing one for reading."""

    def __init__(self, folder: str | Path, *, create: bool = True):
        self.folder = Path(folder)
        self.locks = Locks(self.folder / "locks")
        marker = self.folder / "store.json"
        if marker.is_dir():
            raise UserError(f"{marker}: a folder where a file should be; remove it, or choose another out=DIR")
        if not create and not marker.is_file():
            raise UserError(f"{self.folder}: not a results folder of fairseq-icl replicate (no store.json in it)")
        with _clear_errors(self.folder):
            if create:
                self._create(marker)
            self._check_format(marker)

    def _create(self, marker: Path) -> None:
        """Make the folder unless it is there; one with other things in it is left alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not marker.is_file():
            others = [entry.name for entry in self.folder.iterdir() if not entry.name.startswith(".")]
            if others and not set(others) <= {*OTHERS, *FOLDERS}:
                raise UserError(
                    f"{self.folder}: holds other files ({sorted(others)[0]}); choose an empty folder: out=DIR"
                )
        for name in FOLDERS:
            try:
                (self.folder / name).mkdir(exist_ok=True)
            except FileExistsError as error:
                raise StoreError(
                    f"{self.folder / name}: cannot be written, a file where a folder should be; remove it"
                ) from error
        if not marker.is_file():
            write_atomically(marker, json.dumps({"format": FORMAT}) + "\n")
        elif not os.access(self.folder / "cells", os.W_OK):
            raise UserError(f"{self.folder}: cannot be written; choose another results folder: out=DIR")
        self.locks.prepare(self.say)

    def _check_format(self, marker: Path) -> None:
        try:
            found = json.loads(marker.read_text(encoding="utf-8"))["format"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{marker}: not readable as JSON with a format number; if the folder is one of this version, write "
                f'{{"format": {FORMAT}}} into it, else choose another out=DIR'
            ) from error
        if found != FORMAT:
            raise UserError(
                f"{self.folder}: results of another version (format {found}, this version writes {FORMAT}); "
                "choose another folder with out=DIR"
            )

    def add_plan(self, plan: dict[str, Any]) -> None:
        """Remember what was asked for. The same plan again changes nothing."""
        text = json.dumps(plan, sort_keys=True, indent=1)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = self.folder / "plans" / f"{name}.json"
        if not path.exists():
            with _clear_errors(self.folder):
                write_atomically(path, text)

    def plans(self) -> list[dict[str, Any]]:
        """All plans of the folder, in the order of their experiments' names and content."""
        paths = sorted((self.folder / "plans").glob("[!.]*.json"))
        plans = []
        for path in paths:
            try:
                plans.append(read_plan(path))
            except UserError as error:  # the others are as good as before
                self.say(f"left out: {error}")
        return sorted(plans, key=lambda plan: str(plan["experiment"]))

    def is_finished(self, key: str) -> bool:
        """Whether the cell's results are there."""
        return (self.folder / "cells" / key).is_dir()

    def cell_folder(self, key: str) -> Path:
        """Folder of a finished cell."""
        return self.folder / "cells" / key

    @staticmethod
    def read_json(path: Path) -> dict[str, Any]:
        """The content, a mapping, of one of the folder's JSON files."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: damaged, or not JSON ({reason_of(error)})") from error
        if not isinstance(content, dict):
            raise UserError(f"{path}: damaged, not a mapping")
        return content

    def finish(self, key: str, write: Callable[[Path], None]) -> None:
        """Store a cell: `write` fills a folder, which becomes the cell's in one step."""
        self._put(self.cell_folder(key), write)
        (self.folder / "failures" / f"{key}.json").unlink(missing_ok=True)

    def fail(self, key: str, said: dict[str, str]) -> None:
        """Remember why a cell could not be computed."""
        with _clear_errors(self.folder):
            write_atomically(self.folder / "failures" / f"{key}.json", json.dumps(said, indent=1))

    def failure(self, key: str) -> dict[str, Any]:
        """What the last attempt to compute the cell said; nothing if it did not fail."""
        path = self.folder / "failures" / f"{key}.json"
        try:
            return self.read_json(path) if path.is_file() else {}
        except UserError:
            return {}

    def observation_folder(self, key: str) -> Path:
        """Where an observation that several cells share is kept."""
        return self.folder / "observations" / key

    def save_observation(self, key: str, write: Callable[[Path], None]) -> None:
        """Keep an observation; `write` fills the folder it is given."""

        def write_with_sums(folder: Path) -> None:
            write(folder)
            sums = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
            (folder / SUMS).write_text(json.dumps({"key": key, "files": sums}), encoding="utf-8")

        self._put(self.observation_folder(key), write_with_sums)

    def check_observation(self, key: str) -> None:
        """UserError if the observation is not, to the last byte, what was kept under this key."""
        folder = self.observation_folder(key)
        said = self.read_json(folder / SUMS)
        if said.get("key") != key or not isinstance(said.get("files"), dict):
            raise UserError(f"{folder}: not the observation of this name")
        try:
            found = {file.name: sha256_of(file) for file in folder.iterdir() if file.name != SUMS}
        except OSError as error:
            raise UserError(f"{folder}: cannot be read ({reason_of(error)})") from error
        if found != said["files"]:
            raise UserError(f"{folder}: damaged, its files are not those that were written")

    def drop_observation(self, key: str) -> None:
        """Forget an observation that no unfinished cell needs, or that is damaged."""
        with _clear_errors(self.folder):
            remove(self.observation_folder(key))

    def _put(self, place: Path, write: Callable[[Path], None]) -> None:
        """Make a folder in one step: filled beside its place, synced, renamed."""
        with _clear_errors(self.folder):
            unfinished = Path(tempfile.mkdtemp(prefix=temporary_prefix(place.name), dir=place.parent))
            try:
                unfinished.chmod(0o755)
                write(unfinished)
                for file in unfinished.iterdir():
                    sync(file)
                sync(unfinished)
                self._rename(unfinished, place)
                sync(place.parent)
            except UserError as error:  # of a writer of files
                raise StoreError(str(error)) from error
            finally:
                remove(unfinished)

    @staticmethod
    def _rename(unfinished: Path, place: Path) -> None:
        """Put a folder into its place, unless another process, which took our lock over, was faster."""
        try:
            os.rename(unfinished, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not place.is_dir():
                raise

    def say(self, line: str) -> None:
        """A line for the user about the folder's state."""
        print(line, file=sys.stderr, flush=True)

    @contextmanager
    def working_on(self, key: str, *, wait: bool = False) -> Iterator[bool]:
        """Hold the lock of `key`; yields False if another process holds it and `wait` is not asked for."""
        with self.locks.hold(key, wait=wait, say=self.say) as mine:
            yield mine

    def sweep_unfinished(self) -> None:
        """Remove what killed processes left half-written; what another process, here or elsewhere, writes stays."""
        for name in ("cells", "observations"):
            for path in (self.folder / name).glob(".*"):
                match = TEMPORARY.fullmatch(path.name)
                if is_abandoned(path):
                    with self.working_on(match["name"] if match else path.name[1:].split("-")[0]) as free:
                        if free:
                            remove(path)
        own = (self.folder.glob(name) for name in (".store.json-*", ".sharing-*"))
        places = [*own, *((self.folder / name).glob(".*") for name in SWEPT)]
        for path in itertools.chain(*places):
            if is_abandoned(path):
                remove(path)


def read_plan(path: Path) -> dict[str, Any]:
    """One plan of the folder, checked."""
    remedy = "remove it and give its replicate command again"
    try:
        plan = Store.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    cells, tables = plan.get("cells"), plan.get("tables", [])
    fits = isinstance(plan.get("experiment"), str) and isinstance(cells, list) and isinstance(tables, list)
    if not fits or not all(_is_planned_cell(cell) for cell in cells or []):
        raise UserError(f"{path}: damaged, or not a plan; {remedy}")
    return {**plan, "tables": tables}


def _is_planned_cell(cell: Any) -> bool:
    return (
        isinstance(cell, dict)
        and all(isinstance(cell.get(name), str) for name in PLAN_TEXTS)
        and all(type(cell.get(name)) is int for name in PLAN_NUMBERS)
        and KEY.fullmatch(cell["key"]) is not None
    )


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """Disk full, read-only and the like in one line."""
    try:
        yield
    except OSError as error:
        said = f"{folder}: cannot be written ({reason_of(error)}); {remedy_for(error)} out=DIR"
        raise StoreError(said) from error
