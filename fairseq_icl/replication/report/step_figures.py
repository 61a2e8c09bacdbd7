"""Figures of steps: how far methods move the weights, and how similar they are to ICL where they move equally far."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fairseq_icl.replication.report.charts import Chart, Panel, curves, line_series
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.steps import COSINES, SIZE, equal_steps, with_length_ratios


def step_figures(run: Run, model: str) -> Iterator[Chart]:
    """Every figure of steps that the run has numbers for."""
    yield from _recorded(run, model)
    points = equal_steps(run)
    for metric, name in COSINES.items():
        yield from curves(
            points,
            model,
            SIZE,
            [(metric, name)],
            (f"steps_{metric}", f"{name} at steps of equal relative size"),
            ("relative size of every layer's step, |dW| / |W|", f"{name} (cosine)", 1.0),
            "log",
        )
        yield from _by_length(points, model, metric, name)


def _recorded(run: Run, model: str) -> Iterator[Chart]:
    """The relative size of the plain run's steps by layer: a panel a dataset, a line an init and method."""
    known = run.planned[(run.planned["model"] == model) & (run.planned["variant"] == "")]
    known = known[known["key"].isin(run.step_sizes)]
    rows = [
        {"init": cell.init, "method": cell.method, "dataset": cell.dataset, "layer": layer, "size": np.log10(size)}
        for cell in known.itertuples()
        for layer, size in enumerate(run.step_sizes[str(cell.key)].mean(axis=0))
        if size > 0
    ]
    if not rows:
        return
    groups = pd.DataFrame(rows).groupby(["dataset", "init", "method", "layer"], sort=False)["size"]
    panels = _panels(groups.agg(mean="mean", sd="std").reset_index(), "layer")
    caption = (
        f"{model}. Length of a step of what learns in a layer, divided by the length of these weights; mean over the "
        "steps of fine-tuning, as a power of ten. Error bars: standard deviation over seeds. Layers from 0."
    )
    title = "How far a step moves the weights, by layer"
    yield Chart(f"step_sizes_{model}", title, caption, panels, "layer", "log10 of |dW| / |W|")


def _by_length(points: pd.DataFrame, model: str, metric: str, name: str) -> Iterator[Chart]:
    """A cosine against the length ratio that the same steps led to: equally bold in what they do to attention."""
    found = with_length_ratios(points[points["model"] == model], metric)
    if found.empty or found[SIZE].nunique() < 2:
        return
    caption = (
        f"{model}. Every point is a size of steps; further right, what fine-tuning changes is longer; at 1 it is as "
        "long as what ICL changes. Error bars: standard deviation over seeds."
    )
    title, panels = f"{name} against the length of the change", _panels(found, "length_ratio")
    axes = ("length ratio, FT / ICL", f"{name} (cosine)")
    yield Chart(f"lengths_{metric}_{model}", title, caption, panels, *axes, scale="log")


def _panels(points: pd.DataFrame, x: str) -> list[Panel]:
    """A panel a dataset, a line an init and method."""
    return [
        Panel(
            str(dataset),
            [
                line_series(f"{method}, {init}", line, x, method=method, init=init, dataset=str(dataset))
                for (init, method), line in own.groupby(["init", "method"], sort=False)
            ],
            tags={"dataset": str(dataset)},
        )
        for dataset, own in points.groupby("dataset", sort=False)
    ]
