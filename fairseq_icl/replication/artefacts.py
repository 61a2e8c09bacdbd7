"""The JSON files of a results folder, as types: what is written, and what is accepted when it is read."""

from typing import Any

from pydantic import Field

from fairseq_icl.typed import Typed

KEY = r"^[^./\\\x00][^/\\\x00]*$"


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
    command: str | None = None
    """The `fairseq-train` command that fine-tunes as the cell did."""
    learns: str = ""
    """What learnt: "4 tensors, layers 28 to 29, 0.9 million parameters"."""
    lr_made_for: str | None = None
    """The model that the learning rate was made for."""
    model: dict[str, str] = {}
    metrics: dict[str, str] = {}
    """Metrics of other packages that are in the table, and the hash of their code."""
    machine: dict[str, Any] = {}
    """Threads, device and precision."""
    versions: dict[str, str] = {}
    """Of this package, torch, fairseq and numpy."""


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
    settings: dict[str, Any] = {}
    """Those that are not at their default."""
    prints: dict[str, str] = {}
    """Short hashes of model and data, and the versions of the stages."""


class PlanFile(Typed, extra="allow"):
    """plans/HASH.json: what one command asked for."""

    experiment: str
    cells: list[PlannedCell]
    tables: list[Any] = []
    """Names of the published tables to show."""
    model: dict[str, Any] = {}
    """What `model` was in the configuration."""
    asked: dict[str, Any] = {}
    """Settings that the command or its experiment gave; all others are the paper's or the default."""
    average_over: list[str] = ["seed"]
    """What tables may average over."""


class AttentionOfExample(Typed, extra="allow"):
    """What one side attends to in an example, layer by layer."""

    demonstrations: list[list[float]]
    tokens: list[list[list[float]]]
    """Of each layer the heaviest: (token, weight)."""


class KeptExample(Typed, extra="allow"):
    """One example that people may look at."""

    query: str
    options: list[str]
    row: float
    gold: float
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


class Running(Typed):
    """running.json: the command that works on the folder."""

    pid: int
    host: str
    since: str
    command: str
