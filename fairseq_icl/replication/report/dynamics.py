"""Figures of dynamics: ICL with j demonstrations beside fine-tuning after j of them."""

from collections.abc import Iterator

import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.charts import Chart, Panel, Series, line_series
from fairseq_icl.replication.report.run import IDENTITY, Run

ACCURACIES = {"accuracy_zsl": "ZSL", "accuracy_icl": "ICL", "accuracy_ft": "FT"}
SHOWN = ("rpa", "sim_aou", "sim_am_delta")
OF_METHOD = "accuracy_ft"
"""The one accuracy that a method of fine-tuning has a part in."""


def dynamics(run: Run, model: str) -> Iterator[Chart]:
    """Accuracies, RPA and similarities against the number of demonstrations: a panel a dataset, a figure each."""
    curves = over_seeds(run)
    curves = curves[(curves["model"] == model) & (curves["variant"] == "")]
    if curves.empty:
        return
    yield _figure(curves, model, list(ACCURACIES), "accuracy", "Accuracy", *shown_as(OF_METHOD)[1:])
    for metric in SHOWN:
        if metric in set(curves["metric"]):
            yield _figure(curves, model, [metric], metric, *shown_as(metric))


def over_seeds(run: Run) -> pd.DataFrame:
    """IDENTITY, metric, demonstrations, and over the seeds mean, sd and number of runs."""
    cells = run.planned[run.planned["key"].isin(run.curves)]
    parts = [run.curves[cell["key"]].assign(**{name: cell[name] for name in IDENTITY}) for _, cell in cells.iterrows()]
    if not parts:
        return pd.DataFrame(columns=[*IDENTITY, "metric", "demonstrations", "mean", "sd", "runs"])
    groups = pd.concat(parts).groupby([*IDENTITY, "metric", "demonstrations"], sort=False)
    return groups.agg(mean=("value", "mean"), sd=("value", "std"), runs=("value", "size")).reset_index()


def _figure(
    curves: pd.DataFrame, model: str, metrics: list[str], short: str, name: str, unit: str, scale: float
) -> Chart:
    chosen = curves[curves["metric"].isin(metrics)]
    chosen = chosen.assign(mean=chosen["mean"] * scale, sd=chosen["sd"] * scale)
    panels = [
        Panel(str(dataset), list(_lines(own, metrics, str(dataset))), tags={"dataset": str(dataset)})
        for dataset, own in chosen.groupby("dataset", sort=False)
    ]
    caption = (
        f"{model}. ICL with the first j demonstrations in the prompt, and the model fine-tuned on them one by one, "
        "after j steps. On the first curve_examples validation examples; error bars: standard deviation over seeds."
    )
    title = f"Dynamics: {name} after each demonstration"
    return Chart(f"dynamics_{short}_{model}", title, caption, panels, "demonstrations j", f"{name} ({unit})")


def _lines(chosen: pd.DataFrame, metrics: list[str], dataset: str) -> Iterator[Series]:
    for metric in metrics:
        label = ACCURACIES.get(metric, "")
        for (init, method), line in chosen[chosen["metric"] == metric].groupby(["init", "method"], sort=False):
            trained = metric not in ACCURACIES or metric == OF_METHOD
            words = (label, method if trained else "", "" if init == "pretrained" else init)
            tags = {"method": method if trained else "none", "init": init, "dataset": dataset}
            yield line_series(" ".join(filter(None, words)), line, "demonstrations", **tags)
