"""Figures of short circuits: how well the model answers when it is cut after a layer."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fairseq_icl.replication.report.run import Run
from fairseq_icl.results.drawing import Drawing, draw_lines, legend_below, panels

PERCENT = 100.0
SEEN = {"ZSL": "accuracy_by_depth_zsl", "ICL": "accuracy_by_depth_icl", "FT": "accuracy_by_depth_ft"}
METHOD = "short_circuit"


def accuracy_by_depth(run: Run, model: str) -> Iterator[Drawing]:
    """Accuracy against the layer after which the model is cut, ZSL, ICL and FT: a figure an init, a panel a dataset."""
    chosen = run.layers[(run.layers["model"] == model) & (run.layers["variant"] == "")]
    chosen = _in_percent(chosen[chosen["metric"].isin(SEEN.values())])
    for init, group in chosen.groupby("init", sort=False):
        datasets = list(group["dataset"].drop_duplicates())
        figure, axes = panels(datasets)
        for ax, dataset in zip(axes, datasets, strict=True):
            draw_lines(ax, dict(_settings(group[group["dataset"] == dataset])), "layer")
            _name_axes(ax)
        legend_below(figure, axes)
        caption = (
            f"{model}, {init}. The residual stream after each layer is read through the final norm and the output "
            "embedding; the last layer is the model itself. Error bars: standard deviation over seeds. Layers from 1."
        )
        yield Drawing(f"accuracy_by_depth_{model}_{init}", f"Accuracy by depth ({init})", caption, figure)


def short_circuits(run: Run, model: str) -> Iterator[Drawing]:
    """Models fine-tuned while cut after a layer, scored cut and whole, against that layer: a panel a dataset."""
    values = run.values[(run.values["model"] == model) & (run.values["method"] == METHOD)]
    cuts = values["key"].map(lambda key: run.configurations[key]["cell"]["settings"].get("layers"))
    points = values.assign(layer=values["layer"].astype(float), cut=pd.to_numeric(cuts, errors="coerce"))
    points = points[points["cut"].notna()]
    if points["cut"].nunique() < 2:
        return
    datasets = list(points["dataset"].drop_duplicates())
    figure, axes = panels(datasets)
    for ax, dataset in zip(axes, datasets, strict=True):
        own = points[points["dataset"] == dataset]
        at_cut = own[own["layer"] == own["cut"]]
        lines = {f"{name}, cut": at_cut[at_cut["metric"] == metric] for name, metric in SEEN.items()}
        lines["FT, whole"] = own[own["layer"].isna() & (own["metric"] == "accuracy_ft")]
        draw_lines(ax, {name: _over_seeds(line) for name, line in lines.items()}, "layer")
        _name_axes(ax)
    legend_below(figure, axes)
    caption = (
        f"{model}. At each layer: the model fine-tuned while it was cut there, scored cut there and whole, beside ZSL "
        "and ICL of the unchanged model cut there. Error bars: standard deviation over seeds. Layers from 1."
    )
    yield Drawing(f"short_circuits_{model}", "Fine-tuning of short-circuited models", caption, figure)


def _settings(lines: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(label, line) of ZSL and ICL, which no method of fine-tuning has a part in, and of FT by each method."""
    for name, metric in SEEN.items():
        for method, line in lines[lines["metric"] == metric].groupby("method", sort=False):
            if name == "FT":
                yield f"FT {method}", line
            else:
                yield name, line
                break


def _in_percent(lines: pd.DataFrame) -> pd.DataFrame:
    """Layers from 1, shares in percent."""
    return lines.assign(layer=lines["layer"] + 1, mean=lines["mean"] * PERCENT, sd=lines["sd"] * PERCENT)


def _over_seeds(points: pd.DataFrame) -> pd.DataFrame:
    """layer (that of the cut), mean and sd of points of several seeds."""
    groups = points.groupby("cut")["value"].agg(mean="mean", sd="std").reset_index()
    return _in_percent(groups.rename(columns={"cut": "layer"}))


def _name_axes(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("cut after layer")
    ax.set_ylabel("accuracy (percent)")
