"""Figures of steps: how far methods move the weights, and how similar they are to ICL where they move equally far."""

from collections.abc import Iterator

import matplotlib as mpl
import pandas as pd
from matplotlib.ticker import MaxNLocator

from fairseq_icl.replication.report.figures import curves
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.steps import COSINES, SIZE, equal_steps, with_length_ratios
from fairseq_icl.results.drawing import STYLE, Drawing, draw_lines, legend_below, log_scale, panels


def step_figures(run: Run) -> Iterator[Drawing]:
    """Every figure of steps that the run has numbers for."""
    points = equal_steps(run)
    with mpl.rc_context(STYLE):
        for model in run.planned["model"].drop_duplicates():
            yield from _recorded(run, model)
            for metric, name in COSINES.items():
                yield from curves(
                    points,
                    model,
                    SIZE,
                    [(metric, name)],
                    (f"steps_{metric}", f"{name} at steps of equal relative size"),
                    ("relative size of every layer's step, |dW| / |W|", f"{name} (cosine)", 1.0),
                    log_scale,
                )
                yield from _by_length(points, model, metric, name)


def _recorded(run: Run, model: str) -> Iterator[Drawing]:
    """The relative size of the plain run's steps by layer: a panel a dataset, a line an init and method."""
    known = run.planned[(run.planned["model"] == model) & (run.planned["variant"] == "")]
    known = known[known["key"].isin(run.step_sizes)]
    if known.empty:
        return
    rows = [
        {"init": cell.init, "method": cell.method, "dataset": cell.dataset, "layer": layer + 1, "size": float(size)}
        for cell in known.itertuples()
        for layer, size in enumerate(run.step_sizes[str(cell.key)].mean(axis=0))
    ]
    groups = pd.DataFrame(rows).groupby(["dataset", "init", "method", "layer"], sort=False)["size"]
    sizes = groups.agg(mean="mean", sd="std").reset_index()
    datasets = list(sizes["dataset"].drop_duplicates())
    figure, axes = panels(datasets)
    for ax, dataset in zip(axes, datasets, strict=True):
        lines = sizes[sizes["dataset"] == dataset].groupby(["init", "method"], sort=False)
        draw_lines(ax, {f"{method}, {init}": line for (init, method), line in lines}, "layer")
        log_scale(ax, y=True)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("layer")
        ax.set_ylabel("|dW| / |W| of a step")
    legend_below(figure, axes)
    caption = (
        f"{model}. Length of a step of what learns in a layer, divided by the length of these weights; mean over the "
        "steps of fine-tuning. Error bars: standard deviation over seeds."
    )
    yield Drawing(f"step_sizes_{model}", "How far a step moves the weights, by layer", caption, figure)


def _by_length(points: pd.DataFrame, model: str, metric: str, name: str) -> Iterator[Drawing]:
    """A cosine against the length ratio that the same steps led to: equally bold in what they do to attention."""
    found = with_length_ratios(points[points["model"] == model], metric)
    if found.empty or found[SIZE].nunique() < 2:
        return
    datasets = list(found["dataset"].drop_duplicates())
    figure, axes = panels(datasets)
    for ax, dataset in zip(axes, datasets, strict=True):
        lines = found[found["dataset"] == dataset].groupby(["init", "method"], sort=False)
        draw_lines(ax, {f"{method}, {init}": line for (init, method), line in lines}, "length_ratio")
        ax.axvline(1, color="black", linewidth=0.6)
        log_scale(ax)
        ax.set_xlabel("length ratio, FT / ICL")
        ax.set_ylabel(f"{name} (cosine)")
    legend_below(figure, axes)
    caption = (
        f"{model}. Every point is a size of steps; further right, what fine-tuning changes is longer; on the vertical "
        "line it is as long as what ICL changes. Error bars: standard deviation over seeds."
    )
    yield Drawing(f"lengths_{metric}_{model}", f"{name} against the length of the change", caption, figure)
