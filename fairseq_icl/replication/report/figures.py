"""The figures: each says what it shows without colour (markers, line styles, hatches) and names its units."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_icl.replication.report.run import Run

STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "fairseq-icl",  # the same figure has the same bytes
    "figure.constrained_layout.use": True,
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
# Dark to light, told apart by any eye and in print.
COLOURS = ("#1b3a57", "#b5502a", "#4f7942", "#7b5ea7", "#8c6d1f", "#5a5a5a", "#2a8c8c", "#a03060")
PANEL = (3.0, 2.5)
PER_ROW = 3
LEGEND_ENTRY = 2.5
"""Inches that an entry of the legend takes."""
SIMILARITIES = ("sim_aou", "sim_aou_norm", "sim_am_after", "sim_am_delta")
NAMES = {
    "sim_aou": "SimAOU",
    "sim_aou_norm": "SimAOU_norm",
    "sim_am_after": "SimAM",
    "sim_am_delta": "SimAM_delta",
    "alpha": "alpha",
}


@dataclass(frozen=True)
class Drawing:
    """A figure with the words around it."""

    name: str
    title: str
    caption: str
    figure: Figure

    def save(self, target: Any, **options: Any) -> None:
        """Write the figure to a path or file; the same numbers give the same bytes."""
        with mpl.rc_context(STYLE):
            self.figure.savefig(target, **options)


def all_figures(run: Run) -> Iterator[Drawing]:
    """Every figure that the run has numbers for."""
    with mpl.rc_context(STYLE):
        for model in run.planned["model"].drop_duplicates():
            for draw in (_similarities, _alpha, _partition, _gradient_norms, _accuracy_by_k, _learning_rates):
                yield from draw(run, model)


def panels(names: list[str]) -> tuple[Figure, list[Axes]]:
    """A figure with one titled panel a name."""
    columns = min(PER_ROW, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(PANEL[0] * columns + 0.6, PANEL[1] * rows + 0.5))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, name in zip(axes, names, strict=False):
        ax.set_title(name)
    for ax in axes[len(names) :]:
        ax.remove()
    return figure, axes[: len(names)]


def styles() -> Iterator[dict[str, Any]]:
    """Line styles, no two alike in marker."""
    for marker, line, colour in zip(cycle(MARKERS), cycle(LINES), cycle(COLOURS), strict=False):
        yield {"marker": marker, "linestyle": line, "color": colour, "markersize": 4, "capsize": 2, "linewidth": 1.2}


def draw_lines(ax: Axes, lines: dict[str, pd.DataFrame], x: str) -> None:
    """One line with error bars (SD over seeds) for each label; `lines` have columns x, mean, sd."""
    for (label, line), style in zip(lines.items(), styles(), strict=False):
        line = line.sort_values(x)
        spread = line["sd"].astype(float).fillna(0.0)
        ax.errorbar(line[x].astype(float), line["mean"], yerr=spread, label=label, **style)


def legend_below(figure: Figure, axes: list[Axes]) -> None:
    """One legend for all panels, under them."""
    entries = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if entries:
        columns = max(1, int(figure.get_figwidth() / LEGEND_ENTRY))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(columns, len(entries)))


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


def _accuracy_by_k(run: Run, model: str) -> Iterator[Drawing]:
    yield from _against_setting(
        run,
        model,
        "num_demonstrations",
        [("accuracy_icl", "ICL"), ("accuracy_zsl", "ZSL")],
        ("accuracy_by_k", "Accuracy against the number of demonstrations"),
        ("number of demonstrations k", "accuracy (percent)", 100.0),
        lambda ax: ax.set_xscale("symlog", base=2, linthresh=1),
    )


def _learning_rates(run: Run, model: str) -> Iterator[Drawing]:
    for metric in ("accuracy_ft", *SIMILARITIES):
        is_share = metric.startswith("accuracy")
        name = "FT accuracy" if is_share else NAMES[metric]
        yield from _against_setting(
            run,
            model,
            "learning_rate",
            [(metric, name)],
            (f"learning_rate_{metric}", f"{name} against the learning rate"),
            ("learning rate", f"{name} ({'percent' if is_share else 'cosine'})", 100.0 if is_share else 1.0),
            lambda ax: ax.set_xscale("log"),
        )


def _against_setting(
    run: Run,
    model: str,
    setting: str,
    metrics: list[tuple[str, str]],
    names: tuple[str, str],
    axis: tuple[str, str, float],
    scale_x: Callable[[Axes], None],
) -> Iterator[Drawing]:
    """Metrics against a setting that variants change and nothing else does."""
    points = run.against(setting)
    points = points[(points["model"] == model) & points["metric"].isin([metric for metric, _ in metrics])]
    if points.empty or points.groupby(["dataset", "init", "method"])[setting].nunique().max() < 2:
        return
    datasets = list(points["dataset"].drop_duplicates())
    figure, axes = panels(datasets)
    for ax, dataset in zip(axes, datasets, strict=True):
        lines = {}
        for metric, label in metrics:
            own = points[(points["dataset"] == dataset) & (points["metric"] == metric)]
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
