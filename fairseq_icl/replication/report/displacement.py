"""Equal displacement: how similar methods are to ICL where they move the attention output as far as ICL does.

A method that goes further may look more like ICL, or less, for that alone. Where a run has a method at several learning
rates (rate_search, learning_rate) or sizes of steps (steps), every similarity is known against the length ratio, and
methods can be compared at a ratio of 1, interpolated seed by seed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.charts import Chart, Panel, Series
from fairseq_icl.replication.report.rates import choose_rates
from fairseq_icl.replication.report.run import Run, needs
from fairseq_icl.replication.report.tables import Entry, Table
from fairseq_icl.results import LENGTH_RATIO

COSINES = ("sim_aou", "sim_aou_norm", "sim_am_delta")
RATIO = f"{LENGTH_RATIO}sim_aou"
AT_EQUAL_LENGTH = "_at_equal_length"
"""What a claim adds to the name of one of COSINES."""
SWEPT = {"lr", "lr_scale", "layer_step", "layer_step_size"}
LINE = ["dataset", "init", "method", "by"]


def sweeps(run: Run, model: str) -> pd.DataFrame:
    """One row a cell of a model's sweeps: LINE, size, seed, permutation, variant, key, RATIO and COSINES.

    `by` is what is swept, lr or layer_step_size, and `size` its value; sweeps of one value are left out.
    """
    values = run.values[(run.values["model"] == model) & run.values["layer"].isna()]
    values = values[[{word.partition("=")[0] for word in name.split()} <= SWEPT for name in values["variant"]]]
    values = values[values["metric"].isin({RATIO, *COSINES})]
    place = ["dataset", "init", "method", "seed", "permutation", "variant", "key"]
    table = values.pivot_table(index=place, columns="metric", values="value", sort=False).reset_index()
    if not {RATIO, *COSINES} <= set(table):
        return pd.DataFrame(columns=[*place, "by", "size", RATIO, *COSINES])
    settings = [run.configurations[key]["cell"]["settings"] for key in table["key"]]
    by = ["lr" if said.get("layer_step_size") is None else "layer_step_size" for said in settings]
    table = table.assign(by=by, size=[said[name] for said, name in zip(settings, by, strict=True)])
    table = table.dropna(subset=["size", RATIO]).drop_duplicates([*LINE, "size", "seed", "permutation"])
    return table[table.groupby(LINE)["size"].transform("nunique") > 1].sort_values([*LINE, "size"])


def at_equal_length(cells: pd.DataFrame) -> pd.DataFrame:
    """The sweeps (`cells`) at a length ratio of 1: LINE, seed, permutation, size and COSINES.

    Of the seeds that get there; interpolated on logarithmic axes between the two neighbouring sizes where the ratio
    first passes 1.
    """
    found: list[dict[str, Any]] = []
    for place, line in cells.groupby([*LINE, "seed", "permutation"], sort=False):
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
    for model in run.planned["model"].drop_duplicates():
        cells = sweeps(run, model)
        equal, rows = at_equal_length(cells), []
        for place, line in cells.groupby(LINE, sort=False):
            dataset, init, method, by = map(str, place)
            rate = chosen.get((model, dataset, method)) if by == "lr" else None
            own = line[(line["size"] == rate) if rate is not None else (line["variant"] == "")]
            there = equal[(equal[LINE] == place).all(axis=1)]
            entries = [_entry(own, RATIO, line), _entry(there, "size", line)]
            entries += [_entry(at, name, line) for name in COSINES for at in (there, own)]
            words = [method, *[init] * (init != "pretrained"), *["equal steps"] * (by != "lr")]
            rows.append((f"{dataset}: {', '.join(words)}", tuple(entries)))
        if rows:
            notes = (
                "Length ratio: how far fine-tuning moves the attention output, in units of ICL's way. At 1: between "
                "neighbouring rates (or sizes of equal steps), seed by seed, for the seeds that get there. Own rate: "
                "the one that the search chose, or the plain run's. SD over seeds.",
            )
            title = f"At equal displacement on {model}"
            tables.append(Table(f"displacement_{model}", title, tuple(columns), tuple(rows), 4, notes=notes))
    return tables


def _entry(cells: pd.DataFrame, name: str, line: pd.DataFrame) -> Entry:
    values = cells[name].dropna().astype(float)
    keys = tuple((cells if "key" in cells else line)["key"])
    sd = float(values.std()) if len(values) > 1 else None
    return Entry(float(values.mean()) if len(values) else None, sd, runs=len(values), keys=keys)


@needs(metrics=[RATIO], differing=SWEPT)
def displacement_figures(run: Run, model: str) -> Iterator[Chart]:
    """SimAOU against the length ratio: a panel a dataset, a line a method and init, a point a rate or size of steps."""
    cells = sweeps(run, model)
    panels: dict[str, list[Series]] = {}
    for place, line in cells.groupby(LINE, sort=False):
        dataset, init, method, by = map(str, place)
        points = line.groupby("size").agg(x=(RATIO, "mean"), y=(COSINES[0], "mean"), sd=(COSINES[0], "std"))
        label = ", ".join([method, *[init] * (init != "pretrained"), *["equal steps"] * (by != "lr")])
        tags = {"dataset": dataset, "init": init, "method": method}
        panels.setdefault(dataset, []).append(
            Series(label, list(points["x"]), list(points["y"]), list(points["sd"]), tags)
        )
    if panels:
        name = shown_as(COSINES[0])[0]
        yield Chart(
            f"displacement_{model}",
            f"{name} against how far fine-tuning moves the model",
            f"{model}. Every point is a learning rate, or a size of equal steps; at 1 fine-tuning moves the attention "
            "output as far as ICL does. Error bars: standard deviation over seeds.",
            [Panel(dataset, series, tags={"dataset": dataset}) for dataset, series in panels.items()],
            "length ratio, FT / ICL",
            f"{name} (cosine)",
            scale="log",
            zero=True,
        )
