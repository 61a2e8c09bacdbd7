"""The results folder: every finished cell once and whole, whatever is killed and however many processes write.

    RUN/store.json            format of the folder
    RUN/plans/HASH.json       what was asked for: the cells of each command, by key
    RUN/cells/KEY/            a finished cell: results.parquet, cell.json (its configuration), time.json
    RUN/observations/KEY/     observations that unfinished cells still share
    RUN/locks/KEY.lock        held while a process works on KEY

A cell is written into a folder of its own beside its place and renamed in one step, so it is there completely or not
at all. Locks are the operating system's: they vanish with the process that holds them.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fairseq_icl.errors import UserError
from fairseq_icl.files import sync, write_atomically

FORMAT = 2
FOLDERS = ("plans", "cells", "observations", "locks")
OTHERS = ("store.json", "stand_in", "report")
"""What else may lie in a results folder."""


class StoreError(UserError):
    """The results folder cannot be used: no further cell could be stored either."""


class Store:
    """A results folder. `create=False` opens an existing one for reading."""

    def __init__(self, folder: str | Path, *, create: bool = True):
        self.folder = Path(folder)
        marker = self.folder / "store.json"
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
            (self.folder / name).mkdir(exist_ok=True)
        if not marker.is_file():
            write_atomically(marker, json.dumps({"format": FORMAT}) + "\n")
        elif not os.access(self.folder / "cells", os.W_OK):
            raise UserError(f"{self.folder}: cannot be written; choose another results folder: out=DIR")

    def _check_format(self, marker: Path) -> None:
        try:
            found = json.loads(marker.read_text(encoding="utf-8"))["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{marker}: not readable as JSON with a format number; choose another out=DIR") from error
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
        paths = sorted((self.folder / "plans").glob("*.json"))
        plans = [self.read_json(path) for path in paths]
        return sorted(plans, key=lambda plan: plan["experiment"])

    def is_finished(self, key: str) -> bool:
        """Whether the cell's results are there."""
        return (self.folder / "cells" / key).is_dir()

    def cell_folder(self, key: str) -> Path:
        """Folder of a finished cell."""
        return self.folder / "cells" / key

    @staticmethod
    def read_json(path: Path) -> dict[str, Any]:
        """The content of one of the folder's JSON files."""
        return json.loads(path.read_text(encoding="utf-8"))

    def finish(self, key: str, write: Callable[[Path], None]) -> None:
        """Store a cell: `write` fills a folder, which becomes the cell's in one step."""
        self._put(self.cell_folder(key), write)

    def observation_folder(self, key: str) -> Path:
        """Where an observation that several cells share is kept."""
        return self.folder / "observations" / key

    def save_observation(self, key: str, write: Callable[[Path], None]) -> None:
        """Keep an observation; `write` fills the folder it is given."""
        self._put(self.observation_folder(key), write)

    def drop_observation(self, key: str) -> None:
        """Forget an observation that no unfinished cell needs, or that is damaged."""
        shutil.rmtree(self.observation_folder(key), ignore_errors=True)

    def _put(self, place: Path, write: Callable[[Path], None]) -> None:
        """Make a folder in one step: filled beside its place, synced, renamed."""
        with _clear_errors(self.folder):
            unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
            try:
                unfinished.chmod(0o755)
                write(unfinished)
                for file in unfinished.iterdir():
                    sync(file)
                os.rename(unfinished, place)
                sync(place.parent)
            except UserError as error:  # of a writer of files
                raise StoreError(str(error)) from error
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def say(self, line: str) -> None:
        """A line for the user about the folder's state."""
        print(line, file=sys.stderr, flush=True)

    @contextmanager
    def working_on(self, key: str, *, wait: bool = False) -> Iterator[bool]:
        """Hold the lock of `key`; yields False if another process holds it and `wait` is not asked for."""
        lock = FileLock(self.folder / "locks" / f"{key}.lock", timeout=-1 if wait else 0)
        try:
            with _clear_errors(self.folder):
                lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def sweep_unfinished(self) -> None:
        """Remove what killed processes left half-written, unless another process is at it now."""
        for path in [*(self.folder / "cells").glob(".*"), *(self.folder / "observations").glob(".*")]:
            key = path.name[1:].split("-")[0]
            with self.working_on(key) as free:
                if free:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """Disk full, read-only and the like in one line."""
    try:
        yield
    except Timeout:  # filelock's is an OSError, but not a problem of the disk
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"{folder}: cannot be written ({reason}); free some space or choose another out=DIR"
        ) from error
