"""The files of a run: JSON as types, and the folder of a cell, which alone knows its files.

What is written, and what is accepted when it is read. results_folder.md describes them for readers.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import Field

from fairseq_icl.errors import UserError
from fairseq_icl.observing import Observation
from fairseq_icl.results import (
    read_curve,
    read_examples,
    read_gradient_record,
    read_means,
    write_curve,
    write_gradient_record,
    write_results,
)
from fairseq_icl.typed import Typed, read_typed, validated

KEY = r"^[^./\\\x00][^/\\\x00]*$"
RESULTS, DESCRIPTION, TIME = "results.parquet", "cell.json", "time.json"
GRADIENTS, CURVE, EXAMPLES = "gradients.parquet", "curve.parquet", "examples.json"
AGAIN = "and give the replicate command again"
Observed = tuple[Observation, pd.DataFrame | None]
"""What was seen and, of a fine-tuned model, the record of its gradients."""


class FolderFormat(Typed):
    """store.json."""

    format: int


class CellIdentity(Typed, extra="allow"):
    """What a cell is of."""

    model: str = ""
    dataset: str = ""
    method: str
    settings: dict[str, Any]


class CellDescription(Typed, extra="allow"):
    """cell.json: what determines a finished cell, and what made it."""

    cell: CellIdentity
    context_rows: list[int] = []
    rows: dict[str, dict[str, Any]] = {}
    command: str | None = None  # the `fairseq-train` command that fine-tunes as the cell did
    learns: str = ""  # what learnt: "4 tensors, layers 28 to 29, 0.9 million parameters"
    lr_made_for: str | None = None  # the model that the learning rate was made for
    model: dict[str, str] = {}
    metrics: dict[str, str] = {}  # metrics of other packages that are in the table, and the hash of their code
    machine: dict[str, Any] = {}  # threads, device and precision
    versions: dict[str, str] = {}  # of this package, torch, fairseq and numpy


class CellTime(Typed):
    """time.json: apart from the description, which is the same in every run."""

    seconds: float


class PlannedCell(Typed, extra="allow"):
    """One cell of a plan."""

    model: str
    init: str
    dataset: str
    method: str
    variant: str
    seed: int
    permutation: int
    key: str = Field(pattern=KEY)
    settings: dict[str, Any] = {}  # those that are not at their default
    prints: dict[str, str] = {}  # short hashes of model and data, and the versions of the stages


class PlanFile(Typed, extra="allow"):
    """plans/HASH.json: what one command asked for."""

    experiment: str
    cells: list[PlannedCell]
    tables: list[Any] = []  # names of the published tables to show
    model: dict[str, Any] = {}  # what `model` was in the configuration
    asked: dict[str, Any] = {}
    """Settings that the command or its experiment gave; all others are the paper's or the default."""
    average_over: list[str] = ["seed"]  # what tables may average over


class AttentionOfExample(Typed, extra="allow"):
    """What a condition (icl, ft) attends to in an example, layer by layer."""

    demonstrations: list[list[int]]
    tokens: list[list[list[int]]]  # of each layer the heaviest: (token, weight in thousandths)


class KeptExample(Typed, extra="allow"):
    """One example that people may look at."""

    query: str
    options: list[str]
    row: int
    gold: int
    disagreement: float
    probabilities: dict[str, list[float]]
    icl: AttentionOfExample | None = None
    ft: AttentionOfExample | None = None


class KeptExamples(Typed, extra="allow"):
    """examples.json: where ICL and fine-tuning disagree most."""

    demonstrations: list[list[str]]
    examples: list[KeptExample]


class SumsFile(Typed):
    """sums.json of an observation: its key, and the SHA-256 of its files."""

    key: str
    files: dict[str, str]


@dataclass(frozen=True)
class CellResults:
    """What a finished cell's folder holds."""

    configuration: dict[str, Any]  # as in `CellDescription`
    means: pd.DataFrame
    record: pd.DataFrame | None = None  # of the gradients
    curve: pd.DataFrame | None = None


@dataclass(frozen=True)
class CellFolder:
    """The folder of one cell."""

    path: Path

    @property
    def remedy(self) -> str:
        """What to do where something in it is damaged."""
        return f"remove the folder {self.path} {AGAIN}"

    def description(self) -> CellDescription:
        """What cell.json says."""
        return read_typed(CellDescription, self.path / DESCRIPTION, self.remedy)

    def read(self) -> CellResults:
        """The cell without its single examples; a UserError names the file that is damaged and what to do about it."""
        configuration = self.description().model_dump(exclude_unset=True)
        gradients, curve = self.path / GRADIENTS, self.path / CURVE
        try:
            means = read_means(self.path / RESULTS)
            record = read_gradient_record(gradients)[0] if os.path.lexists(gradients) else None
            return CellResults(configuration, means, record, read_curve(curve) if os.path.lexists(curve) else None)
        except UserError as error:
            problem = str(error).split("; make it with")[0]  # a cell's record is not made by hand
            raise UserError(f"{problem}; {self.remedy}") from error

    def values(self, metrics: Sequence[str]) -> dict[str, pd.DataFrame]:
        """Metric -> values, a row an example and a column a layer (one column, -1, if it has none)."""
        return read_examples(self.path / RESULTS, metrics)

    def examples(self) -> dict[str, Any] | None:
        """The few examples that the cell kept for people to look at; None if it kept none."""
        path = self.path / EXAMPLES
        if not os.path.lexists(path):
            return None
        kept = read_typed(KeptExamples, path, self.remedy)
        sizes = {len(shares) - len(one.options) for one in kept.examples for shares in one.probabilities.values()}
        if sizes - {0} or any({"zsl", "icl", "ft"} - set(one.probabilities) for one in kept.examples):
            raise UserError(f"{path}: damaged, it has not a probability for every option; {self.remedy}")
        return kept.model_dump(exclude_unset=True, include={"demonstrations", "examples"})

    def seconds(self) -> float:
        """How long the cell took."""
        return read_typed(CellTime, self.path / TIME, self.remedy).seconds

    def write(
        self,
        description: Mapping[str, Any],
        table: pd.DataFrame,
        made_by: Mapping[str, Any],
        *,
        seconds: float,
        gradients: tuple[pd.DataFrame, Any] | None = None,
        curve: pd.DataFrame | None = None,
        examples: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all files into the folder; `gradients` are the record and the decoder it was made with."""
        validated(CellDescription, description)
        write_results(self.path / RESULTS, table, made_by)
        if gradients is not None:
            write_gradient_record(self.path / GRADIENTS, *gradients)
        if curve is not None:
            write_curve(self.path / CURVE, curve)
        if examples is not None:
            (self.path / EXAMPLES).write_text(json.dumps(examples, separators=(",", ":")), encoding="utf-8")
        (self.path / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")
        (self.path / TIME).write_text(json.dumps({"seconds": round(seconds, 3)}), encoding="utf-8")
