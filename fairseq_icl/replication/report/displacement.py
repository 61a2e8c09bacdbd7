"""Is one method better than another, or only bolder? Methods at equal steps and at equal displacement.

A method that moves the weights, or the attention output, further may look more like ICL, or less, for that alone. Where
a run has cells with `layer_step=equal`, methods are compared at the same relative size of every layer's step. Where it
has a method at several learning rates (rate_search, learning_rate) or sizes of steps (steps), every similarity is known
against the length ratio, and methods can be compared at a ratio of 1, interpolated seed by seed.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.charts import Chart, Series, curves, panels_of
from fairseq_icl.replication.report.rates import choose_rates
from fairseq_icl.replication.report.run import Run, needs
from fairseq_icl.replication.report.tables import LENGTHS, Entry, Table, number
from fairseq_icl.results import LENGTH_RATIO

SIZE, EQUAL = "layer_step_size", "layer_step=equal"
SHOWN = {metric: shown_as(metric)[0] for metric in ("sim_aou", "sim_am_delta", "accuracy_ft")}
COLUMNS = ("relative step", *SHOWN.values())
COSINES = ("sim_aou", "sim_aou_projected", "sim_aou_norm", "sim_am_delta")
RATIO = f"{LENGTH_RATIO}sim_aou"
AT_EQUAL_LENGTH = "_at_equal_length"  # what a claim adds to the name of one of COSINES
SWEPT = {"lr", "lr_scale", "layer_step", SIZE}
LINE = ["dataset", "init", "method", "by"]


def equal_steps(run: Run) -> pd.DataFrame:
    """Means of the cells with equal steps: model, init, dataset, method, metric, layer_step_size, mean, sd, runs."""
    points = run.against("layer_step", SIZE)
    return points[points["layer_step"] == "equal"].drop(columns="layer_step")


@needs(settings=[EQUAL])
def steps_tables(run: Run) -> list[Table]:
    """One table for every model and init with equal steps: rows are methods at a size, and at their learning rate."""
    tables = []
    for (model, init), group in equal_steps(run).groupby(["model", "init"], sort=False):
        own = run.values[(run.values["model"] == model) & (run.values["init"] == init) & run.values["layer"].isna()]
        sizes = own["key"].map(lambda key: run.settings[key].get(SIZE))
        methods = list(group["method"].drop_duplicates())
        rows = []
        for size, method in product(sorted(group[SIZE].drop_duplicates()), methods):
            chosen = own[(own["method"] == method) & (sizes == size)]
            rows.append((f"{method}, step {size:g}", _step_row(run, chosen)))
        for method in methods:
            chosen = own[(own["method"] == method) & (own["variant"] == "")]
            if len(chosen):
                rows.append((f"{method}, learning rate", _step_row(run, chosen)))
        title = f"Steps of one relative size on {model}, {init} (mean over datasets and seeds)"
        notes = (
            "Relative step: |dW| / |W| of keys and values of a layer, mean over steps and layers. Accuracy in percent.",
            LENGTHS,
        )
        tables.append(Table(f"steps_{model}_{init}", title, COLUMNS, tuple(rows), 4, notes=notes))
    return tables


def _step_row(run: Run, chosen: pd.DataFrame) -> tuple[Entry, ...]:
    """Relative step, cosines with their length ratios, accuracy: means over the cells in `chosen`."""
    keys = tuple(chosen["key"].drop_duplicates())
    means = chosen.groupby("metric")["value"].mean()
    sizes = [float(run.step_sizes[key].mean()) for key in keys if key in run.step_sizes]
    entries = [Entry(float(np.mean(sizes)) if sizes else None, runs=len(keys), keys=keys)]
    for metric in SHOWN:
        mean, ratio = number(means.get(metric), shown_as(metric)[2]), number(means.get(f"{LENGTH_RATIO}{metric}"))
        entries.append(Entry(mean, runs=len(keys), keys=keys, length_ratio=ratio))
    return tuple(entries)


@needs(settings=[EQUAL])
def step_figures(run: Run, model: str) -> Iterator[Chart]:
    """Cosines against the size of equal steps."""
    points = equal_steps(run)
    for metric, name in list(SHOWN.items())[:2]:
        title = f"{name} at steps of equal relative size"
        yield from curves(points, model, {metric: name}, f"steps_{metric}", title, SIZE, name)


def sweeps(run: Run, model: str) -> pd.DataFrame:
    """One row a cell of a model's sweeps: LINE, label, size, seed, permutation, variant, key, usable, RATIO, COSINES.

    `by` is what is swept, lr or layer_step_size, and `size` its value; sweeps of one value are left out. `usable` says
    whether a search found that rounding does not decide what fine-tuning does at this rate, or made no search.
    """
    values = run.values[(run.values["model"] == model) & run.values["layer"].isna()]
    values = values[[{word.partition("=")[0] for word in name.split()} <= SWEPT for name in values["variant"]]]
    values = values[values["metric"].isin({RATIO, *COSINES})]
    place = ["dataset", "init", "method", "seed", "permutation", "variant", "key"]
    table = values.pivot_table(index=place, columns="metric", values="value", sort=False).reset_index()
    if not {RATIO, *COSINES} <= set(table):
        return pd.DataFrame(columns=[*place, "by", "label", "size", "usable", RATIO, *COSINES])
    settings = [run.settings[key] for key in table["key"]]
    table["by"] = ["lr" if said.get(SIZE) is None else SIZE for said in settings]
    table["size"] = [said.get(name) for said, name in zip(settings, table["by"], strict=True)]
    table["label"] = [
        ", ".join([method, *[init] * (init != "pretrained"), *["equal steps"] * (by != "lr")])
        for init, method, by in table[LINE[1:]].to_numpy()
    ]
    choices = [choice for choice in choose_rates(run) if choice.model == model]
    searched = {(own.dataset, "pretrained", own.method, "lr"): own for own in choices}
    refused = {(*line, rate) for line, own in searched.items() for rate in {*own.tried.index} - {*own.usable}}
    table["usable"] = [step not in refused for step in table[[*LINE, "size"]].itertuples(index=False, name=None)]
    table = table[table["size"].notna() & (table[RATIO] > 0)].drop_duplicates([*LINE, "size", "seed", "permutation"])
    return table[table.groupby(LINE)["size"].transform("nunique") > 1].sort_values([*LINE, "size"])


def at_equal_length(cells: pd.DataFrame) -> pd.DataFrame:
    """The sweeps (`cells`) at a length ratio of 1: LINE, seed, permutation, size and COSINES.

    Of the seeds that get there; interpolated on logarithmic axes between the two neighbouring usable sizes where the
    ratio first passes 1.
    """
    found: list[dict[str, Any]] = []
    for place, line in cells[cells["usable"].astype(bool)].groupby([*LINE, "seed", "permutation"], sort=False):
        lengths = np.log(line[RATIO].to_numpy(float))
        passes = np.flatnonzero(np.sign(lengths[:-1]) != np.sign(lengths[1:]))
        if len(passes):
            first = passes[0]
            share = lengths[first] / (lengths[first] - lengths[first + 1])
            ends = line[["size", *COSINES]].assign(size=np.log(line["size"].astype(float))).iloc[first : first + 2]
            between = dict(ends.iloc[0] + share * (ends.iloc[1] - ends.iloc[0]))
            named = dict(zip([*LINE, "seed", "permutation"], place, strict=True))
            found.append(named | between | {"size": np.exp(between["size"])})
    return pd.DataFrame(found, columns=[*LINE, "seed", "permutation", "size", *COSINES])


@needs(metrics=[RATIO], differing=SWEPT)
def displacement_tables(run: Run) -> list[Table]:
    """One table a model with sweeps: a row a dataset and method, at equal length and at the method's own rate."""
    tables = []
    columns = ["length ratio at own rate", "rate at ratio 1"]
    columns += [f"{shown_as(name)[0]} {where}" for name in COSINES for where in ("at ratio 1", "at own rate")]
    chosen = {(choice.model, choice.dataset, choice.method): choice.rate for choice in choose_rates(run)}
    notes = (
        "Length ratio: how far fine-tuning moves the attention output, in units of ICL's way. At 1: between "
        "neighbouring rates (or sizes of equal steps), seed by seed, for the seeds that get there without a rate at "
        "which rounding decides. Own rate: the one that the search chose, or the plain run's. SD over seeds.",
    )
    for model in run.planned["model"].drop_duplicates():
        cells = sweeps(run, model)
        equal, rows = at_equal_length(cells), []
        for place, line in cells.groupby(LINE, sort=False):
            dataset, _, method, by = place
            rate = chosen.get((model, dataset, method)) if by == "lr" else None
            own = line[(line["size"] == rate) if rate is not None else (line["variant"] == "")]
            there = equal[(equal[LINE] == place).all(axis=1)]
            shown = [(own, RATIO), (there, "size"), *((at, name) for name in COSINES for at in (there, own))]
            entries, seeds = [], line.groupby(["seed", "permutation"]).ngroups
            for at, name in shown:
                values, keys = at[name].dropna().astype(float), tuple((own if at is own else line)["key"])
                mark = f"{len(values)} of {seeds} seeds" if name == "size" and 0 < len(values) < seeds else ""
                entries.append(
                    Entry(number(values.mean()), number(values.std()), runs=len(values), keys=keys, mark=mark)
                )
            rows.append((f"{dataset}: {line['label'].iloc[0]}", tuple(entries)))
        if rows:
            title = f"At equal displacement on {model}"
            tables.append(Table(f"displacement_{model}", title, tuple(columns), tuple(rows), 4, notes=notes))
    return tables


@needs(metrics=[RATIO], differing=SWEPT)
def displacement_figures(run: Run, model: str) -> Iterator[Chart]:
    """SimAOU against the length ratio: a panel a dataset, a line a method and init, a point a rate or size of steps."""
    series = []
    for (dataset, init, method, _, usable), line in sweeps(run, model).groupby([*LINE, "usable"], sort=False):
        points = line.groupby("size").agg(x=(RATIO, "mean"), y=(COSINES[0], "mean"), sd=(COSINES[0], "std"))
        tags = {"dataset": dataset, "init": init, "method": method}
        x, y, sd = (list(points[name]) for name in points)
        series.append(Series(line["label"].iloc[0] + ", decided by rounding" * (not usable), x, y, sd, tags))
    name = shown_as(COSINES[0])[0]
    caption = (
        f"{model}. Every point is a learning rate, or a size of equal steps; at 1 fine-tuning moves the attention "
        "output as far as ICL does. Error bars: standard deviation over seeds."
    )
    title, axes = f"{name} against how far fine-tuning moves the model", ("length ratio, FT / ICL", f"{name} (cosine)")
    yield Chart(f"displacement_{model}", title, caption, panels_of(series), *axes, scale="log", zero=True)
