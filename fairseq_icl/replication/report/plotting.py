"""Charts drawn by matplotlib, for Markdown and LaTeX: told apart without colour, by markers, dashes and hatches."""

from collections.abc import Iterable, Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fairseq_icl.replication.report.charts import Chart, Panel, Series
from fairseq_icl.results.drawing import STYLE, Drawing, legend_below, log_scale, panels, plain_ticks, styles

HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "**")
MOST_TICKS = 7


def drawings(charts: Iterable[Chart]) -> Iterator[Drawing]:
    """Every chart as a figure."""
    for chart in charts:
        with mpl.rc_context(STYLE):
            figure, axes = panels([panel.title for panel in chart.panels])
            for ax, panel in zip(axes, chart.panels, strict=True):
                {"lines": _lines, "bars": _bars, "heat": _heat}[chart.kind](ax, chart, panel, figure)
                ax.set_xlabel(chart.x)
                ax.set_ylabel(chart.y)
            if len({panel.grid.shape for panel in chart.panels if panel.grid is not None}) == 1:
                for ax in axes:  # all heat maps have the same layers: numbered in the first column alone
                    place = ax.get_subplotspec()
                    if place is not None and not place.is_first_col():
                        ax.set_ylabel("")
                        ax.tick_params(labelleft=False)
            legend_below(figure, axes)
        yield Drawing(chart.name, chart.title, chart.caption, figure)


def _lines(ax: Axes, chart: Chart, panel: Panel, figure: Figure) -> None:
    own = dict.fromkeys(series.label for panel in chart.panels for series in panel.series if not series.reference)
    looks = dict(zip(own, styles(), strict=False))  # by label, the same in all panels
    for series in panel.series:
        x, y, spread = _arrays(series)
        if series.reference:  # it looks like what it stands beside
            colour = looks.get(series.like, {"color": "0.5"})["color"]
            ax.fill_between(x, y - spread, y + spread, color=colour, alpha=0.2, linewidth=0, label=series.label)
            ax.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
        else:
            ax.errorbar(x, y, yerr=spread, label=series.label, **looks[series.label])
    if chart.zero:
        ax.axhline(0, color="black", linewidth=0.6)
    if chart.ticks:
        ax.set_xticks(range(len(chart.ticks)), chart.ticks)
    elif chart.scale == "symlog":
        ax.set_xscale("symlog", base=2, linthresh=1)
        plain_ticks(ax.xaxis)
    elif chart.scale == "log":
        log_scale(ax)
    elif all(float(x).is_integer() for series in panel.series if not series.reference for x in series.x):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _bars(ax: Axes, chart: Chart, panel: Panel, figure: Figure) -> None:
    stacks = list(dict.fromkeys(series.stack or series.label for series in panel.series))
    width = 0.8 / max(1, len(stacks))
    tops: dict[str, np.ndarray] = {}
    shades = dict(zip(stacks, np.linspace(0.55, 0.85, len(stacks)), strict=True))
    for number, series in enumerate(panel.series):
        stack = series.stack or series.label
        x, y, spread = _arrays(series)
        bottom = tops.get(stack, np.zeros(len(x)))
        place = x + (stacks.index(stack) - (len(stacks) - 1) / 2) * width
        errors: dict[str, Any] = {"yerr": spread, "capsize": 2} if series.sd is not None else {}
        hatch = HATCHES[number % len(HATCHES)]
        face: dict[str, Any] = {"color": str(shades[stack]), "edgecolor": "black"}
        ax.bar(place, y, 0.9 * width, bottom, label=series.label, hatch=hatch, **face, **errors)
        tops[stack] = bottom + y
    ax.set_xticks(range(len(chart.ticks)), chart.ticks, rotation=45, ha="right")


def _heat(ax: Axes, chart: Chart, panel: Panel, figure: Figure) -> None:
    if panel.grid is None:
        return
    with np.errstate(divide="ignore"):
        shown = np.log10(panel.grid) if panel.logarithmic else panel.grid
    image = ax.imshow(shown, aspect="auto", origin="lower", cmap="cividis", interpolation="nearest")
    for axis, count in ((ax.yaxis, len(shown)), (ax.xaxis, shown.shape[1])):
        axis.set_ticks(range(0, count, max(1, -(-count // (MOST_TICKS - 1)))))
    ax.grid(False)
    # Most of a figure's time goes into the text of ticks: few on the bars, none twice.
    label = f"log10 of the {chart.colour}" if panel.logarithmic else chart.colour
    figure.colorbar(image, ax=ax, label=label, ticks=MaxNLocator(4)).minorticks_off()


def _arrays(series: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = np.asarray(series.x, dtype=float), np.asarray(series.y, dtype=float)
    spread = np.zeros(len(x)) if series.sd is None else np.nan_to_num(np.asarray(series.sd, dtype=float))
    order = np.argsort(x, kind="stable")
    return x[order], y[order], spread[order]
