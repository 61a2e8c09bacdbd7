"""The same demonstrations in many orders: how much the answers of ICL and of fine-tuning depend on the order."""

from collections.abc import Iterator

import pandas as pd

from fairseq_icl.replication.report.charts import Chart, Panel, Series, line_series
from fairseq_icl.replication.report.run import IDENTITY, Run
from fairseq_icl.replication.report.tables import Entry, Table

PERCENT = 100.0
SIDES = {"icl": "ICL", "ft": "FT"}
PER_EXAMPLE = [f"{name}_{side}" for name in ("prediction", "gold_probability") for side in SIDES]
MEANS = {"token_overlap": "token overlap"}
COLUMNS = (
    *(f"{name}: accuracy, SD" for name in SIDES.values()),
    *(f"{name}: changed predictions" for name in SIDES.values()),
    *(f"{name}: probability, SD" for name in SIDES.values()),
    *MEANS.values(),
)


def order_tables(run: Run) -> list[Table]:
    """One table for every model and init of which a run has the same demonstrations in several orders."""
    ordered = ordered_cells(run)
    tables = []
    for (model, init), cells in ordered.groupby(["model", "init"], sort=False):
        rows = []
        for (dataset, method, variant), group in cells.groupby(["dataset", "method", "variant"], sort=False):
            name = f"{dataset}: {method}{variant and f' [{variant}]'}, {group['permutation'].nunique()} orders"
            rows.append((name, _entries(run, group)))
        title = f"Spread over orders of the same demonstrations, {model}, {init}"
        notes = (
            "SDs over orders, mean over seeds: of the accuracy in percent, and of the gold label's probability among "
            "the options (mean over examples). Changed predictions: examples, in percent, whose prediction is not the "
            "same in every order. Token overlap: the share of the ten likeliest tokens of ICL that FT has too.",
        )
        tables.append(Table(f"order_{model}_{init}", title, COLUMNS, tuple(rows), 3, notes=notes))
    return tables


def ordered_cells(run: Run) -> pd.DataFrame:
    """The finished cells that differ from another one in nothing but the permutation."""
    cells = run.planned[run.planned["finished"]].drop_duplicates([*IDENTITY, "seed", "permutation"])
    fine_tuned = run.values.loc[run.values["metric"] == "accuracy_ft", "key"]
    cells = cells[cells["key"].isin(fine_tuned)]
    return cells[cells.groupby([*IDENTITY, "seed"])["permutation"].transform("nunique") > 1]


def _entries(run: Run, group: pd.DataFrame) -> tuple[Entry, ...]:
    """One entry for each of COLUMNS, of the cells of one dataset, method and variant."""
    keys = tuple(group["key"])
    overall = run.values[run.values["key"].isin(keys) & run.values["layer"].isna()]
    accuracies = [overall[overall["metric"] == f"accuracy_{side}"].groupby("seed")["value"].std() for side in SIDES]
    numbers = [float(spread.mean()) * PERCENT for spread in accuracies]
    spreads = [_spreads(run, own) for _, own in group.groupby("seed", sort=False)]
    numbers += [float(value) for value in pd.DataFrame(spreads).mean()]
    numbers += [float(overall[overall["metric"] == metric]["value"].mean()) for metric in MEANS]
    return tuple(Entry(None if pd.isna(number) else number, runs=len(keys), keys=keys) for number in numbers)


def _spreads(run: Run, cells: pd.DataFrame) -> dict[str, float]:
    """Of the cells of one seed: changed predictions in percent, then SDs of the gold probability; ICL, then FT."""
    found_in = [run.cell_folder(cell.model, cell.key).values(PER_EXAMPLE) for cell in cells.itertuples()]

    def over_orders(metric: str) -> pd.DataFrame:
        """(examples, orders)"""
        return pd.concat([values[metric][-1] for values in found_in], axis=1)

    changed = {
        f"changed_{side}": float((over_orders(f"prediction_{side}").nunique(axis=1) > 1).mean()) * PERCENT
        for side in SIDES
    }
    return changed | {
        f"probability_{side}": float(over_orders(f"gold_probability_{side}").std(axis=1).mean()) for side in SIDES
    }


def accuracy_by_order(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy of ICL and FT in every order: a panel a dataset."""
    ordered = ordered_cells(run)
    ordered = ordered[ordered["model"] == model]
    if ordered.empty:
        return
    shown = run.values[run.values["key"].isin(ordered["key"]) & run.values["layer"].isna()]
    panels = [
        Panel(str(dataset), list(_by_order(own, str(dataset))), tags={"dataset": str(dataset)})
        for dataset, own in shown.groupby("dataset", sort=False)
    ]
    caption = f"{model}. The same demonstrations in different orders; error bars: standard deviation over seeds."
    axes = ("order (index of the permutation)", "accuracy (percent)")
    yield Chart(f"order_{model}", "Accuracy in every order of the demonstrations", caption, panels, *axes)


def _by_order(shown: pd.DataFrame, dataset: str) -> Iterator[Series]:
    """ICL once, FT of every method and variant."""
    for side, name in SIDES.items():
        own = shown[shown["metric"] == f"accuracy_{side}"]
        for (init, method, variant), line in own.groupby(["init", "method", "variant"], sort=False):
            words = (name, method if side == "ft" else "", variant if side == "ft" else "", init)
            label = " ".join(word for word in words if word and word != "pretrained")
            values = line.groupby("permutation")["value"].agg(mean="mean", sd="std").reset_index()
            values = values.assign(mean=values["mean"] * PERCENT, sd=values["sd"] * PERCENT)
            tags = {"init": init, "method": method if side == "ft" else "none", "dataset": dataset}
            yield line_series(label, values, "permutation", **tags)
