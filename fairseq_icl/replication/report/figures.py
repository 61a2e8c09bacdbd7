"""The figures: each says what it shows without colour (markers, line styles, hatches) and names its units."""

from collections.abc import Callable, Iterator

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fairseq_icl.replication.report.run import Run
from fairseq_icl.results.drawing import (
    NAMES,
    SIMILARITIES,
    STYLE,
    Drawing,
    draw_lines,
    legend_below,
    log_scale,
    panels,
    plain_ticks,
)

PERCENT = 100.0
UNTRAINED = ("accuracy_icl", "accuracy_zsl")
"""Metrics that no method of fine-tuning has a part in: one line for all methods."""
SWITCHED = {
    "demonstrations": "the prompt's demonstrations",
    "finetuning": "the demonstrations of fine-tuning",
    "both": "the demonstrations of both",
}


def all_figures(run: Run) -> Iterator[Drawing]:
    """Every figure that the run has numbers for."""
    with mpl.rc_context(STYLE):
        for model in run.planned["model"].drop_duplicates():
            for draw in FIGURES:
                yield from draw(run, model)


def _by_layer(run: Run, model: str, metric: str, name: str, title: str) -> Iterator[Drawing]:
    """A metric against the layer: a panel a dataset, a line an init and method of the plain run."""
    chosen = run.layers[
        (run.layers["model"] == model) & (run.layers["metric"] == metric) & (run.layers["variant"] == "")
    ]
    if chosen.empty:
        return
    datasets = list(chosen["dataset"].drop_duplicates())
    figure, axes = panels(datasets)
    for ax, dataset in zip(axes, datasets, strict=True):
        group = chosen[chosen["dataset"] == dataset].groupby(["init", "method"], sort=False)
        lines = {f"{method}, {init}": line.assign(layer=line["layer"] + 1) for (init, method), line in group}
        draw_lines(ax, lines, "layer")
        ax.axhline(0, color="black", linewidth=0.6)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("layer")
        ax.set_ylabel(f"{NAMES.get(metric, metric)} (cosine)")
    legend_below(figure, axes)
    caption = f"{model}. Mean over validation examples; error bars: standard deviation over seeds. Layers from 1."
    yield Drawing(f"{name}_{model}", title, caption, figure)


def _similarities(run: Run, model: str) -> Iterator[Drawing]:
    for metric in SIMILARITIES:
        yield from _by_layer(run, model, metric, f"layers_{metric}", f"{NAMES[metric]} to ICL by layer")


def _alpha(run: Run, model: str) -> Iterator[Drawing]:
    yield from _by_layer(run, model, "alpha", "alpha", "alpha by layer: how alike the two ways of fine-tuning are")


PARTS = {
    "both": ("changed_both_{}", "///"),
    "ICL only": ("changed_only_icl_{}", "..."),
    "FT only": ("changed_only_ft_{}", "xxx"),
}


def _partition(run: Run, model: str) -> Iterator[Drawing]:
    """Stacked bars: who changes predictions, split into changes that end right and that end wrong."""
    plain = run.summary[(run.summary["model"] == model) & (run.summary["variant"] == "")]
    counts = plain.pivot_table(index=["init", "method", "dataset"], columns="metric", values="mean", sort=False)
    if "accuracy_ft" not in counts:
        return
    counts = counts[counts["accuracy_ft"].notna()].fillna(0.0)
    groups = list(counts.groupby(level=["init", "method"], sort=False))
    figure, axes = panels([f"{method}, {init}" for (init, method), _ in groups])
    for ax, (_, group) in zip(axes, groups, strict=True):
        places = np.arange(len(group))
        for shift, outcome, shade in ((-0.2, "correct", 0.55), (0.2, "incorrect", 0.85)):
            bottom = np.zeros(len(group))
            for label, (metric, hatch) in PARTS.items():
                share = 100 * (group[metric.format(outcome)] / group["examples"]).to_numpy()
                face = str(shade)
                name = f"{label}, new prediction {'right' if outcome == 'correct' else 'wrong'}"
                ax.bar(places + shift, share, 0.38, bottom, label=name, hatch=hatch, color=face, edgecolor="black")
                bottom += share
        ax.set_xticks(places, group.index.get_level_values("dataset"), rotation=45, ha="right")
        ax.set_ylabel("examples (percent)")
        ax.set_ylim(bottom=0)
    legend_below(figure, axes)
    caption = (
        f"{model}. Share of the validation examples whose prediction differs from the zero-shot one under ICL, under "
        "fine-tuning (FT), or under both. Left bar (dark): the new prediction is right; right bar (light): it is wrong."
    )
    yield Drawing(f"partition_{model}", "Prediction changes by ICL and by fine-tuning", caption, figure)


def _gradient_norms(run: Run, model: str) -> Iterator[Drawing]:
    """Heatmaps layer x step, a panel a dataset, a figure an init and method; the first seed."""
    known = run.planned[(run.planned["model"] == model) & (run.planned["variant"] == "")]
    known = known[known["key"].isin(run.gradients)].drop_duplicates(["init", "method", "dataset"])
    for (init, method), group in known.groupby(["init", "method"], sort=False):
        figure, axes = panels(list(group["dataset"]))
        for ax, key in zip(axes, group["key"], strict=True):
            grid = run.gradients[key].T  # (layers, steps)
            with np.errstate(divide="ignore"):
                image = ax.imshow(np.log10(grid), aspect="auto", origin="lower", cmap="gray", interpolation="nearest")
            ax.set_yticks(*_ticks(len(grid)))
            ax.set_xticks(*_ticks(grid.shape[1]))
            ax.set_xlabel("demonstration (training step)")
            ax.set_ylabel("layer")
            ax.grid(False)
            figure.colorbar(image, ax=ax, label="log10 of the gradient's l2 norm")
        caption = (
            f"{model}, {init}, first seed. Gradient of keys and values of each layer at each step; brighter: larger."
        )
        yield Drawing(f"gradients_{model}_{init}_{method}", f"Gradient norms of {method} ({init})", caption, figure)


def _ticks(count: int) -> tuple[list[int], list[str]]:
    """At most seven ticks, counted from 1."""
    step = max(1, -(-count // 6))
    places = list(range(0, count, step))
    return places, [str(place + 1) for place in places]


def accuracy_by_k(run: Run, model: str) -> Iterator[Drawing]:
    """Accuracy of ICL and ZSL against the number of demonstrations."""
    yield from curves(
        run.against("num_demonstrations"),
        model,
        "num_demonstrations",
        [("accuracy_icl", "ICL"), ("accuracy_zsl", "ZSL")],
        ("accuracy_by_k", "Accuracy against the number of demonstrations"),
        ("number of demonstrations k", "accuracy (percent)", PERCENT),
        _doubling,
    )


def _doubling(ax: Axes) -> None:
    ax.set_xscale("symlog", base=2, linthresh=1)
    plain_ticks(ax.xaxis)


def learning_rates(run: Run, model: str) -> Iterator[Drawing]:
    """Accuracy after fine-tuning and the similarities against the learning rate, a figure each."""
    points = run.against("lr")
    for metric in ("accuracy_ft", *SIMILARITIES):
        name, unit, scale = _axis(metric)
        yield from curves(
            points,
            model,
            "lr",
            [(metric, name)],
            (f"learning_rate_{metric}", f"{name} against the learning rate"),
            ("learning rate", f"{name} ({unit})", scale),
            log_scale,
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
            yield from curves(
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


def curves(
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


FIGURES = (_similarities, _alpha, _partition, _gradient_norms, accuracy_by_k, learning_rates, switched_labels)
