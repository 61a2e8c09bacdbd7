"""A cell: one number-producing unit of a run, and the keys under which it and the observations it needs are stored.

A key is a hash of all that a result depends on: the settings that make a difference, the files of model and data, and
the version of every stage that computes it.
"""

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fairseq_icl.files import sha256_of
from fairseq_icl.metrics import get_metric, metric_names
from fairseq_icl.models.files import ModelFiles
from fairseq_icl.prompts.catalogue import DatasetSpec, load_spec
from fairseq_icl.prompts.readers import find_split
from fairseq_icl.prompts.sampling import read_rows
from fairseq_icl.settings import CONTEXT, OBSERVED, OF_TRAINING, PROMPTS, SETTINGS, Settings
from fairseq_icl.training.methods import Method, get_method, method_names

OWN = "fairseq_icl."
STAGES = {"prompts": 1, "weights": 1, "observing": 1, "training": 1, "metrics": 3}
"""The version of each stage. Whoever changes the numbers of a stage raises it (tests/replication/test_stages.py tells
when); what was computed with another version is then computed again."""
LATER = ("head_outputs",)  # settings that came after results were stored, and at their default change nothing of them
OBSERVING = ("prompts", "weights", "observing")
PASSED = {"zsl": OBSERVING, "icl": OBSERVING, "ft": (*OBSERVING, "training")}
"""The stages that an observation passes; all else has the versions of all of them in its key."""


@dataclass(frozen=True)
class Cell:
    """One (model, dataset, method, variant) with its settings, among them seed, permutation and init."""

    model: str
    dataset: str
    method: str
    variant: str  # name of the changes against the experiment's plain run; "" for the plain run
    settings: Settings
    source: str = ""  # where the dataset's YAML comes from: its name in the catalogue or a path
    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates of the two methods that a cell compares, where each has its own; `settings.lr` is then None."""
    lender: str = ""  # the model that the learning rate was made for, where it is another one

    @property
    def spec(self) -> DatasetSpec:
        """What the dataset's YAML says."""
        return load_spec(self.source or self.dataset)

    @property
    def label(self) -> str:
        """The cell in one line, for progress and errors."""
        init, seed, permutation = self.settings.init, self.settings.seed, self.settings.permutation
        run = f"{self.model} {init} {self.dataset} seed {seed} permutation {permutation}"
        return f"{run} {self.method}{self.variant and f' [{self.variant}]'}"

    def changed(self, *, method: str | None = None, **settings: Any) -> "Cell":
        """The cell with another method or other settings."""
        if method in dict(self.rates):
            settings = {"lr": dict(self.rates)[method], **settings}
        settings |= get_method(method).settings if method else {}
        return replace(self, method=method or self.method, settings=replace(self.settings, **settings), rates=())

    def configuration(self) -> dict[str, Any]:
        """Everything that determines the cell and can be written down; names of variant and file are not part of it."""
        described = {name: getattr(self, name) for name in ("model", "dataset", "method")}
        return described | {"settings": asdict(self.settings)} | ({"rates": dict(self.rates)} if self.rates else {})

    def observed(self, condition: str) -> "Cell":
        """The cell with all at a fixed value that makes no difference to the observation of a condition."""
        method = self.method if condition == "ft" else condition
        stages = OBSERVED[condition]
        if condition == "ft" and (get_method(method).reads_prompt or self.settings.layers == "similar"):
            stages += (CONTEXT,)
        settings = self.settings.relevant_to(stages)
        if condition == "ft":
            idle = {name: known.default for name, known in OF_TRAINING.items() if not get_method(method).reads(known)}
            settings = replace(settings, **idle)
        return replace(self, method=method, variant="", source="", settings=settings, rates=(), lender="")

    def changed_settings(self) -> dict[str, Any]:
        """The settings that are not at their default; where each method has its own learning rate, all of them."""
        changed = {name: value for name, value in vars(self.settings).items() if value != SETTINGS[name].default}
        return changed | ({"lr": dict(self.rates)} if self.rates else {})

    def prompts_key(self) -> tuple[str, Settings]:
        """What tells its prompts from others': the content of the dataset's YAML, and the settings that count."""
        return self.spec.fingerprint, self.settings.relevant_to(PROMPTS)

    def model_key(self) -> Settings:
        """What tells its model before fine-tuning from others'."""
        return self.settings.relevant_to(("weights",))


@dataclass(frozen=True)
class Keys:
    """Keys of cells, their observations, prompts and models, for one model and one folder of data."""

    files: ModelFiles
    data: Path
    _known: dict[tuple[Cell, str], str] = field(default_factory=dict, repr=False, compare=False)

    def of(self, cell: Cell, kind: str = "cell") -> str:
        """Key of the cell, of its observation of a condition (zsl, icl, ft), of its prompts or of its model."""
        if (cell, kind) in self._known:
            return self._known[cell, kind]
        prints: dict[str, Any] = self.prints(cell, kind)
        if kind == "prompts":
            key = "prompts-" + _hash(*cell.prompts_key(), prints)
        elif kind == "model":
            key = "model-" + _hash(cell.model_key(), prints)
        else:
            seen = cell if kind == "cell" else cell.observed(kind)
            if seen.settings.demonstrations not in ("first", "balanced"):
                prints["demonstrations"] = read_rows(seen.settings.demonstrations)
            if kind not in ("zsl", "icl"):
                methods = {cell.method, *get_method(cell.method).trained, seen.settings.layer_clip_value}
                prints["methods"] = [_described(get_method(name)) for name in method_names() if name in methods]
            key = _hash(seen.configuration() | {"settings": seen.settings}, prints)
        return self._known.setdefault((cell, kind), key)

    def prints(self, cell: Cell, kind: str = "cell") -> dict[str, str]:
        """What a result depends on besides its settings: the files of model and data, and the versions of stages."""
        named = {f"tokenizer.{name}": file_hash(path) for name, path in self.files.tokenizer.items()}
        dictionary = file_hash(self.files.dictionary) if self.files.dictionary else ""  # a folder's hash covers it
        stages = ", ".join(f"{stage} {STAGES[stage]}" for stage in PASSED.get(kind, STAGES))
        prints = {"model": self.files.sha256, "dictionary": dictionary, "data": data_hash(self.data, cell.spec)}
        return prints | named | {"bpe": str(self.files.bpe), "stages": stages}


def _described(method: Method) -> dict[str, Any]:
    """A method as its cells' keys have it; what other packages do to states is told by their code."""
    facts = asdict(method)
    if (edit := facts.pop("edit")) is None:
        return facts
    is_own = getattr(edit, "__module__", "").startswith(OWN)
    return facts | {"edit": edit.__qualname__ if is_own else _hash(_source_of(edit))}


def _hash(*content: Any) -> str:
    # Of settings, one of `LATER` is left out at its default, so that results from before stay.
    text = json.dumps(
        content,
        sort_keys=True,
        default=lambda told: {n: v for n, v in asdict(told).items() if n not in LATER or v != SETTINGS[n].default},
    )
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def foreign_metrics() -> dict[str, str]:
    """Names of the metrics that other packages added, with the hash of their code."""
    found = {}
    for metric in map(get_metric, metric_names()):
        function = getattr(metric.compute, "func", metric.compute)  # behind a partial
        if not function.__module__.startswith(OWN):
            found[metric.name] = _hash(_source_of(function), str(getattr(metric.compute, "keywords", "")))
    return found


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # made in an interactive session
        return f"{function.__module__}.{function.__qualname__}"


file_hash = cache(sha256_of)  # SHA-256 of a file, read once per process


def data_hash(folder: Path, spec: DatasetSpec, hash_file: Callable[[Path], str] = file_hash) -> str:
    """Hash of a dataset's two files and of what its YAML says, published settings and notes aside."""
    parts = [spec.fingerprint]
    parts += [hash_file(file) for split in ("train", "valid") for file in find_split(folder, spec, split)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
