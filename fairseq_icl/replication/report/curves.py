"""Figures with a setting on the x axis, for runs whose variants change that setting."""

from collections.abc import Callable, Iterator

import pandas as pd
from matplotlib.axes import Axes

from fairseq_icl.replication.report.run import Run
from fairseq_icl.results.drawing import NAMES, SIMILARITIES, Drawing, draw_lines, legend_below, panels

PERCENT = 100.0
UNTRAINED = ("accuracy_icl", "accuracy_zsl")
"""Metrics that no method of fine-tuning has a part in: one line for all methods."""
SWITCHED = {
    "demonstrations": "the prompt's demonstrations",
    "finetuning": "the demonstrations of fine-tuning",
    "both": "the demonstrations of both",
}


def accuracy_by_k(run: Run, model: str) -> Iterator[Drawing]:
    """Accuracy of ICL and ZSL against the number of demonstrations."""
    yield from _curves(
        run.against("num_demonstrations"),
        model,
        "num_demonstrations",
        [("accuracy_icl", "ICL"), ("accuracy_zsl", "ZSL")],
        ("accuracy_by_k", "Accuracy against the number of demonstrations"),
        ("number of demonstrations k", "accuracy (percent)", PERCENT),
        lambda ax: ax.set_xscale("symlog", base=2, linthresh=1),
    )


def learning_rates(run: Run, model: str) -> Iterator[Drawing]:
    """Accuracy after fine-tuning and the similarities against the learning rate, a figure each."""
    points = run.against("lr")
    for metric in ("accuracy_ft", *SIMILARITIES):
        name, unit, scale = _axis(metric)
        yield from _curves(
            points,
            model,
            "lr",
            [(metric, name)],
            (f"learning_rate_{metric}", f"{name} against the learning rate"),
            ("learning rate", f"{name} ({unit})", scale),
            lambda ax: ax.set_xscale("log"),
        )


def switched_labels(run: Run, model: str) -> Iterator[Drawing]:
    """Accuracies and the similarities against the share of false labels, a figure each for where the labels are."""
    points = run.against("switch_labels", "switch_fraction")
    none = points[points["switch_labels"] == "none"].assign(switch_fraction=0.0)
    for where, words in SWITCHED.items():
        chosen = pd.concat([none, points[points["switch_labels"] == where]])
        for metrics in (("accuracy_icl", "accuracy_ft"), *((metric,) for metric in SIMILARITIES)):
            name, unit, scale = _axis(metrics[-1])
            title = "Accuracy" if len(metrics) > 1 else name
            yield from _curves(
                chosen,
                model,
                "switch_fraction",
                [(metric, _axis(metric)[0]) for metric in metrics],
                (f"switched_{where}_{metrics[-1]}", f"{title} against the share of false labels in {words}"),
                ("share of false labels", f"{title} ({unit})", scale),
            )


def _axis(metric: str) -> tuple[str, str, float]:
    """(name, unit, factor) that a metric is shown with."""
    if metric.startswith("accuracy_"):
        return f"{metric.removeprefix('accuracy_').upper()} accuracy", "percent", PERCENT
    return NAMES[metric], "cosine", 1.0


def _curves(
    points: pd.DataFrame,
    model: str,
    setting: str,
    metrics: list[tuple[str, str]],
    names: tuple[str, str],
    axis: tuple[str, str, float],
    scale_x: Callable[[Axes], None] = lambda ax: None,
) -> Iterator[Drawing]:
    """Metrics against a setting: a panel a dataset, a line a metric, init and method; nothing if it never varies."""
    points = points[(points["model"] == model) & points["metric"].isin([metric for metric, _ in metrics])]
    if points.empty or points.groupby(["dataset", "init", "method"])[setting].nunique().max() < 2:
        return
    datasets = list(points["dataset"].drop_duplicates())
    figure, axes = panels(datasets)
    for ax, dataset in zip(axes, datasets, strict=True):
        lines = {}
        for metric, label in metrics:
            own = points[(points["dataset"] == dataset) & (points["metric"] == metric)]
            if metric in UNTRAINED:
                own = own.assign(method="none").drop_duplicates(["init", setting])
            for (init, method), line in own.groupby(["init", "method"], sort=False):
                values = line.assign(mean=line["mean"] * axis[2], sd=line["sd"] * axis[2])
                lines[", ".join(part for part in (label, method, init) if part != "none")] = values
        draw_lines(ax, lines, setting)
        scale_x(ax)
        ax.set_xlabel(axis[0])
        ax.set_ylabel(axis[1])
    legend_below(figure, axes)
    caption = f"{model}. Error bars: standard deviation over seeds."
    yield Drawing(f"{names[0]}_{model}", names[1], caption, figure)
