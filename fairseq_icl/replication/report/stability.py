"""The numerical spread: what moving every weight by one unit in the last place does to each number of a run."""

import json
from collections.abc import Iterator

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.tables import METRICS, Entry, Table

COLUMNS = ("mean", "SD over perturbations", "SD over seeds", "half width of the interval")
SETTING = "perturbation"


def stability_tables(run: Run) -> list[Table]:
    """One table for every model, init and method of which a run has several perturbations."""
    values = _perturbed(run)
    tables = []
    for (model, init, method), group in values.groupby(["model", "init", "method"], sort=False):
        rows, wide = [], []
        for dataset, cells in group.groupby("dataset", sort=False):
            for metric, measured in _by_metric(cells):
                entries = _entries(measured, shown_as(metric)[2])
                rows.append((f"{dataset}: {metric}", entries))
                _, spread, _, half = (entry.mean for entry in entries)
                if spread is not None and half is not None and spread > half:
                    wide.append(f"{dataset}: {metric}")
        title = f"Numerical spread of {method} on {model}, {init}: every weight moved by one unit in the last place"
        told = ["Shares in percent. SDs over perturbations at one seed, and over seeds at one perturbation."]
        if wide:
            told.append(f"The numerical spread exceeds the examples' interval in: {', '.join(wide)}.")
        name = f"stability_{model}_{init}_{method}"
        tables.append(Table(name, title, COLUMNS, tuple(rows), 4, notes=tuple(told)))
    return tables


def _perturbed(run: Run) -> pd.DataFrame:
    """The means of cells that differ from another in nothing but the perturbation."""
    overall = run.values[run.values["layer"].isna()]
    settings = {key: dict(said["cell"]["settings"]) for key, said in run.configurations.items()}
    draws = {key: said.pop(SETTING, 0) for key, said in settings.items()}
    others = {key: json.dumps(said, sort_keys=True) for key, said in settings.items()}
    overall = overall.assign(draw=overall["key"].map(draws), others=overall["key"].map(others))
    same = ["model", "dataset", "method", "others", "metric"]
    overall = overall.drop_duplicates([*same, "draw"])
    return overall[overall.groupby(same)["draw"].transform("nunique") > 1]


def _by_metric(cells: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    present = set(cells["metric"])
    for metric in (metric for metric in METRICS if metric in present):
        yield metric, cells[cells["metric"] == metric]


def _entries(measured: pd.DataFrame, scale: float) -> tuple[Entry, ...]:
    runs, keys = len(measured), tuple(measured["key"])
    half = ((measured["high"] - measured["low"]) / 2).mean()
    spreads = (pooled(measured, ["seed", "permutation"]), pooled(measured, ["draw"]))
    numbers = (measured["value"].mean(), *spreads, half)
    return tuple(Entry(None if np.isnan(x) else float(x) * scale, runs=runs, keys=keys) for x in numbers)


def pooled(measured: pd.DataFrame, by: list[str]) -> float:
    """Root of the mean variance within the groups; NaN if no group has two values."""
    return float(np.sqrt(measured.groupby(by)["value"].var().mean()))
