"""A cell: one number-producing unit of a run, and the keys under which it and the observations it needs are stored.

A key is a hash of all that a result depends on: the settings that make a difference, the files of model and data, and
the code that computes it.
"""

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fairseq_icl.files import PACKAGE, sha256_of
from fairseq_icl.metrics import get_metric, metric_names
from fairseq_icl.models.files import ModelFiles
from fairseq_icl.prompts.catalogue import DatasetSpec, load_spec
from fairseq_icl.prompts.readers import find_split
from fairseq_icl.prompts.sampling import read_rows
from fairseq_icl.settings import OBSERVED, OF_TRAINING, PROMPTS, Settings
from fairseq_icl.training.methods import get_method

KEY_LENGTH = 20
OWN = "fairseq_icl."
COMMON = (
    "settings.py",
    "files.py",
    "compat.py",
    "prompts",
    "models",
    "observing",
    "replication/engine.py",
    "replication/sharing.py",
)
CODE: dict[str, tuple[str, ...]] = {
    "zsl": COMMON,
    "icl": COMMON,
    "ft": (*COMMON, "training", "tasks", "criterions"),
    "metrics": (*COMMON, "training", "tasks", "criterions", "metrics", "results", "replication/cells.py"),
}
"""The parts of the package that each observation, and the table made of them, runs through."""


@dataclass(frozen=True)
class Cell:
    """One (model, dataset, method, variant) with its settings, among them seed, permutation and init."""

    model: str
    dataset: str
    method: str
    variant: str
    """Name of the changes against the experiment's plain run; "" for the plain run."""
    settings: Settings
    source: str = ""
    """Where the dataset's YAML comes from: its name in the catalogue or a path."""
    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates of the two methods that a cell compares, where each has its own; `settings.lr` is then None."""

    @property
    def init(self) -> str:
        """What is kept of the checkpoint."""
        return self.settings.init

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.settings.seed

    @property
    def permutation(self) -> int:
        """Index of the permutation of the demonstrations."""
        return self.settings.permutation

    @property
    def spec(self) -> DatasetSpec:
        """What the dataset's YAML says."""
        return load_spec(self.source or self.dataset)

    @property
    def label(self) -> str:
        """The cell in one line, for progress and errors."""
        run = f"seed {self.seed} permutation {self.permutation}"
        return f"{self.model} {self.init} {self.dataset} {run} {self.method}{self.variant and f' [{self.variant}]'}"

    def changed(self, *, method: str | None = None, **settings: Any) -> "Cell":
        """The cell with another method or other settings."""
        if method in dict(self.rates):
            settings = {"lr": dict(self.rates)[method], **settings}
        return replace(self, method=method or self.method, settings=replace(self.settings, **settings), rates=())

    def configuration(self) -> dict[str, Any]:
        """Everything that determines the cell and can be written down; names of variant and file are not part of it."""
        settings = asdict(self.settings)
        described = {"model": self.model, "dataset": self.dataset, "method": self.method, "settings": settings}
        return described | ({"rates": dict(self.rates)} if self.rates else {})

    def observed(self, setting: str) -> "Cell":
        """The cell with all that makes no difference to the observation of `setting` (zsl, icl, ft) at a fixed value.

        Two cells with the same result share the observation.
        """
        settings = self.settings.relevant_to(OBSERVED[setting])
        method = self.method if setting == "ft" else setting
        if setting == "ft":
            idle = {name: known.default for name, known in OF_TRAINING.items() if not get_method(method).reads(known)}
            settings = replace(settings, **idle)
        return replace(self, method=method, variant="", source="", settings=settings, rates=())

    def prompts_key(self) -> tuple[str, Settings]:
        """What tells its prompts from others': the content of the dataset's YAML, and the settings that count."""
        return self.spec.fingerprint, self.settings.relevant_to(PROMPTS)

    def model_key(self) -> Settings:
        """What tells its model before fine-tuning from others'."""
        return self.settings.relevant_to(("weights",))


def key_of(cell: Cell, files: ModelFiles, data: Path, setting: str = "") -> str:
    """The key of the cell, or of its observation of `setting`."""
    described = cell.observed(setting) if setting else cell
    prints = {
        "model": files.sha256,
        "dictionary": file_hash(files.dictionary) if files.dictionary else "",  # a folder's hash covers all its files
        "data": data_hash(data, cell.spec),
        **{f"tokenizer.{name}": file_hash(path) for name, path in files.tokenizer.items()},
        "bpe": str(files.bpe),
        "code": code_version(CODE[setting or "metrics"]),
    }
    if described.settings.demonstrations not in ("first", "balanced"):
        prints["demonstrations"] = json.dumps(read_rows(described.settings.demonstrations))
    if setting not in ("zsl", "icl"):
        prints["method"] = json.dumps(asdict(get_method(cell.method)))
    if not setting:
        prints["metrics"] = foreign_metrics()
    text = json.dumps([described.configuration(), prints], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


@cache
def code_version(parts: Iterable[str]) -> str:
    """Hash of the source code of some parts of the package; comments, docstrings and layout do not count."""
    digest = hashlib.sha256()
    for part in parts:
        path = PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(PACKAGE)).encode())
            digest.update(_code_of(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()


def _code_of(source: str) -> str:
    """`source` as a syntax tree without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            node.body = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return ast.dump(tree)


def foreign_metrics() -> str:
    """Names and code of the metrics that other packages added."""
    added = [metric for metric in map(get_metric, metric_names()) if not metric.compute.__module__.startswith(OWN)]
    return json.dumps({metric.name: _source_of(metric.compute) for metric in added}, sort_keys=True)


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # made in an interactive session
        return f"{function.__module__}.{function.__qualname__}"


@cache
def file_hash(path: Path) -> str:
    """SHA-256 of a file, read once per process."""
    return sha256_of(path)


def data_hash(folder: Path, spec: DatasetSpec, hash_file: Callable[[Path], str] = file_hash) -> str:
    """Hash of a dataset's two files and of what its YAML says, published settings and notes aside."""
    parts = [spec.fingerprint]
    parts += [hash_file(file) for split in ("train", "valid") for file in find_split(folder, spec, split)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
