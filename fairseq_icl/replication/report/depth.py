"""Figures of short circuits: how well the model answers when it is cut after a layer."""

from collections.abc import Iterator

import pandas as pd

from fairseq_icl.replication.report.charts import Chart, Panel, line_series
from fairseq_icl.replication.report.run import Run

PERCENT = 100.0
SEEN = {"ZSL": "accuracy_by_depth_zsl", "ICL": "accuracy_by_depth_icl", "FT": "accuracy_by_depth_ft"}
METHOD = "short_circuit"
AXES = ("cut after layer", "accuracy (percent)")


def accuracy_by_depth(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy against the layer after which the model is cut, ZSL, ICL and FT: a figure an init, a panel a dataset."""
    chosen = run.layers[(run.layers["model"] == model) & (run.layers["variant"] == "")]
    chosen = _in_percent(chosen[chosen["metric"].isin(SEEN.values())])
    for init, group in chosen.groupby("init", sort=False):
        panels = []
        for dataset, own in group.groupby("dataset", sort=False):
            series = [
                line_series(label, line, "layer", method=method, init=str(init), dataset=str(dataset))
                for label, method, line in _settings(own)
            ]
            panels.append(Panel(str(dataset), series, tags={"dataset": str(dataset)}))
        caption = (
            f"{model}, {init}. The residual stream after each layer is read through the final norm and the output "
            "embedding; the last layer is the model itself. Error bars: standard deviation over seeds. Layers from 0."
        )
        yield Chart(f"accuracy_by_depth_{model}_{init}", f"Accuracy by depth ({init})", caption, panels, *AXES)


def short_circuits(run: Run, model: str) -> Iterator[Chart]:
    """Models fine-tuned while cut after a layer, scored cut and whole, against that layer: a panel a dataset."""
    values = run.values[(run.values["model"] == model) & (run.values["method"] == METHOD)]
    cuts = values["key"].map(lambda key: run.configurations[key]["cell"]["settings"].get("layers"))
    points = values.assign(layer=values["layer"].astype(float), cut=pd.to_numeric(cuts, errors="coerce"))
    points = points[points["cut"].notna()]
    if points["cut"].nunique() < 2:
        return
    panels = []
    for dataset, own in points.groupby("dataset", sort=False):
        at_cut = own[own["layer"] == own["cut"]]
        lines = {f"{name}, cut": at_cut[at_cut["metric"] == metric] for name, metric in SEEN.items()}
        lines["FT, whole"] = own[own["layer"].isna() & (own["metric"] == "accuracy_ft")]
        series = [line_series(name, _over_seeds(line), "layer", dataset=str(dataset)) for name, line in lines.items()]
        panels.append(Panel(str(dataset), series, tags={"dataset": str(dataset)}))
    caption = (
        f"{model}. At each layer: the model fine-tuned while it was cut there, scored cut there and whole, beside ZSL "
        "and ICL of the unchanged model cut there. Error bars: standard deviation over seeds. Layers from 0."
    )
    yield Chart(f"short_circuits_{model}", "Fine-tuning of short-circuited models", caption, panels, *AXES)


def _settings(lines: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(label, method, line) of ZSL and ICL, in which no method has a part, and of FT by each method."""
    for name, metric in SEEN.items():
        for method, line in lines[lines["metric"] == metric].groupby("method", sort=False):
            if name == "FT":
                yield f"FT {method}", str(method), line
            else:
                yield name, "none", line
                break


def _in_percent(lines: pd.DataFrame) -> pd.DataFrame:
    """Shares in percent."""
    return lines.assign(mean=lines["mean"] * PERCENT, sd=lines["sd"] * PERCENT)


def _over_seeds(points: pd.DataFrame) -> pd.DataFrame:
    """layer (that of the cut), mean and sd of points of several seeds."""
    groups = points.groupby("cut")["value"].agg(mean="mean", sd="std").reset_index()
    return _in_percent(groups.rename(columns={"cut": "layer"}))
