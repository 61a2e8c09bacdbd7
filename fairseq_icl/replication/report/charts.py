"""A figure as data: the page's script draws it with hover values and toggles, matplotlib draws it for print."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

DIGITS = 5
UNSAID = ("", "none", "pretrained")
"""Words that a line's label does without."""


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
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    """What JSON knows: numbers short enough for a page, those that are not finite missing."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(part) for part in value]
    if isinstance(value, float | np.floating | np.integer):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def lines(points: pd.DataFrame, x: str, scale: float = 1.0, **tags: str) -> list[Series]:
    """A line for every label ("method, init" if there is none), init and method of points with mean and sd.

    A method `none` is no method to toggle.
    """
    if "label" not in points:
        points = points.assign(label=[f"{method}, {init}" for method, init in points[["method", "init"]].to_numpy()])
    found = []
    for (label, init, method), line in points.groupby(["label", "init", "method"], sort=False):
        known = {"init": str(init), "method": str(method), **tags}
        columns = line.sort_values(x)[[x, "mean", "sd"]].astype(float) * [1.0, scale, scale]
        tagged = {name: value for name, value in known.items() if value != "none"}
        found.append(Series(str(label), list(columns[x]), list(columns["mean"]), list(columns["sd"]), tagged))
    return found


def by_dataset(points: pd.DataFrame, x: str, scale: float = 1.0) -> list[Panel]:
    """A panel for every dataset, with its lines."""
    return [
        Panel(str(dataset), lines(own, x, scale, dataset=str(dataset)), tags={"dataset": str(dataset)})
        for dataset, own in points.groupby("dataset", sort=False)
    ]


def labelled(points: pd.DataFrame, metrics: Mapping[str, str], x: str) -> pd.DataFrame:
    """The points of some metrics, with labels such as "ICL" and "FT gd"; in ZSL and ICL no method has a part."""
    parts = []
    for metric, name in metrics.items():
        own = points[points["metric"] == metric]
        if metric.endswith(("_zsl", "_icl")):
            own = own.assign(method="none", variant="").drop_duplicates(["dataset", "init", x])
        words = own.reindex(columns=["method", "variant", "init"], fill_value="").astype(str)
        labels = [" ".join(word for word in (name, *row) if word not in UNSAID) for row in words.to_numpy()]
        parts.append(own.assign(label=labels))
    return pd.concat(parts)


def curves(
    points: pd.DataFrame,
    model: str,
    setting: str,
    metrics: Mapping[str, str],
    names: tuple[str, str],
    axis: tuple[str, str, float],
    scale: str = "linear",
) -> Iterator[Chart]:
    """Metrics (with their names) against a setting, a panel for every dataset; nothing if it never varies."""
    points = points[(points["model"] == model) & points["metric"].isin(metrics)]
    if points.empty or points.groupby(["dataset", "init", "method"])[setting].nunique().max() < 2:
        return
    panels = by_dataset(labelled(points, metrics, setting), setting, axis[2])
    caption = f"{model}. Error bars: standard deviation over seeds."
    yield Chart(f"{names[0]}_{model}", names[1], caption, panels, axis[0], axis[1], scale=scale)
