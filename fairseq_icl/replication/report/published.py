"""What the papers printed and claim, and what their authors' own runs gave: the files of config/published."""

import math
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import yaml
from pydantic import Field, model_validator

from fairseq_icl.errors import UserError
from fairseq_icl.files import PACKAGE, reason_of
from fairseq_icl.typed import Typed, validated

FOLDER = PACKAGE / "config" / "published"
PLACE = ["metric", "method", "init", "clip_norm", "dataset", "precision"]
AUTHORS_MODEL = "1.3b"  # of all of the authors' runs that are known
LOGS = ("authors_runs.csv", "authors_runs_more.csv")
DEMONSTRATIONS, MOST_VALIDATION = 32, 2000
RUN = ["dataset", "method", "init", "seed", "permutation"]
NO_TRAINING = {"no-training": ("layer-norms", "untrained")}  # a name in tables and claims -> inits, the authors' first


@cache
def published_figures() -> dict[str, Any]:
    """The papers' figures, as the package's YAML has them."""
    return yaml.safe_load((FOLDER / "published.yaml").read_text(encoding="utf-8"))


class Term(Typed):
    """A metric, of a method and an init."""

    metric: str
    method: str = "gd"
    init: str = "pretrained"


class Quantity(Typed):
    """`left`, minus `right`, over `over`."""

    left: Term
    right: Term | None = None
    over: Term | None = None

    @property
    def terms(self) -> list[Term]:
        """The terms that it has."""
        return [term for term in (self.left, self.right, self.over) if term is not None]


class Bound(Typed):
    """What a quantity has to be, above one number or below it."""

    above: float = -math.inf
    below: float = math.inf

    @model_validator(mode="after")
    def _one(self) -> "Bound":
        if math.isinf(self.above) == math.isinf(self.below):
            raise ValueError("give either above or below, a number")
        return self


class Datasets(Typed):
    """Datasets that a claim leaves out."""

    excluded: tuple[str, ...] = Field(alias="except", strict=False)


class Layers(Typed):
    """Layers that a claim names, of a model that has so many."""

    of: int
    only: tuple[int, ...] = Field((), strict=False)
    excluded: tuple[int, ...] = Field((), alias="except", strict=False)

    @property
    def chosen(self) -> list[int]:
        """Their numbers."""
        return list(self.only) or [layer for layer in range(self.of) if layer not in self.excluded]


class Claim(Quantity):
    """A paper's claim as a question that results can answer; claims.yaml says what the keys mean."""

    name: str
    source: str
    says: str
    note: str = ""
    asks: Bound
    where: Literal["every", "most", "average"]
    by: Literal["dataset", "layer"] = "dataset"
    datasets: Datasets | None = None
    layers: Layers | None = None
    control: Quantity | None = None
    printed: float | None = None

    @model_validator(mode="after")
    def _known(self) -> "Claim":
        papers = published_figures()["papers"]
        if self.source not in papers:
            raise ValueError(f"source={self.source}: no such paper in published.yaml; choose from {', '.join(papers)}")
        if (self.by == "layer") != (self.layers is not None):
            raise ValueError("by: layer needs the layers, and layers need by: layer")
        return self

    def levels(self, places: int, level: float) -> tuple[int, float, float]:
        """How many of its places it needs, and the levels at which a single one counts for and against it."""
        needed = places // 2 + 1 if self.where == "most" else places
        return needed, level / (places - needed + 1), level / needed


class ClaimsFile(Typed):
    """claims.yaml."""

    claims: tuple[Claim, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _different(self) -> "ClaimsFile":
        names = [claim.name for claim in self.claims]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)}: the name of two claims")
        return self


@cache
def claims(path: Path = FOLDER / "claims.yaml") -> tuple[Claim, ...]:
    """The papers' claims."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({reason_of(error)}); mend it") from error
    return validated(ClaimsFile, content, str(path), "the head of the file says what a claim may have").claims


@cache
def all_logs() -> pd.DataFrame:
    """Every log of the authors, repeats included: RUN, k, clip_norm, precision, metric, layer (missing: all), value.

    clip_norm is a number, 0 without clipping; runs of the per-layer clipping that had no effect are left out. `repeat`
    is 0 for the runs of the released artefacts and of the drafts, and counts the further logs of a configuration.
    """
    parts = [pd.read_csv(FOLDER / name, dtype={"clip_norm": str, "layer": str}) for name in LOGS]
    changes = authors_prediction_changes()
    shares = changes["same_changes"] / (changes["icl_changed"] + changes["ft_changed"] - changes["same_changes"])
    counted = changes.assign(metric="rpa_same_label", layer="all", value=shares, repeat=1)
    table = pd.concat([*parts, counted[[*RUN, *parts[1].columns.difference(RUN)]]], ignore_index=True)
    table["repeat"] = table["repeat"].fillna(0).astype(int)
    table["clip_norm"] = pd.to_numeric(table["clip_norm"], errors="coerce")
    table["layer"] = pd.to_numeric(table["layer"], errors="coerce").astype("Int64")  # "all" -> missing
    table["value"] = table["value"].mask(table["metric"] == "rec2ftp", table["value"] / 100)  # printed in percent
    table = table[table["clip_norm"].notna()]
    # A run of which the drafts' history and the released logs both tell comes first as released.
    return table.sort_values("source", key=lambda source: ~source.str.startswith("master"), kind="stable")


@cache
def authors_runs() -> pd.DataFrame:
    """The authors' runs with 32 demonstrations, each once: columns as in `all_logs`."""
    logs, same = all_logs(), [*RUN, "clip_norm", "precision", "metric", "layer"]
    return logs[logs["k"] == DEMONSTRATIONS].drop_duplicates(same, ignore_index=True)


@cache
def authors_prediction_changes() -> pd.DataFrame:
    """Predictions that ICL and fine-tuning changed, and mended ("f2t"), in 13 of the authors' runs."""
    return pd.read_csv(FOLDER / "authors_prediction_changes.csv", dtype={"clip_norm": str})


@cache
def authors_noise() -> dict[tuple[Any, ...], tuple[float, float]]:
    """PLACE -> how far repeats of one run lie apart, overall and at most in one layer, where there are repeats."""
    logs = all_logs().assign(by_layer=lambda logs: logs["layer"].notna(), layer=lambda logs: logs["layer"].fillna(-1))
    groups = logs.groupby([*PLACE, "seed", "permutation", "k", "by_layer", "layer"])["value"]
    spread = (groups.max() - groups.min())[groups.size() > 1]
    largest = spread.groupby([*PLACE, "by_layer"]).max().unstack("by_layer")
    return {key: (float(row.get(False, math.nan)), float(row.get(True, math.nan))) for key, row in largest.iterrows()}


@cache
def authors_means() -> dict[tuple[Any, ...], tuple[float, float, int]]:
    """PLACE -> mean, SD and number of the authors' runs that the paper is about; of further ones where it has none."""
    overall = authors_runs()[authors_runs()["layer"].isna()]
    paper = overall["repeat"] == overall.groupby(PLACE)["repeat"].transform("min")
    groups = overall[paper].groupby(PLACE)["value"]
    return {key: (float(runs.mean()), float(runs.std()), len(runs)) for key, runs in groups}


@cache
def authors_gradients() -> np.ndarray:
    """Norms of a layer's gradient (all parameters, summed over tokens) in one fp16 run on Subj: (steps, layers)."""
    table = pd.read_csv(FOLDER / "gradient_norms_subj_seed4.csv")
    return table.pivot(index="step", columns="layer", values="norm_fp16").to_numpy()


@cache
def authors_trajectory(precision: str = "fp16") -> pd.DataFrame:
    """The steps of one layer-causal run of the authors (Subj, seed 4): step, loss_bits, sample_size, ..."""
    ending = "" if precision == "fp16" else f"_{precision}"
    return pd.read_csv(FOLDER / f"trajectory_subj_seed4{ending}.tsv", sep="\t")


def zero_shot_errors(dataset: str) -> int:
    """How many validation examples the authors' model has wrong zero-shot, by the first paper's accuracy."""
    sizes = published_figures()["other"]["dai2023"]["valid_examples"]
    accuracy = published_figures()["tables"]["dai2023_accuracy"]
    right = accuracy["rows"][0]["published"][AUTHORS_MODEL]["values"][accuracy["columns"].index(dataset)]
    size = min(MOST_VALIDATION, sizes["values"][sizes["columns"].index(dataset)])
    return round(size * (100 - right) / 100)


def inits_of(name: str) -> tuple[str, ...]:
    """The inits that a name in published tables and claims may stand for."""
    return NO_TRAINING.get(name, (name,))
