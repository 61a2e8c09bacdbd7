"""A figure as data: the page's script draws it with hover values and toggles, matplotlib draws it for print."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DIGITS = 5


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
