"""Equal steps: is one method better than another, or only bolder?

A method that moves the weights further may be more similar to ICL for that alone. Where a run has cells with
`layer_step=equal`, methods are compared at the same relative size of every layer's step.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.charts import Chart, curves
from fairseq_icl.replication.report.run import Run, needs
from fairseq_icl.replication.report.tables import LENGTHS, Entry, Table
from fairseq_icl.results import LENGTH_RATIO

SIZE = "layer_step_size"
EQUAL = "layer_step=equal"
COSINES = ("sim_aou", "sim_am_delta")
SHOWN = {metric: shown_as(metric)[0] for metric in (*COSINES, "accuracy_ft")}
COLUMNS = ("relative step", *SHOWN.values())


def equal_steps(run: Run) -> pd.DataFrame:
    """Means of the cells with equal steps: model, init, dataset, method, metric, layer_step_size, mean, sd, runs."""
    points = run.against("layer_step", SIZE)
    return points[points["layer_step"] == "equal"].drop(columns="layer_step")


def mean_step(run: Run, keys: pd.Series) -> float:
    """The relative size of a step, averaged over steps, layers and cells; NaN if none was recorded."""
    sizes = [float(run.step_sizes[key].mean()) for key in keys.drop_duplicates() if key in run.step_sizes]
    return float(np.mean(sizes)) if sizes else float("nan")


@needs(settings=[EQUAL])
def steps_tables(run: Run) -> list[Table]:
    """One table for every model and init with equal steps: rows are methods at a size, and at their learning rate."""
    points = equal_steps(run)
    tables = []
    for (model, init), group in points.groupby(["model", "init"], sort=False):
        own = run.values[(run.values["model"] == model) & (run.values["init"] == init) & run.values["layer"].isna()]
        sizes = run.setting(SIZE, own["key"])
        methods = list(group["method"].drop_duplicates())
        rows = []
        for size, method in product(sorted(group[SIZE].drop_duplicates()), methods):
            chosen = own[(own["method"] == method) & (sizes == size)]
            rows.append((f"{method}, step {size:g}", _row(run, chosen)))
        for method in methods:
            chosen = own[(own["method"] == method) & (own["variant"] == "")]
            if len(chosen):
                rows.append((f"{method}, learning rate", _row(run, chosen)))
        title = f"Steps of one relative size on {model}, {init} (mean over datasets and seeds)"
        told = [
            "Relative step: |dW| / |W| of keys and values of a layer, mean over steps and layers. Accuracy in percent."
        ]
        told += [*_verdicts(group), *_best(group), LENGTHS]
        tables.append(Table(f"steps_{model}_{init}", title, COLUMNS, tuple(rows), 4, notes=tuple(told)))
    return tables


def _row(run: Run, chosen: pd.DataFrame) -> tuple[Entry, ...]:
    """Relative step, cosines with their length ratios, accuracy: means over the cells in `chosen`."""
    keys = tuple(chosen["key"].drop_duplicates())
    means = chosen.groupby("metric")["value"].mean()
    step = mean_step(run, chosen["key"])
    entries = [Entry(None if np.isnan(step) else step, runs=len(keys), keys=keys)]
    for metric in SHOWN:
        value, ratio = means.get(metric), means.get(f"{LENGTH_RATIO}{metric}")
        scale = shown_as(metric)[2]
        mean = None if value is None else float(value) * scale
        length = None if ratio is None else float(ratio)
        entries.append(Entry(mean, runs=len(keys), keys=keys, length_ratio=length))
    return tuple(entries)


def _verdicts(group: pd.DataFrame) -> list[str]:
    """For every method after the first: at how many (dataset, size) its cosine is above the first one's."""
    told = []
    for metric in COSINES:
        name = SHOWN[metric]
        table = group[group["metric"] == metric].pivot_table(index=["dataset", SIZE], columns="method", values="mean")
        first, *others = [method for method in group["method"].drop_duplicates() if method in table]
        for other in others:
            both = table[[first, other]].dropna()
            above = int((both[other] > both[first]).sum())
            told.append(f"{name} of {other} is above that of {first} at {above} of {len(both)} equal steps.")
    return told


def _best(group: pd.DataFrame) -> list[str]:
    """The largest mean over datasets of each cosine and method, and the size at which it is reached."""
    told = []
    for metric in COSINES:
        name = SHOWN[metric]
        means = group[group["metric"] == metric].groupby(["method", SIZE], sort=False)["mean"].mean()
        best = [
            f"{method} {line.max():.3f} at {line.idxmax()[1]:g}" for method, line in means.groupby(level=0, sort=False)
        ]
        told.append(f"Highest {name}: {', '.join(best)}.")
    return told


@needs(settings=[EQUAL])
def step_figures(run: Run, model: str) -> Iterator[Chart]:
    """Cosines against the size of equal steps, and against the length of what these steps change."""
    points = equal_steps(run)
    for metric in COSINES:
        name = SHOWN[metric]
        names = (f"steps_{metric}", f"{name} at steps of equal relative size")
        axis = ("relative size of every layer's step, |dW| / |W|", f"{name} (cosine)", 1.0)
        yield from curves(points, model, SIZE, {metric: name}, names, axis, "log")
