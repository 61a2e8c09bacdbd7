"""The figures. A new one is a function (run, model) -> charts, added to FIGURES; page and print follow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.charts import Chart, Panel, Series, curves, line_series
from fairseq_icl.replication.report.controls import against_length, random_updates
from fairseq_icl.replication.report.depth import accuracy_by_depth, short_circuits
from fairseq_icl.replication.report.displacement import displacement_figures
from fairseq_icl.replication.report.dynamics import dynamics
from fairseq_icl.replication.report.order import accuracy_by_order
from fairseq_icl.replication.report.published import AUTHORS_MODEL, authors_gradients, authors_runs
from fairseq_icl.replication.report.rates import rate_figures
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.steps import step_figures

PERCENT = 100.0
SIMILARITIES = ("sim_aou", "sim_aou_norm", "sim_am_after", "sim_am_delta")
LINEAR = ("gd",)
"""Methods whose gradients the second paper shows on a linear scale; layer-causal ones are on a logarithmic one."""
SWITCHED = {
    "demonstrations": "the prompt's demonstrations",
    "finetuning": "the demonstrations of fine-tuning",
    "both": "the demonstrations of both",
}


def all_figures(run: Run) -> Iterator[Chart]:
    """Every figure that the run has numbers for."""
    models = run.planned["model"].drop_duplicates()
    for draw in FIGURES:
        drawn = [chart for model in models for chart in draw(run, model)]
        for title in dict.fromkeys(chart.title for chart in drawn):  # the same figure of two models side by side
            yield from (chart for chart in drawn if chart.title == title)


def over_tasks(run: Run, model: str) -> Iterator[Chart]:
    """Similarities by layer, averaged over datasets and seeds: the second paper's figure."""
    single = run.values[run.values["layer"].notna() & (run.values["model"] == model) & (run.values["variant"] == "")]
    panels = []
    for metric in SIMILARITIES:
        chosen = single[single["metric"] == metric]
        if chosen["dataset"].nunique() < 2:
            continue
        means = chosen.groupby(["init", "method", "layer"], sort=False)["value"].agg(mean="mean", sd="std")
        series = [
            line_series(f"{method}, {init}", line.reset_index(), "layer", init=init, method=method)
            for (init, method), line in means.groupby(level=["init", "method"], sort=False)
        ]
        depth = int(chosen["layer"].max()) + 1
        shared = set(chosen["dataset"])
        series += _band(metric, shared, depth, {(s.tags["init"], s.tags["method"]) for s in series})
        panels.append(Panel(shown_as(metric)[0], series))
    if panels:
        caption = (
            f"{model}. Mean over datasets and seeds of the mean over validation examples; error bars: standard "
            f"deviation over datasets and seeds. Layers from 0.{_about_band(panels)}"
        )
        title = "Similarity to ICL by layer, over all datasets"
        yield Chart(f"over_tasks_{model}", title, caption, panels, "layer", "cosine", zero=True)


def similarities(run: Run, model: str) -> Iterator[Chart]:
    """Every similarity by layer, a panel a dataset."""
    for metric in SIMILARITIES:
        yield from _by_layer(run, model, metric, f"layers_{metric}", f"{shown_as(metric)[0]} to ICL by layer")


def alpha(run: Run, model: str) -> Iterator[Chart]:
    """Alpha as bars, a bar a dataset (the second paper's figure), and by layer."""
    chosen = run.summary[
        (run.summary["model"] == model) & (run.summary["metric"] == "alpha") & (run.summary["variant"] == "")
    ]
    if not chosen.empty:
        datasets = list(chosen["dataset"].drop_duplicates())
        panel = Panel("", _bars(chosen, datasets, "init"))
        caption = (
            f"{model}. SimAM_delta between vanilla and layer-causal fine-tuning; error bars: standard deviation over "
            "seeds. The second paper draws about 0.1 to 0.2 for most datasets."
        )
        title = "alpha by dataset: how alike the two ways of fine-tuning are"
        yield Chart(f"alpha_bars_{model}", title, caption, [panel], "", "alpha", kind="bars", ticks=datasets)
    yield from _by_layer(run, model, "alpha", "alpha", "alpha by layer: how alike the two ways of fine-tuning are")


def _by_layer(run: Run, model: str, metric: str, name: str, title: str) -> Iterator[Chart]:
    """A metric against the layer: a panel a dataset, a line an init and method of the plain run."""
    chosen = run.layers[
        (run.layers["model"] == model) & (run.layers["metric"] == metric) & (run.layers["variant"] == "")
    ]
    panels = []
    for dataset, own in chosen.groupby("dataset", sort=False):
        series = [
            line_series(f"{method}, {init}", line, "layer", init=init, method=method, dataset=dataset)
            for (init, method), line in own.groupby(["init", "method"], sort=False)
        ]
        depth = int(own["layer"].max()) + 1
        series += _band(metric, {dataset}, depth, {(s.tags["init"], s.tags["method"]) for s in series})
        panels.append(Panel(dataset, series, tags={"dataset": dataset}))
    if panels:
        caption = (
            f"{model}. Mean over validation examples; error bars: standard deviation over seeds. Layers from 0."
            f"{_about_band(panels)}"
        )
        shown, unit, _ = shown_as(metric)
        yield Chart(f"{name}_{model}", title, caption, panels, "layer", f"{shown} ({unit})", zero=True)


def _band(metric: str, datasets: set[str], depth: int, wanted: set[tuple[str, str]]) -> list[Series]:
    """The authors' runs of a metric by layer, mean ± SD over runs, beside the lines of the same init and method.

    A model of another depth has them stretched over its own.
    """
    runs = authors_runs()
    runs = runs[(runs["metric"] == metric) & runs["layer"].notna() & runs["dataset"].isin(datasets)]
    runs = runs[(runs["clip_norm"] == 0) & (runs["precision"] == "fp16")]
    bands = []
    for (init, method), own in runs.groupby(["init", "method"]):
        if (init, method) in wanted:
            line = own.groupby("layer")["value"].agg(mean="mean", sd="std").reset_index()
            stretched = line["layer"].astype(float) * (depth - 1) / (len(line) - 1)
            tags = {"init": init, "method": method} | ({"dataset": next(iter(datasets))} if len(datasets) == 1 else {})
            label = f"authors' runs: {method}, {init}"
            bands.append(
                Series(label, list(stretched), list(line["mean"]), list(line["sd"]), tags, True, f"{method}, {init}")
            )
    return bands


def _about_band(panels: Sequence[Panel]) -> str:
    if not any(series.reference for panel in panels for series in panel.series):
        return ""
    return (
        f" Bands: the authors' own runs ({AUTHORS_MODEL}, 24 layers, fp16), mean ± standard deviation over runs; for a "
        "model of another depth they are stretched over its layers."
    )


PARTS = {"both": "changed_both_{}", "ICL only": "changed_only_icl_{}", "FT only": "changed_only_ft_{}"}


def partition(run: Run, model: str) -> Iterator[Chart]:
    """Stacked bars: who changes predictions, split into changes that end right and that end wrong."""
    plain = run.summary[(run.summary["model"] == model) & (run.summary["variant"] == "")]
    counts = plain.pivot_table(index=["init", "method", "dataset"], columns="metric", values="mean", sort=False)
    needed = [metric.format(outcome) for metric in PARTS.values() for outcome in ("correct", "incorrect")]
    if not {"accuracy_ft", "examples", *needed} <= set(counts):
        return
    counts = counts[counts["accuracy_ft"].notna()].fillna(0.0)
    datasets = list(counts.index.get_level_values("dataset").drop_duplicates())
    panels = []
    for (init, method), group in counts.groupby(level=["init", "method"], sort=False):
        places = [datasets.index(dataset) for dataset in group.index.get_level_values("dataset")]
        series = []
        for outcome, word in (("correct", "right"), ("incorrect", "wrong")):
            for label, metric in PARTS.items():
                share = 100 * (group[metric.format(outcome)] / group["examples"]).to_numpy()
                tags = {"init": init, "method": method}
                series.append(Series(f"{label}, new prediction {word}", places, list(share), tags=tags, stack=word))
        panels.append(Panel(f"{method}, {init}", series, tags={"init": init, "method": method}))
    caption = (
        f"{model}. Share of the validation examples whose prediction differs from the zero-shot one under ICL, under "
        "fine-tuning (FT), or under both. Left bar: the new prediction is right; right bar: it is wrong."
    )
    title = "Prediction changes by ICL and by fine-tuning"
    yield Chart(f"partition_{model}", title, caption, panels, "", "examples (percent)", kind="bars", ticks=datasets)


def gradient_norms(run: Run, model: str) -> Iterator[Chart]:
    """Heat maps layer x step, a panel a dataset, a figure an init and method; the first seed. In both norms."""
    ours = "Gradient of keys and values of each layer at each step, averaged over the scored tokens."
    theirs = (
        "As the second paper draws it: gradient of all parameters of a layer, whether they learn or not, summed over "
        "the scored tokens (docs/protocol.md)."
    )
    yield from _heat_maps(run, model, run.gradients, "gradients", "Gradient norms", ours)
    title = "Gradient norms of whole layers"
    for chart in _heat_maps(run, model, run.whole_layers, "whole_gradients", title, theirs):
        if not chart.name.endswith("_pretrained_lcgd"):
            yield chart
            continue
        tags = {"init": "pretrained", "method": "lcgd", "dataset": "subj"}
        beside = Panel("subj: the authors' run", grid=authors_gradients().T, logarithmic=True, tags=tags)
        words = f" The authors' run: {AUTHORS_MODEL}, seed 4, fp16, divided by its loss scale."
        yield replace(chart, panels=[*chart.panels, beside], caption=chart.caption + words)


def _heat_maps(
    run: Run, model: str, grids: Mapping[str, np.ndarray], name: str, title: str, text: str
) -> Iterator[Chart]:
    """`grids` have (steps, layers) by the keys of cells."""
    known = run.planned[(run.planned["model"] == model) & (run.planned["variant"] == "")]
    known = known[known["key"].isin(grids)].drop_duplicates(["init", "method", "dataset"])
    for (init, method), group in known.groupby(["init", "method"], sort=False):
        tags = {"init": init, "method": method}
        panels = [
            Panel(
                cell.dataset,
                grid=grids[cell.key].T,  # (layers, steps)
                logarithmic=method not in LINEAR,
                tags=tags | {"dataset": cell.dataset},
            )
            for cell in group.itertuples()
        ]
        yield Chart(
            f"{name}_{model}_{init}_{method}",
            f"{title} of {method} ({init})",
            f"{model}, {init}, first seed. {text}",
            panels,
            "demonstration (training step)",
            "layer",
            kind="heat",
            colour="gradient's l2 norm",
        )


def clipping(run: Run, model: str) -> Iterator[Chart]:
    """Similarities against the norm that gradients are clipped to, beside the drafts' sweep."""
    points = run.against("clip_norm")
    points = points[points["model"] == model]
    points = points[points.groupby(["dataset", "init", "method"])["clip_norm"].transform("nunique") > 1]
    if points.empty:
        return
    theirs = authors_runs()
    theirs = theirs[theirs["layer"].isna() & (theirs["precision"] == "fp16")]
    norms = sorted({*points["clip_norm"], *theirs.loc[theirs["method"] == "lcgd", "clip_norm"]} - {0.0})
    places = {norm: place for place, norm in enumerate([*norms, 0.0])}
    for metric in ("sim_aou_norm", "sim_am_after"):
        panels = []
        for dataset, own in points[points["metric"] == metric].groupby("dataset", sort=False):
            series = []
            for (init, method), line in own.groupby(["init", "method"], sort=False):
                label, line = f"{method}, {init}", line.assign(place=line["clip_norm"].map(places))
                series.append(line_series(label, line, "place", init=init, method=method, dataset=dataset))
                said = theirs[(theirs["dataset"] == dataset) & (theirs["metric"] == metric)]
                said = said[(said["method"] == method) & (said["init"] == init)].groupby("clip_norm")["value"].mean()
                if len(said):
                    tags = {"init": init, "method": method, "dataset": dataset}
                    x = [places[norm] for norm in said.index]
                    series.append(Series(f"authors' runs: {label}", x, list(said), None, tags, True, label))
            panels.append(Panel(dataset, series, tags={"dataset": dataset}))
        if panels:
            yield Chart(
                f"clipping_{metric}_{model}",
                f"{shown_as(metric)[0]} against the norm that gradients are clipped to",
                f"{model}. l2 norm of all layers' gradients together; none: not clipped. Thin lines: the authors' runs "
                f"({AUTHORS_MODEL}, fp16, one seed).",
                panels,
                "clipping norm",
                f"{shown_as(metric)[0]} ({shown_as(metric)[1]})",
                ticks=[*(f"{norm:g}" for norm in norms), "none"],
            )


def accuracy_by_k(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy of ICL and ZSL against the number of demonstrations."""
    yield from curves(
        run.against("num_demonstrations"),
        model,
        "num_demonstrations",
        [("accuracy_icl", "ICL"), ("accuracy_zsl", "ZSL")],
        ("accuracy_by_k", "Accuracy against the number of demonstrations"),
        ("number of demonstrations k", "accuracy (percent)", PERCENT),
        "symlog",
    )


def learning_rates(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy after fine-tuning and the similarities against the learning rate, a figure each."""
    points = run.against("lr")
    for metric in ("accuracy_ft", *SIMILARITIES):
        name, unit, scale = shown_as(metric)
        yield from curves(
            points,
            model,
            "lr",
            [(metric, name)],
            (f"learning_rate_{metric}", f"{name} against the learning rate"),
            ("learning rate", f"{name} ({unit})", scale),
            "log",
        )


def switched_labels(run: Run, model: str) -> Iterator[Chart]:
    """Accuracies and the similarities against the share of false labels, a figure each for where the labels are."""
    points = run.against("switch_labels", "switch_fraction")
    none = points[points["switch_labels"] == "none"].assign(switch_fraction=0.0)
    for where, words in SWITCHED.items():
        chosen = pd.concat([none, points[points["switch_labels"] == where]])
        for metrics in (("accuracy_icl", "accuracy_ft"), *((metric,) for metric in SIMILARITIES)):
            name, unit, scale = shown_as(metrics[-1])
            title = "Accuracy" if len(metrics) > 1 else name
            yield from curves(
                chosen,
                model,
                "switch_fraction",
                [(metric, shown_as(metric)[0]) for metric in metrics],
                (f"switched_{where}_{metrics[-1]}", f"{title} against the share of false labels in {words}"),
                ("share of false labels", f"{title} ({unit})", scale),
            )


def _bars(chosen: pd.DataFrame, datasets: Sequence[str], by: str) -> list[Series]:
    """A bar a dataset, a series a value of `by`."""
    places = chosen.assign(place=[float(datasets.index(dataset)) for dataset in chosen["dataset"]])
    return [
        line_series(str(name), own.assign(sd=own["sd"].fillna(np.nan)), "place", **{by: str(name)})
        for name, own in places.groupby(by, sort=False)
    ]


FIGURES = (
    over_tasks,
    similarities,
    alpha,
    accuracy_by_depth,
    short_circuits,
    dynamics,
    accuracy_by_order,
    step_figures,
    partition,
    gradient_norms,
    clipping,
    accuracy_by_k,
    rate_figures,
    displacement_figures,
    learning_rates,
    switched_labels,
    against_length,
    random_updates,
)
