"""What all figures share: panels, lines that differ without colour (markers, dashes), and one legend below."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.metrics import shown_as
from fairseq_icl.settings import nearest

STYLE: dict[Any, Any] = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "figure.constrained_layout.use": True}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.use_mathtext": False}
STYLE["svg.hashsalt"] = "fairseq-icl"  # the same figure has the same bytes
STYLE["text.parse_math"] = False  # names are names: $ is a letter in them
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
# Dark to light, told apart by any eye and in print.
COLOURS = ("#1b3a57", "#b5502a", "#4f7942", "#7b5ea7", "#8c6d1f", "#5a5a5a", "#2a8c8c", "#a03060")
PANEL = (3.0, 2.5)
PER_ROW = 3
LEGEND_ENTRY = 2.5  # inches


@dataclass(frozen=True)
class Drawing:
    """A figure with the words around it."""

    name: str
    title: str
    caption: str
    figure: Figure

    def save(self, target: Any, **options: Any) -> None:
        """Write the figure to a path or file; the same numbers give the same bytes."""
        figure = self.figure
        with mpl.rc_context(STYLE):
            figure.set_dpi(options.get("dpi", figure.get_dpi()))
            if layout := figure.get_layout_engine():  # savefig would draw everything twice to lay it out
                layout.execute(figure)
                figure.set_layout_engine("none")
            figure.savefig(target, **options)


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


def log_scale(ax: Axes) -> None:
    """Make x logarithmic, with plain numbers at its ticks: matplotlib's own are formulas, which STYLE shows raw."""
    ax.set_xscale("log")
    low, high = ax.xaxis.get_view_interval()
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    plain_ticks(ax.xaxis)


def plain_ticks(axis: Axis) -> None:
    """Plain numbers at the ticks of an axis, whatever its scale."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: list[Axes]) -> None:
    """One legend for all panels, under them."""
    entries = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if entries:
        columns = max(1, int(figure.get_figwidth() / LEGEND_ENTRY))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(columns, len(entries)))


class ShownFigure(Figure):
    """A figure that a notebook shows by itself, without pyplot and its global state."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=110)
        return picture.getvalue()


def layers_figure(table: pd.DataFrame, metric: str, path: str | Path | None = None) -> Figure:
    """`metric` by layer, one line per dataset, method, init and seed, with the 95 % interval over examples.

    The legend names those of the four that differ.
    """
    chosen = table[(table["metric"] == metric) & table["layer"].notna() & table["example"].isna()]
    if chosen.empty:
        known = table.loc[table["layer"].notna() & table["example"].isna(), "metric"].drop_duplicates()
        raise UserError(f"{metric}: no values by layer in this table; {nearest(metric, known)}")
    with mpl.rc_context(STYLE):
        figure = ShownFigure(figsize=(6.4, 3.6))
        FigureCanvasAgg(figure)
        ax = figure.subplots()
        kinds = ["dataset", "method", "init", "seed"]
        told_apart = [kind for kind in kinds if chosen[kind].nunique() > 1] or ["method"]
        for (_, line), style in zip(chosen.groupby(kinds, sort=False), styles(), strict=False):
            names = [f"seed {line[kind].iloc[0]}" if kind == "seed" else line[kind].iloc[0] for kind in told_apart]
            line = line.sort_values("layer")
            value = line["value"].to_numpy(float)
            reach = [value - line["low"].to_numpy(float), line["high"].to_numpy(float) - value]
            ax.errorbar(line["layer"].astype(int), value, yerr=np.abs(reach), label=", ".join(map(str, names)), **style)
        ax.axhline(0, color="black", linewidth=0.6)
        ax.set(xlabel="layer", ylabel=shown_as(metric)[0])
        ax.set_title("" if "dataset" in told_apart else str(chosen["dataset"].iloc[0]))
        legend_below(figure, [ax])
        if path is not None:
            kind = Path(path).suffix.removeprefix(".") or "png"
            write_atomically(path, lambda unfinished: figure.savefig(unfinished, format=kind))
    return figure
