"""What the papers printed and what their authors' own runs gave: the files of config/published."""

from functools import cache
from typing import Any

import pandas as pd
import yaml

from fairseq_icl.files import PACKAGE

FOLDER = PACKAGE / "config" / "published"
AUTHORS_MODEL = "1.3b"
"""The model of all of the authors' runs that are known."""
RUN = ["dataset", "method", "init", "seed", "permutation"]
NO_TRAINING = {"no-training": ("layer-norms", "untrained")}
"""A name of an init in published tables and claims -> the inits it may stand for, the authors' first."""


@cache
def published_figures() -> dict[str, Any]:
    """The papers' figures, as the package's YAML has them."""
    return yaml.safe_load((FOLDER / "published.yaml").read_text(encoding="utf-8"))


@cache
def authors_runs() -> pd.DataFrame:
    """The authors' runs: RUN, clip_norm, precision, metric, layer (missing: all), value, source.

    clip_norm is a number, 0 without clipping; runs of the per-layer clipping that had no effect are left out.
    """
    table = pd.read_csv(FOLDER / "authors_runs.csv", dtype={"clip_norm": str, "layer": str})
    table["clip_norm"] = pd.to_numeric(table["clip_norm"], errors="coerce")
    table = table[table["clip_norm"].notna()]
    table["layer"] = pd.to_numeric(table["layer"], errors="coerce").astype("Int64")  # "all" -> missing
    percent = table["metric"] == "rec2ftp"
    table.loc[percent, "value"] = table.loc[percent, "value"] / 100
    # A run of which the drafts' history and the released logs both tell is counted once, as released.
    table = table.sort_values("source", key=lambda source: ~source.str.startswith("master"), kind="stable")
    return table.drop_duplicates([*RUN, "clip_norm", "precision", "metric", "layer"]).reset_index(drop=True)


@cache
def authors_means() -> dict[tuple[Any, ...], tuple[float, float, int]]:
    """(metric, method, init, clip_norm, dataset, precision) -> mean, SD and number of the authors' runs."""
    overall = authors_runs()[authors_runs()["layer"].isna()]
    groups = overall.groupby(["metric", "method", "init", "clip_norm", "dataset", "precision"])["value"]
    return {key: (float(runs.mean()), float(runs.std()), len(runs)) for key, runs in groups}


@cache
def authors_trajectory() -> pd.DataFrame:
    """The steps of one layer-causal run of the authors (Subj, seed 4, fp16): step, loss_bits, sample_size, ..."""
    return pd.read_csv(FOLDER / "trajectory_subj_seed4.tsv", sep="\t")


def inits_of(name: str) -> tuple[str, ...]:
    """The inits that a name in published tables and claims may stand for."""
    return NO_TRAINING.get(name, (name,))
