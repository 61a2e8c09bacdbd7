"""A figure as data: the page's script draws it with hover values and toggles, matplotlib draws it for print."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as

DIGITS = 5
UNSAID = ("", "none", "pretrained")  # words that a line's label does without


@dataclass(frozen=True)
class Series:
    """One line, group of bars, or band of a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    sd: Sequence[float] | None = None  # error bars, or half the width of a band; NaN where there is none
    tags: Mapping[str, str] = field(default_factory=dict)  # what the toggles know it by: method, init, dataset
    reference: bool = False
    """Whether it is somebody else's: lines become a band, and it has the look of the series `like`."""
    like: str = ""
    stack: str = ""  # bars of the same stack stand on each other


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    title: str
    series: Sequence[Series] = ()
    grid: np.ndarray | None = None  # of a heat map: (rows, columns)
    logarithmic: bool = False  # whether the heat map's colours go by the logarithm
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
    kind: str = "lines"  # lines, bars or heat
    scale: str = "linear"  # of the horizontal axis: linear, log, or symlog (base 2)
    ticks: Sequence[str] = ()  # names of the places 0, 1, 2 ... of the horizontal axis, where it has names
    zero: bool = False  # whether the line y = 0 means something
    colour: str = ""  # what the colours of a heat map are

    def data(self) -> dict[str, Any]:
        """The chart for the page's script."""
        return {name: _plain(part) for name, part in asdict(self).items()}


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
    """A line for every label ("method, init" if there is none), init and method; none of `none` is toggled by it."""
    if "label" not in points:
        points = points.assign(label=[f"{method}, {init}" for method, init in points[["method", "init"]].to_numpy()])
    found = []
    for (label, init, method), line in points.groupby(["label", "init", "method"], sort=False):
        known = {name: value for name, value in (("init", str(init)), ("method", str(method))) if value != "none"}
        columns = line.sort_values(x)[[x, "mean", "sd"]].astype(float) * [1.0, scale, scale]
        places, means, spreads = (list(columns[name]) for name in columns)
        found.append(Series(str(label), places, means, spreads, known | tags))
    return found


def by_dataset(points: pd.DataFrame, x: str, scale: float = 1.0) -> list[Panel]:
    """A panel for every dataset, with its lines."""
    datasets = points.groupby("dataset", sort=False)
    return panels_of(line for name, own in datasets for line in lines(own, x, scale, dataset=str(name)))


def panels_of(series: Iterable[Series]) -> list[Panel]:
    """A panel for every dataset that the series are tagged with."""
    found: dict[str, list[Series]] = {}
    for one in series:
        found.setdefault(one.tags["dataset"], []).append(one)
    return [Panel(dataset, own, tags={"dataset": dataset}) for dataset, own in found.items()]


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


AXES = {
    "num_demonstrations": ("number of demonstrations k", "symlog"),
    "lr": ("learning rate", "log"),
    "switch_fraction": ("share of false labels", "linear"),
    "layer_step_size": ("relative size of every layer's step, |dW| / |W|", "log"),
}
"""Setting -> its words and its scale as a horizontal axis."""


def curves(
    points: pd.DataFrame, model: str, metrics: Mapping[str, str], name: str, title: str, setting: str, y: str
) -> Iterator[Chart]:
    """Metrics (with their labels) against a setting, a panel for every dataset; nothing if it never varies."""
    points = points[(points["model"] == model) & points["metric"].isin(metrics)]
    if len(points) and points.groupby(["dataset", "init", "method"])[setting].nunique().max() > 1:
        (x, scale), (_, unit, factor) = AXES[setting], shown_as(list(metrics)[-1])
        panels = by_dataset(labelled(points, metrics, setting), setting, factor)
        caption = f"{model}. Error bars: standard deviation over seeds."
        yield Chart(f"{name}_{model}", title, caption, panels, x, f"{y} ({unit})", scale=scale)
