"""Sweeps as a table with exponents and as a picture of small panels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VALIDATION = "validation examples"
MEBI = 2**20
COLUMNS = 4
EXPONENT = "exponent"
HEADER = [
    "sweep",
    "context tokens",
    "prefix, once: s",
    "ours: ms a query",
    "authors: ms a query",
    "times faster",
    "compare: ms a query",
    "peak MiB",
]
EXPLANATION = (
    "ours, authors: ICL scoring of a query once the prefix is there; of validation examples, ZSL, ICL and FT with the "
    f"prefix. exponent: b of the least-squares line log(cost) = a + b log(x); at {VALIDATION} of the cost of all of "
    "them. peak: above the weights, observing and comparing, in a process of its own."
)


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep: seconds a query once the prefix is there, and what else it costs."""

    sweep: str
    x: int
    context: int
    prefix: float | None
    ours: float
    authors: float | None = None
    compare: float | None = None
    """Seconds a query, from three observations to all metrics."""
    memory: int | None = None
    """Peak bytes above the weights."""

    def costs(self) -> list[float | None]:
        """Whatever grows, in the units and the order of the table: prefix, ours, authors, compare, memory."""
        milliseconds = [_scaled(value, 1000) for value in (self.ours, self.authors, self.compare)]
        return [self.prefix, *milliseconds, _scaled(self.memory, 1 / MEBI)]


def exponent(x: Sequence[float], cost: Sequence[float]) -> float:
    """b of the least-squares line log(cost) = a + b log(x)."""
    return slope([math.log(a) for a in x], [math.log(b) for b in cost])


def slope(x: Sequence[float], cost: Sequence[float]) -> float:
    """b of the least-squares line cost = a + b x."""
    mean_x, mean_cost = sum(x) / len(x), sum(cost) / len(cost)
    covariance = sum((a - mean_x) * (b - mean_cost) for a, b in zip(x, cost, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def by_sweep(points: Sequence[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """The points of each sweep, in the order of their coming."""
    names = dict.fromkeys(point.sweep for point in points)
    return {name: [point for point in points if point.sweep == name] for name in names}


def exponents(points: Sequence[SweepPoint]) -> list[float | None]:
    """The exponent of each of `SweepPoint.costs` over the points of one sweep; None where it was not measured."""
    x = [point.x for point in points]
    fitted: list[float | None] = []
    for column in zip(*(point.costs() for point in points), strict=True):
        costs = [cost for cost in column if cost]
        fitted.append(exponent(x, costs) if 1 < len(costs) == len(x) else None)
    if points[0].sweep == VALIDATION:  # of x queries, not of one; memory is of all of them already
        fitted[:-1] = [None if value is None else 1 + value for value in fitted[:-1]]
    return fitted


def table(points: Sequence[SweepPoint]) -> list[list[str]]:
    """A header, a row for each point, and after each sweep a row of exponents."""
    rows = [HEADER]
    for sweep, chosen in by_sweep(points).items():
        rows += map(_cells, chosen)
        prefix, ours, authors, compare, memory = (_text(value, "{:.2f}") for value in exponents(chosen))
        rows.append([f"{EXPONENT}: {sweep}", "", prefix, ours, authors, "", compare, memory])
    return rows


def _cells(point: SweepPoint) -> list[str]:
    prefix, ours, authors, compare, memory = point.costs()
    ratio = None if point.authors is None else point.authors / point.ours
    return [
        f"{point.x} {point.sweep}",
        f"{point.context:,}",
        _text(prefix, "{:.2f}"),
        _text(ours, "{:.1f}"),
        _text(authors, "{:.0f}"),
        _text(ratio, "{:.0f}"),
        _text(compare, "{:.2f}"),
        _text(memory, "{:,.0f}"),
    ]


def plot(points: Sequence[SweepPoint], path: Path) -> None:
    """A panel for each sweep, milliseconds a query on one scale for all, logarithmic; and one for memory."""
    from matplotlib.figure import Figure  # slow to import, and not pyplot, which would want a screen

    sweeps = list(by_sweep(points).values())
    with_memory = [point for point in points if point.memory]
    panels = len(sweeps) + bool(with_memory)
    columns = min(panels, COLUMNS)
    figure = Figure(figsize=(3.1 * columns, 3.0 * math.ceil(panels / columns) + 0.4))
    axes = figure.subplots(math.ceil(panels / columns), columns, squeeze=False).flatten()
    for axis, chosen in zip(axes, sweeps, strict=False):
        _cost_panel(axis, chosen)
    low, high = (limit(axis.get_ylim()[side] for axis in axes[: len(sweeps)]) for side, limit in ((0, min), (1, max)))
    for axis in axes[: len(sweeps)]:
        axis.set_ylim(0.7 * low, 1.4 * high)
    for axis in axes[: len(sweeps) : columns]:
        axis.set_ylabel("milliseconds a query")
    if with_memory:
        _memory_panel(axes[len(sweeps)], with_memory)
    for axis in axes[panels:]:
        axis.set_axis_off()
    lines = {line.get_label(): line for axis in axes[: len(sweeps)] for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="upper center", ncols=len(lines), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _cost_panel(axis: "Axes", chosen: Sequence[SweepPoint]) -> None:
    """Milliseconds a query against what is swept; the exponents stand above."""
    _, ours, authors, compare, _ = zip(*(point.costs() for point in chosen), strict=True)
    _, own, theirs, _, _ = exponents(chosen)
    x = [point.x for point in chosen]
    for costs, style, color, label in (
        (authors, "s--", "#a33", "authors' way"),
        (ours, "o-", "#357", "ours, after the prefix"),
        (compare, "^:", "#585", "ours, metrics"),
    ):
        if all(costs):
            axis.plot(x, costs, style, color=color, label=label)
    whose = "exponent of all" if chosen[0].sweep == VALIDATION else "exponent"
    title = "" if own is None else f"{whose} {own:.2f}" + ("" if theirs is None else f", authors {theirs:.2f}")
    _finish(axis, chosen[0].sweep, x, title)


def _memory_panel(axis: "Axes", chosen: Sequence[SweepPoint]) -> None:
    """Peak memory against the size of the validation set."""
    x, memory = [point.x for point in chosen], [(point.memory or 0) / MEBI for point in chosen]
    fitted = exponents(chosen)[-1]
    axis.plot(x, memory, "o-", color="#357")
    _finish(axis, chosen[0].sweep, x, "" if fitted is None else f"memory: exponent {fitted:.2f}")
    axis.set(ylabel="peak MiB above the weights", yscale="linear", ylim=(0, 1.2 * max(memory)))


def _finish(axis: "Axes", name: str, x: Sequence[int], title: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set(xlabel=name, xscale="log", yscale="log", xticks=x, xticklabels=x)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _text(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)
