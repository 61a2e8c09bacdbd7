"""A cell: one number-producing unit of a run, and the keys under which it and the observations it needs are stored."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fairseq_icl.reading import Reading

KEY_LENGTH = 20


@dataclass(frozen=True)
class Settings:
    """What a cell needs beyond its coordinates, completely resolved."""

    num_demonstrations: int
    learning_rate: float | None
    """None for a cell that trains nothing."""
    limit: int | None
    clip_norm: float
    layer_clip: str
    layer_clip_value: str | None
    switch_labels: str
    switch_fraction: float
    switch_seed: int | None
    train_parameters: str | None
    reading: Reading


TRAINING_SETTINGS = ("learning_rate", "clip_norm", "layer_clip", "layer_clip_value", "train_parameters")
"""Settings that change the fine-tuned model only, so that cells differing in them share ZSL and ICL."""
TRAINING_READINGS = ("loss_on", "finetuning_order", "finetuning_demonstrations", "biases", "layer_loss")
TRAINING_READINGS += ("layer_causal_point", "step_per")
METRIC_READINGS = ("random_update", "attention_similarity")
"""Differences that change neither the model nor what is observed, only what is computed from it."""


@dataclass(frozen=True)
class Cell:
    """One (model, init, dataset, seed, permutation, method, variant)."""

    model: str
    init: str
    dataset: str
    seed: int
    permutation: int
    method: str
    variant: str
    """Name of the changes against the experiment's plain run; "" for the plain run."""
    settings: Settings
    source: str = ""
    """Where the dataset's YAML comes from: its name in the catalogue or a path."""

    @property
    def label(self) -> str:
        """The cell in one line, for progress and errors."""
        run = f"seed {self.seed} permutation {self.permutation}"
        return f"{self.model} {self.init} {self.dataset} {run} {self.method}{self.variant and f' [{self.variant}]'}"

    def changed(self, *, method: str | None = None, **settings: Any) -> "Cell":
        """The cell with another method or other settings."""
        return replace(self, method=method or self.method, settings=replace(self.settings, **settings))

    def configuration(self) -> dict[str, Any]:
        """Everything that determines the cell and can be written down; names of variant and file are not part of it."""
        described = asdict(self)
        del described["variant"], described["source"]
        return described


def key_of(configuration: dict[str, Any], fingerprints: dict[str, str]) -> str:
    """Hash of what determines a result: its configuration and the fingerprints of model, data and code."""
    text = json.dumps([configuration, fingerprints], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def observed(cell: Cell, setting: str) -> Cell:
    """`cell` with all that does not change the observation of `setting` (zsl, icl, ft) put to a fixed value.

    Two cells with the same result share the observation.
    """
    neutral = Reading()
    reading = {name: getattr(neutral, name) for name in METRIC_READINGS}
    changes: dict[str, Any] = {}
    if setting in ("zsl", "icl"):
        changes |= {name: _DEFAULTS[name] for name in TRAINING_SETTINGS}
        reading |= {name: getattr(neutral, name) for name in TRAINING_READINGS}
        if cell.settings.switch_labels not in ("demonstrations", "both") or setting == "zsl":
            changes |= {name: _DEFAULTS[name] for name in ("switch_labels", "switch_fraction", "switch_seed")}
    if setting == "zsl":
        changes["num_demonstrations"] = 0
        reading["permutation_zero"] = neutral.permutation_zero
    settings = replace(cell.settings, reading=replace(cell.settings.reading, **reading), **changes)
    # Random weights are drawn from the run's seed; a pretrained model without demonstrations knows no seed.
    seed = 0 if setting == "zsl" and cell.init == "pretrained" else cell.seed
    permutation = 0 if setting == "zsl" else cell.permutation
    method = cell.method if setting == "ft" else setting
    return replace(cell, seed=seed, permutation=permutation, method=method, variant="", source="", settings=settings)


_DEFAULTS: dict[str, Any] = {
    "learning_rate": None,
    "clip_norm": 0.0,
    "layer_clip": "none",
    "layer_clip_value": None,
    "train_parameters": None,
    "switch_labels": "none",
    "switch_fraction": 1.0,
    "switch_seed": None,
}


def cell_from(configuration: dict[str, Any], variant: str = "") -> Cell:
    """The cell that `configuration` (as stored) describes."""
    settings = dict(configuration["settings"])
    settings["reading"] = Reading(**settings["reading"])
    known = {field.name for field in fields(Settings)}
    settings = Settings(**{name: settings[name] for name in known})
    return Cell(**{**configuration, "variant": variant, "settings": settings})
