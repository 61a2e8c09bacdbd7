"""A figure as data: the page's script draws it with hover values and toggles, matplotlib draws it for print."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

DIGITS = 5
UNTRAINED = ("accuracy_icl", "accuracy_zsl")
"""Metrics that no method of fine-tuning has a part in: one line for all methods."""


@dataclass(frozen=True)
class Series:
    """One line, group of bars, or band of a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    sd: Sequence[float] | None = None
    """Error bars, or half the width of a band; NaN where there is none."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """What the toggles know it by: method, init, dataset."""
    reference: bool = False
    """Whether it is somebody else's: lines become a band, and it has the look of the series `like`."""
    like: str = ""
    stack: str = ""
    """Bars of the same stack stand on each other."""


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    title: str
    series: Sequence[Series] = ()
    grid: np.ndarray | None = None
    """Of a heat map, (rows, columns)."""
    logarithmic: bool = False
    """Whether the heat map's colours go by the logarithm."""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """A figure with the words around it."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    x: str
    y: str
    kind: str = "lines"
    """lines, bars or heat."""
    scale: str = "linear"
    """Of the horizontal axis: linear, log, or symlog (base 2)."""
    ticks: Sequence[str] = ()
    """Names of the places 0, 1, 2 ... of the horizontal axis, where it has names."""
    zero: bool = False
    """Whether the line y = 0 means something."""
    colour: str = ""
    """What the colours of a heat map are."""

    def data(self) -> dict[str, Any]:
        """The chart for the page's script."""
        names = ("name", "title", "caption", "x", "y", "kind", "scale", "zero", "colour")
        return {name: getattr(self, name) for name in names} | {
            "ticks": list(self.ticks),
            "panels": [_panel(panel) for panel in self.panels],
        }


def _panel(panel: Panel) -> dict[str, Any]:
    said: dict[str, Any] = {"title": panel.title, "tags": dict(panel.tags)}
    if panel.grid is not None:
        return said | {"grid": [rounded(row) for row in panel.grid], "log": panel.logarithmic}
    return said | {"series": [_series(series) for series in panel.series]}


def _series(series: Series) -> dict[str, Any]:
    said: dict[str, Any] = {"label": series.label, "x": rounded(series.x), "y": rounded(series.y)}
    said["tags"] = dict(series.tags)
    if series.sd is not None:
        said["sd"] = rounded(series.sd)
    if series.reference:
        said |= {"reference": True, "like": series.like}
    return said | ({"stack": series.stack} if series.stack else {})


def rounded(values: Sequence[float]) -> list[float | None]:
    """Numbers short enough for a page; what is not finite is missing."""
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in map(float, values)]


def line_series(label: str, line: pd.DataFrame, x: str, **tags: str) -> Series:
    """A line of the columns x, mean, sd; a method `none` is no method to toggle."""
    line = line.sort_values(x)
    known = {name: str(value) for name, value in tags.items() if value != "none"}
    spread = line["sd"].astype(float).to_numpy()
    return Series(label, list(line[x].astype(float)), list(line["mean"].astype(float)), list(spread), known)


def curves(
    points: pd.DataFrame,
    model: str,
    setting: str,
    metrics: list[tuple[str, str]],
    names: tuple[str, str],
    axis: tuple[str, str, float],
    scale: str = "linear",
) -> Iterator[Chart]:
    """Metrics against a setting: a panel a dataset, a line a metric, init and method; nothing if it never varies."""
    points = points[(points["model"] == model) & points["metric"].isin([metric for metric, _ in metrics])]
    if points.empty or points.groupby(["dataset", "init", "method"])[setting].nunique().max() < 2:
        return
    panels = []
    for dataset, of_dataset in points.groupby("dataset", sort=False):
        series = []
        for metric, label in metrics:
            own = of_dataset[of_dataset["metric"] == metric]
            if metric in UNTRAINED:
                own = own.assign(method="none").drop_duplicates(["init", setting])
            for (init, method), line in own.groupby(["init", "method"], sort=False):
                values = line.assign(mean=line["mean"] * axis[2], sd=line["sd"] * axis[2])
                name = ", ".join(part for part in (label, method, init) if part != "none")
                series.append(line_series(name, values, setting, init=init, method=method, dataset=dataset))
        panels.append(Panel(dataset, series, tags={"dataset": dataset}))
    caption = f"{model}. Error bars: standard deviation over seeds."
    yield Chart(f"{names[0]}_{model}", names[1], caption, panels, axis[0], axis[1], scale=scale)
