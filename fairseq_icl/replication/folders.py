"""The results folder and what lies in it: the only module that knows the names of its files.

    RUN/store.json            format of the folder
    RUN/plans/HASH.json       what was asked for: the cells of each command, by key
    RUN/cells/KEY/            a finished cell: results.parquet, cell.json, time.json and, where there are any,
                              gradients.parquet, curve.parquet, examples.json
    RUN/observations/KEY/     an observation that unfinished cells share
    RUN/models/KEY.pt         a base model that the workers of a run map while they work
    RUN/jobs/                 what the jobs of a cluster said
    RUN/running*.lock         locked while a command works here; running.json says which

Folders of cells and observations are filled beside their place and renamed in one step: they are there completely or
not at all, and of two processes that finish the same key the second loses without harm. Names of unfinished files say
which process of which host writes them (files.py): the next run removes those whose process is gone.
"""

import errno
import hashlib
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from fairseq_icl.errors import UserError
from fairseq_icl.files import is_abandoned, reason_of, remedy_for, remove, sha256_of, sync, temporary_prefix
from fairseq_icl.files import write_atomically as write_file
from fairseq_icl.observing import Observation
from fairseq_icl.observing.saved import load_observations, save_observations
from fairseq_icl.replication.artefacts import (
    CellDescription,
    CellTime,
    FolderFormat,
    KeptExamples,
    PlanFile,
    Running,
    SumsFile,
)
from fairseq_icl.results import (
    read_curve,
    read_examples,
    read_gradient_record,
    read_means,
    write_curve,
    write_gradient_record,
    write_results,
)
from fairseq_icl.typed import read_json, read_typed, validated

FORMAT = 3
FOLDERS = ("plans", "cells", "observations", "models")
LOGS = "jobs"
"""Folder of what the jobs of a cluster say."""
OTHERS = ("store.json", "stand_in", "report", "running.lock", "running.json", LOGS)
"""What else may lie in a results folder, besides the locks of shares."""
RESULTS, DESCRIPTION, TIME = "results.parquet", "cell.json", "time.json"
GRADIENTS, CURVE, EXAMPLES = "gradients.parquet", "curve.parquet", "examples.json"
OBSERVATION, SUMS = "observation.safetensors", "sums.json"
WORKED_ON = (".", *FOLDERS, "stand_in", "report", "report/figures")
"""Where a killed process may leave unfinished files."""
AGAIN = "and give the replicate command again"
Observed = tuple[Observation, pd.DataFrame | None]
"""What was seen and, of a fine-tuned model, the record of its gradients."""


class StoreError(UserError):
    """The results folder cannot be used: no further cell could be stored either."""


@dataclass(frozen=True)
class CellResults:
    """What a finished cell's folder holds."""

    configuration: dict[str, Any]
    """As in `CellDescription`."""
    means: pd.DataFrame
    record: pd.DataFrame | None = None
    """Of the gradients."""
    curve: pd.DataFrame | None = None


@dataclass(frozen=True)
class CellFolder:
    """The folder of one cell."""

    path: Path

    @property
    def is_finished(self) -> bool:
        """Whether the cell's results are there."""
        return self.path.is_dir()

    def has_metrics(self, metrics: Mapping[str, str]) -> bool:
        """Whether its table holds these metrics of other packages (name -> hash of the code)."""
        return not metrics or metrics.items() <= self.description().metrics.items()

    def description(self) -> CellDescription:
        """What cell.json says."""
        return read_typed(CellDescription, self.path / DESCRIPTION, self._remedy)

    def read(self) -> CellResults:
        """The cell without its single examples; a UserError names the file that is damaged and what to do about it."""
        configuration = read_json(self.path / DESCRIPTION) if self.description() else {}
        gradients, over_demonstrations = self.path / GRADIENTS, self.path / CURVE
        try:
            return CellResults(
                configuration,
                read_means(self.path / RESULTS),
                record=read_gradient_record(gradients)[0] if os.path.lexists(gradients) else None,
                curve=read_curve(over_demonstrations) if os.path.lexists(over_demonstrations) else None,
            )
        except UserError as error:
            told = str(error).split("; make it with")[0]  # a cell's record is not made by hand
            raise UserError(f"{told}; {self._remedy}") from error

    def values(self, metrics: Sequence[str]) -> dict[str, pd.DataFrame]:
        """Metric -> values, a row an example and a column a layer (one column, -1, if it has none)."""
        return read_examples(self.path / RESULTS, metrics)

    def examples(self) -> dict[str, Any] | None:
        """The few examples that the cell kept for people to look at; None if it kept none."""
        path = self.path / EXAMPLES
        if not os.path.lexists(path):
            return None
        kept = read_typed(KeptExamples, path, self._remedy)
        sizes = {len(shares) - len(one.options) for one in kept.examples for shares in one.probabilities.values()}
        if sizes - {0} or any({"zsl", "icl", "ft"} - set(one.probabilities) for one in kept.examples):
            raise UserError(f"{path}: damaged, it has not a probability for every option; {self._remedy}")
        content = read_json(path)
        return {name: content[name] for name in ("demonstrations", "examples")}

    def seconds(self) -> float:
        """How long the cell took."""
        return read_typed(CellTime, self.path / TIME, self._remedy).seconds

    @property
    def _remedy(self) -> str:
        return f"remove the folder {self.path} {AGAIN}"

    def write(
        self,
        described: Mapping[str, Any],
        table: pd.DataFrame,
        made_by: Mapping[str, Any],
        *,
        seconds: float,
        gradients: tuple[pd.DataFrame, Any] | None = None,
        curve: pd.DataFrame | None = None,
        examples: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all files into the folder; `gradients` are the record and the decoder it was made with."""
        validated(CellDescription, described)
        write_results(self.path / RESULTS, table, made_by)
        if gradients is not None:
            write_gradient_record(self.path / GRADIENTS, *gradients)
        if curve is not None:
            write_curve(self.path / CURVE, curve)
        if examples is not None:
            (self.path / EXAMPLES).write_text(json.dumps(examples, separators=(",", ":")), encoding="utf-8")
        (self.path / DESCRIPTION).write_text(json.dumps(described, indent=1), encoding="utf-8")
        (self.path / TIME).write_text(json.dumps({"seconds": round(seconds, 3)}), encoding="utf-8")


@dataclass(frozen=True)
class ObservationFolder:
    """The folder of one observation; its files are those that were written, to the last byte, or it is not read."""

    path: Path

    @property
    def is_there(self) -> bool:
        """Whether something lies at its place."""
        return os.path.lexists(self.path)

    def read(self) -> Observed:
        """The observation; a UserError if anything about it is not as it was written."""
        self._check()
        _, seen = load_observations(self.path / OBSERVATION)
        if "seen" not in seen:
            raise UserError(f"{self.path / OBSERVATION}: not an observation of a run")
        gradients = self.path / GRADIENTS
        return seen["seen"], read_gradient_record(gradients)[0] if gradients.is_file() else None

    def _check(self) -> None:
        said = read_typed(SumsFile, self.path / SUMS)
        try:
            found = {file.name: sha256_of(file) for file in self.path.iterdir() if file.name != SUMS}
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({reason_of(error)})") from error
        if said.key != self.path.name or found != said.files:
            raise UserError(f"{self.path}: damaged, its files are not those that were written")

    def write(self, key: str, observation: Observation, gradients: tuple[pd.DataFrame, Any] | None) -> None:
        """Write all files into the folder, which will be the one of `key`."""
        save_observations(self.path / OBSERVATION, {"seen": observation})
        if gradients is not None:
            write_gradient_record(self.path / GRADIENTS, *gradients)
        sums = {file.name: sha256_of(file) for file in sorted(self.path.iterdir())}
        (self.path / SUMS).write_text(json.dumps({"key": key, "files": sums}), encoding="utf-8")


class ResultsFolder:
    """A results folder. `create=False` opens an existing one for reading."""

    def __init__(self, folder: str | Path, *, create: bool = True):
        self.folder = Path(folder)
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
            known = {*OTHERS, *FOLDERS}
            others = {entry.name for entry in self.folder.iterdir() if not entry.name.startswith((".", "running"))}
            if others - known:
                raise UserError(
                    f"{self.folder}: holds other files ({min(others - known)}); choose an empty folder: out=DIR"
                )
        for name in FOLDERS:
            try:
                (self.folder / name).mkdir(exist_ok=True)
            except FileExistsError as error:
                raise StoreError(
                    f"{self.folder / name}: cannot be written, a file where a folder should be; remove it"
                ) from error
        if not marker.is_file():
            write_file(marker, json.dumps({"format": FORMAT}) + "\n")
        elif not os.access(self.folder / "cells", os.W_OK):
            raise UserError(f"{self.folder}: cannot be written; choose another results folder: out=DIR")

    def _check_format(self, marker: Path) -> None:
        try:
            found = read_typed(FolderFormat, marker).format
        except UserError as error:
            raise UserError(
                f"{marker}: not readable as JSON with a format number; if the folder is one of this version, write "
                f'{{"format": {FORMAT}}} into it, else choose another out=DIR'
            ) from error
        if found != FORMAT:
            raise UserError(
                f"{self.folder}: results of another version (format {found}, this version writes {FORMAT}); "
                "choose another folder with out=DIR"
            )

    @contextmanager
    def owned(self, share: str = "") -> Iterator[None]:
        """Hold the folder for one command; a UserError says who has it. Shares (2/8) go together, but each once."""
        name = f"running-{share.replace('/', '-of-')}" if share else "running"
        told = self.folder / "running.json"
        with ExitStack() as held:
            others = [] if share else sorted(self.folder.glob("running-*.lock"))
            for path in (self.folder / f"{name}.lock", *others):
                held.enter_context(self._locked(path, told))
            if share:  # nobody has the whole folder
                with self._locked(self.folder / "running.lock", told):
                    pass
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            said = {"pid": os.getpid(), "host": socket.gethostname(), "since": now, "command": shlex.join(sys.argv[1:])}
            with _clear_errors(self.folder):
                write_file(told, json.dumps(said))
            try:
                yield
            finally:
                told.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, path: Path, told: Path) -> Iterator[None]:
        lock = FileLock(path, timeout=0)
        with _clear_errors(self.folder):
            try:
                lock.acquire()
            except Timeout as error:
                who = "another command"
                with suppress(UserError):
                    said = read_typed(Running, told)
                    who = f"process {said.pid} on {said.host} since {said.since} (fairseq-icl {said.command[:200]})"
                raise UserError(
                    f"{self.folder}: in use by {who}; wait for its end, end it, or choose another out=DIR"
                ) from error
        try:
            yield
        finally:
            lock.release()

    def add_plan(self, plan: dict[str, Any]) -> None:
        """Remember what was asked for. The same plan again changes nothing."""
        validated(PlanFile, plan)
        text = json.dumps(plan, sort_keys=True, indent=1)
        path = self.folder / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        if not path.exists():
            with _clear_errors(self.folder):
                write_file(path, text)

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
        for cell in (self.cell(key) for key in dict.fromkeys(keys)):
            if cell.is_finished:
                cell.read()
            elif os.path.lexists(cell.path):
                raise UserError(f"{cell.path}: not a folder; remove it {AGAIN}")

    def finish(self, key: str, write: Callable[[CellFolder], None]) -> None:
        """Store a cell: `write` fills a folder, which becomes the cell's in one step."""
        self._put(self.cell(key).path, lambda path: write(CellFolder(path)))

    def observation(self, key: str) -> ObservationFolder:
        """Where an observation that several cells share is kept."""
        return ObservationFolder(self.folder / "observations" / key)

    def keep_observation(self, key: str, observation: Observation, gradients: tuple[pd.DataFrame, Any] | None) -> None:
        """Keep an observation, with the gradient record and the decoder it was made with if it has one."""
        place = self.observation(key).path
        self._put(place, lambda path: ObservationFolder(path).write(key, observation, gradients))

    def drop(self, key: str) -> None:
        """Forget an observation or a shared model that no unfinished cell needs, or that is damaged."""
        with _clear_errors(self.folder):
            remove(self.observation(key).path)
            self.shared_model(key).unlink(missing_ok=True)

    def drop_cell(self, key: str) -> None:
        """Make place for a cell that is computed again."""
        with _clear_errors(self.folder):
            remove(self.cell(key).path)

    def shared_model(self, key: str) -> Path:
        """The file of a base model that workers share."""
        return self.folder / "models" / f"{key}.pt"

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
        """Put a folder into its place, unless another process was faster."""
        try:
            os.rename(unfinished, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not place.is_dir():
                raise

    def say(self, line: str) -> None:
        """A line for the user about the folder's state."""
        print(line, file=sys.stderr, flush=True)

    def sweep(self, *, alone: bool) -> None:
        """Remove what killed processes left half-written and, if no share can be using them, models they shared."""
        for path in (path for name in WORKED_ON for path in (self.folder / name).glob(".*")):
            if is_abandoned(path):
                remove(path)
        if alone:
            for path in (self.folder / "models").glob("[!.]*"):
                remove(path)


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    """Disk full, read-only and the like in one line."""
    try:
        yield
    except OSError as error:
        said = f"{folder}: cannot be written ({reason_of(error)}); {remedy_for(error)} out=DIR"
        raise StoreError(said) from error
