"""Figures of dynamics: ICL with j demonstrations beside fine-tuning after j of them."""

from collections.abc import Iterator

import pandas as pd

from fairseq_icl.replication.report.run import IDENTITY, Run
from fairseq_icl.results.drawing import NAMES, Drawing, draw_lines, legend_below, panels

PERCENT = 100.0
ACCURACIES = {"accuracy_zsl": "ZSL", "accuracy_icl": "ICL", "accuracy_ft": "FT"}
SHOWN = {"rpa": ("RPA", "percent", PERCENT)} | {
    metric: (NAMES[metric], "cosine", 1.0) for metric in ("sim_aou", "sim_am_delta")
}
OF_METHOD = "accuracy_ft"
"""The one accuracy that a method of fine-tuning has a part in."""


def dynamics(run: Run, model: str) -> Iterator[Drawing]:
    """Accuracies, RPA and similarities against the number of demonstrations: a panel a dataset, a figure each."""
    curves = over_seeds(run)
    curves = curves[(curves["model"] == model) & (curves["variant"] == "")]
    if curves.empty:
        return
    yield _figure(curves, model, list(ACCURACIES), "accuracy", "Accuracy", "percent", PERCENT)
    for metric, (name, unit, scale) in SHOWN.items():
        if metric in set(curves["metric"]):
            yield _figure(curves, model, [metric], metric, name, unit, scale)


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
) -> Drawing:
    chosen = curves[curves["metric"].isin(metrics)]
    chosen = chosen.assign(mean=chosen["mean"] * scale, sd=chosen["sd"] * scale)
    datasets = list(chosen["dataset"].drop_duplicates())
    figure, axes = panels(datasets)
    for ax, dataset in zip(axes, datasets, strict=True):
        draw_lines(ax, dict(_lines(chosen[chosen["dataset"] == dataset], metrics)), "demonstrations")
        ax.set_xlabel("demonstrations j")
        ax.set_ylabel(f"{name} ({unit})")
    legend_below(figure, axes)
    caption = (
        f"{model}. ICL with the first j demonstrations in the prompt, and the model fine-tuned on them one by one, "
        "after j steps. On the first curve_examples validation examples; error bars: standard deviation over seeds."
    )
    return Drawing(f"dynamics_{short}_{model}", f"Dynamics: {name} after each demonstration", caption, figure)


def _lines(chosen: pd.DataFrame, metrics: list[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    for metric in metrics:
        label = ACCURACIES.get(metric, "")
        for (init, method), line in chosen[chosen["metric"] == metric].groupby(["init", "method"], sort=False):
            trained = metric not in ACCURACIES or metric == OF_METHOD
            words = (label, method if trained else "", "" if init == "pretrained" else init)
            yield " ".join(filter(None, words)), line
