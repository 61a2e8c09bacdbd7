"""The figures. A new one is a function (run, model) -> charts with what it `needs`, added to FIGURES."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report import experiments
from fairseq_icl.replication.report.charts import Chart, Panel, Series, by_dataset, labelled, lines, panels_of
from fairseq_icl.replication.report.displacement import RATIO, displacement_figures, step_figures
from fairseq_icl.replication.report.experiments import BY_DEPTH, DEPTH_AXES, PERCENT, SIMILARITIES
from fairseq_icl.replication.report.published import AUTHORS_MODEL, authors_gradients, authors_runs
from fairseq_icl.replication.report.rates import rate_figures
from fairseq_icl.replication.report.run import Run, needs, over_seeds, plain, with_data

LINEAR = ("gd",)  # methods whose gradients the second paper shows on a linear scale, all others on a logarithmic one
BANDS = (
    f" Bands: the authors' own runs ({AUTHORS_MODEL}, 24 layers, fp16), mean ± standard deviation over runs; for a "
    "model of another depth they are stretched over its layers."
)


def all_figures(run: Run) -> Iterator[Chart]:
    """Every figure that the run has numbers for: one without panels is none."""
    models = run.planned["model"].drop_duplicates()
    for draw in with_data(run, FIGURES):
        drawn = [chart for model in models for chart in draw(run, model) if chart.panels]
        for title in dict.fromkeys(chart.title for chart in drawn):  # the same figure of two models side by side
            yield from (chart for chart in drawn if chart.title == title)


@needs(metrics=SIMILARITIES, differing=["dataset"])
def over_tasks(run: Run, model: str) -> Iterator[Chart]:
    """Similarities by layer, averaged over datasets and seeds: the second paper's figure."""
    single = plain(run.values[run.values["layer"].notna()], model)
    panels = []
    for metric in SIMILARITIES:
        chosen = single[single["metric"] == metric]
        if chosen["dataset"].nunique() > 1:
            found = lines(over_seeds(chosen, ["init", "method", "layer"]), "layer")
            series = _with_bands(found, metric, list(chosen["dataset"].drop_duplicates()))
            panels.append(Panel(shown_as(metric)[0], series))
    caption = (
        f"{model}. Mean over datasets and seeds of the mean over validation examples; error bars: standard "
        "deviation over datasets and seeds. Layers from 0."
    )
    title = "Similarity to ICL by layer, over all datasets"
    yield _against_layers(f"over_tasks_{model}", title, caption, panels, "cosine")


@needs(metrics=SIMILARITIES)
def similarities(run: Run, model: str) -> Iterator[Chart]:
    """Every similarity by layer, a panel for every dataset."""
    for metric in SIMILARITIES:
        yield _by_layer(run, model, metric, f"layers_{metric}", f"{shown_as(metric)[0]} to ICL by layer")


@needs(metrics=["alpha"])
def alpha(run: Run, model: str) -> Iterator[Chart]:
    """Alpha as bars, one for every dataset (the second paper's figure), and by layer."""
    chosen = plain(run.summary[run.summary["metric"] == "alpha"], model)
    if not chosen.empty:
        places, datasets = pd.factorize(chosen["dataset"])
        panels = [Panel("", lines(chosen.assign(place=places, label=chosen["init"], method="none"), "place"))]
        caption = (
            f"{model}. SimAM_delta between vanilla and layer-causal fine-tuning; error bars: standard deviation over "
            "seeds. The second paper draws about 0.1 to 0.2 for most datasets."
        )
        title = "alpha by dataset: how alike the two ways of fine-tuning are"
        yield Chart(f"alpha_bars_{model}", title, caption, panels, "", "alpha", kind="bars", ticks=list(datasets))
    yield _by_layer(run, model, "alpha", "alpha", "alpha by layer: how alike the two ways of fine-tuning are")


def _by_layer(run: Run, model: str, metric: str, name: str, title: str) -> Chart:
    """A metric of the plain runs against the layer."""
    panels = by_dataset(plain(run.layers[run.layers["metric"] == metric], model), "layer")
    panels = [replace(panel, series=_with_bands(panel.series, metric, [panel.title])) for panel in panels]
    caption = f"{model}. Mean over validation examples; error bars: standard deviation over seeds. Layers from 0."
    shown, unit, _ = shown_as(metric)
    return _against_layers(f"{name}_{model}", title, caption, panels, f"{shown} ({unit})")


def _against_layers(name: str, title: str, caption: str, panels: Sequence[Panel], y: str) -> Chart:
    caption += BANDS if any(one.reference for panel in panels for one in panel.series) else ""
    return Chart(name, title, caption, panels, "layer", y, zero=True)


def _with_bands(series: Sequence[Series], metric: str, datasets: list[str]) -> list[Series]:
    """The lines, and beside those of the same init and method the authors' runs, stretched over the model's depth."""
    depth = max(max(line.x) for line in series)
    runs = authors_runs()
    runs = runs[(runs["metric"] == metric) & runs["layer"].notna() & runs["dataset"].isin(datasets)]
    runs = runs[(runs["clip_norm"] == 0) & (runs["precision"] == "fp16")]
    bands = []
    for (init, method), own in runs.groupby(["init", "method"]):
        label = f"{method}, {init}"
        if label in [line.label for line in series]:
            line = over_seeds(own, ["layer"]).sort_values("layer")
            stretched = line["layer"].astype(float) * depth / (len(line) - 1)
            tags = {"init": init, "method": method} | ({"dataset": datasets[0]} if len(datasets) == 1 else {})
            values = (list(stretched), list(line["mean"]), list(line["sd"]))
            bands.append(Series(f"authors' runs: {label}", *values, tags, True, label))
    return [*series, *bands]


PARTS = {"both": "changed_both_{}", "ICL only": "changed_only_icl_{}", "FT only": "changed_only_ft_{}"}
NEEDED = [metric.format(outcome) for metric in PARTS.values() for outcome in ("correct", "incorrect")]


@needs(metrics=NEEDED)
def partition(run: Run, model: str) -> Iterator[Chart]:
    """Stacked bars: who changes predictions, split into changes that end right and that end wrong."""
    known, index = plain(run.summary, model), ["init", "method", "dataset"]
    counts = known.pivot_table(index=index, columns="metric", values="mean", sort=False)
    if not {"accuracy_ft", "examples", *NEEDED} <= set(counts):
        return
    counts = counts[counts["accuracy_ft"].notna()].fillna(0.0)
    datasets = list(counts.index.get_level_values("dataset").drop_duplicates())
    panels = []
    for (init, method), group in counts.groupby(level=["init", "method"], sort=False):
        places = [datasets.index(dataset) for dataset in group.index.get_level_values("dataset")]
        tags = {"init": init, "method": method}
        series = []
        for outcome, word in (("correct", "right"), ("incorrect", "wrong")):
            for label, metric in PARTS.items():
                share = 100 * (group[metric.format(outcome)] / group["examples"]).to_numpy()
                series.append(Series(f"{label}, new prediction {word}", places, list(share), tags=tags, stack=word))
        panels.append(Panel(f"{method}, {init}", series, tags=tags))
    caption = (
        f"{model}. Share of the validation examples whose prediction differs from the zero-shot one under ICL, under "
        "fine-tuning (FT), or under both. Left bar: the new prediction is right; right bar: it is wrong."
    )
    title = "Prediction changes by ICL and by fine-tuning"
    yield Chart(f"partition_{model}", title, caption, panels, "", "examples (percent)", kind="bars", ticks=datasets)


# What a run keeps of gradients -> the caption of its heat maps.
GRADIENTS = {
    "gradients": "Gradient of keys and values of each layer at each step, averaged over the scored tokens.",
    "whole_layers": "As the second paper draws it: gradient of all parameters of a layer, whether they learn or not, "
    "summed over the scored tokens (docs/protocol.md).",
}


@needs(kept=GRADIENTS)
def gradient_norms(run: Run, model: str) -> Iterator[Chart]:
    """Heat maps layer x step, a panel for every dataset; the first seed. In both norms."""
    for kept, text in GRADIENTS.items():
        grids, known, is_whole = getattr(run, kept), plain(run.planned, model), kept == "whole_layers"
        known = known[known["key"].isin(grids)].drop_duplicates(["init", "method", "dataset"])
        for (init, method), group in known.groupby(["init", "method"], sort=False):
            panels, caption = [], f"{model}, {init}, first seed. {text}"
            for cell in group.itertuples():
                tags = {"init": init, "method": method, "dataset": cell.dataset}
                grid = grids[cell.key].T  # (layers, steps)
                panels.append(Panel(cell.dataset, grid=grid, logarithmic=method not in LINEAR, tags=tags))
            if is_whole and (init, method) == ("pretrained", "lcgd"):
                tags = {"init": init, "method": method, "dataset": "subj"}
                panels.append(Panel("subj: the authors' run", (), authors_gradients().T, True, tags))
                caption += f" The authors' run: {AUTHORS_MODEL}, seed 4, fp16, divided by its loss scale."
            name = f"{'whole_gradients' if is_whole else 'gradients'}_{model}_{init}_{method}"
            title = f"Gradient norms{' of whole layers' if is_whole else ''} of {method} ({init})"
            axes = ("demonstration (training step)", "layer", "heat")
            yield Chart(name, title, caption, panels, *axes, colour="gradient's l2 norm")


@needs(metrics=BY_DEPTH)
def accuracy_by_depth(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy against the layer after which the model is cut: a figure for every init, a panel for every dataset."""
    chosen = labelled(plain(run.layers, model), BY_DEPTH, "layer")
    for init, group in chosen.groupby("init", sort=False):
        caption = (
            f"{model}, {init}. The residual stream after each layer is read through the final norm and the output "
            "embedding; the last layer is the model itself. Error bars: standard deviation over seeds. Layers from 0."
        )
        panels, title = by_dataset(group, "layer", PERCENT), f"Accuracy by depth ({init})"
        yield Chart(f"accuracy_by_depth_{model}_{init}", title, caption, panels, *DEPTH_AXES)


@needs(metrics=["sim_aou_heads"])
def similarity_of_heads(run: Run, model: str) -> Iterator[Chart]:
    """Heat maps layer x head: a figure for every init and method, a panel for every dataset."""
    known = plain(run.layers, model)
    head = known["metric"].str.extract(r"^sim_aou_heads_(\d+)$")[0]
    known = known.assign(head=head)[head.notna()].astype({"head": int})
    if known.empty:
        return
    layers, heads = (range(int(known[name].max()) + 1) for name in ("layer", "head"))
    for (init, method), group in known.groupby(["init", "method"], sort=False):
        panels = []
        for dataset, own in group.groupby("dataset", sort=False):
            grid = own.pivot(index="layer", columns="head", values="mean").astype(float)
            tags = {"init": str(init), "method": str(method), "dataset": str(dataset)}
            panels.append(Panel(str(dataset), grid=grid.reindex(index=layers, columns=heads).to_numpy(), tags=tags))
        caption = (
            f"{model}, {init}. Cosine of the updates of ICL and of {method} in what each head puts out, before the "
            "output projection; mean over validation examples and seeds. Layers and heads from 0."
        )
        names = (f"heads_{model}_{init}_{method}", f"SimAOU by layer and head of {method} ({init})", caption)
        yield Chart(*names, panels, "head", "layer", "heat", colour="cosine")


@needs(kept=["step_sizes"])
def step_sizes(run: Run, model: str) -> Iterator[Chart]:
    """The relative size of the plain run's steps by layer: a panel for every dataset, a line an init and method."""
    known = plain(run.planned[run.planned["key"].isin(run.step_sizes)], model)
    sizes = [run.step_sizes[key].mean(axis=0) for key in known["key"]]  # (layers,) of every cell
    points = known.assign(layer=[range(len(of_cell)) for of_cell in sizes], value=sizes).explode(["layer", "value"])
    points = points[points["value"] > 0].astype({"value": float})
    points = over_seeds(points.assign(value=np.log10(points["value"])), ["dataset", "init", "method", "layer"])
    caption = (
        f"{model}. Length of a step of what learns in a layer, divided by the length of these weights; mean over the "
        "steps of fine-tuning, as a power of ten. Error bars: standard deviation over seeds. Layers from 0."
    )
    title, panels = "How far a step moves the weights, by layer", by_dataset(points, "layer")
    yield Chart(f"step_sizes_{model}", title, caption, panels, "layer", "log10 of |dW| / |W|")


BY_LENGTH = {"sim_aou_norm": "sim_aou_norm_random_matched", "sim_aou_projected": ""}
"""Metrics to be shown against the length of the update, and what a random update as long has."""
LENGTHS = np.geomspace(0.05, 20, 40)
WIDTH, DRAWS = 1024, 20


@needs(metrics=[RATIO])
def against_length(run: Run, model: str) -> Iterator[Chart]:
    """Similarities by layer against how far fine-tuning moves the attention output, in units of ICL's way."""
    known = plain(run.layers, model)
    known = known[(known["init"] == "pretrained") & known["method"].isin(["gd", "lcgd"])]
    table = known.pivot_table(index=["dataset", "method", "layer"], columns="metric", values="mean", sort=False)
    for metric in (metric for metric in BY_LENGTH if {metric, RATIO} <= set(table)):
        series = []
        for (dataset, method), line in table.groupby(level=["dataset", "method"], sort=False):
            tags = {"dataset": dataset, "method": method, "init": "pretrained"}
            for label, y in ((method, metric), (f"random, as long as {method}'s", BY_LENGTH[metric])):
                if y in line:
                    shown = line[[RATIO, y]].dropna().sort_values(RATIO)
                    series.append(Series(label, list(shown[RATIO]), list(shown[y]), tags=tags))
        panels = panels_of(series)
        told = [f"{panel.title}: {', '.join(f'{x.label} {at_one(x)}' for x in panel.series)}" for panel in panels]
        name = shown_as(metric)[0]
        caption = (
            f"{model}. A point is a layer (mean over seeds). 1: FT moves the attention output as far as ICL does."
            f" At 1, between the layers on either side of it: {'; '.join(told)}."
        )
        title, axes = f"{name} against the length of the update", ("length of FT's update / ICL's", f"{name} (cosine)")
        yield Chart(f"against_length_{metric}_{model}", title, caption, panels, *axes, scale="log", zero=True)


def at_one(line: Series) -> str:
    """The value at a ratio of 1, between neighbours on the logarithmic axis, if it is reached."""
    if not line.x or not min(line.x) <= 1 <= max(line.x):
        return "not reached"
    return f"{np.interp(0.0, np.log(line.x), line.y):.3f}"


@needs(metrics=["sim_aou_norm_random_matched"])
def random_updates(run: Run, model: str) -> Iterator[Chart]:
    """SimAOU_norm of two unrelated updates against their length: 1/4 where they double the norm of the state."""
    if "sim_aou_norm_random_matched" not in set(run.summary.loc[run.summary["model"] == model, "metric"]):
        return
    exact = (1 - 1 / np.sqrt(1 + LENGTHS**2)) / 2  # metrics/attention_outputs.py derives it
    random = np.random.default_rng(0).standard_normal((3, DRAWS, WIDTH))
    state, *updates = random / np.linalg.norm(random, axis=-1, keepdims=True)  # (draws, width) each
    drawn = []  # (lengths, draws)
    for length in LENGTHS[::4]:
        moved = [state + length * update for update in updates]
        one, other = (there / np.linalg.norm(there, axis=-1, keepdims=True) - state for there in moved)
        drawn.append((one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1))
    series = [
        Series("updates orthogonal to each other and to the state", list(LENGTHS), list(exact)),
        Series("drawn", list(LENGTHS[::4]), list(np.mean(drawn, 1)), list(np.std(drawn, 1))),
        Series("both double the norm of the state", [3**0.5], [0.25]),
    ]
    caption = (
        f"Two random updates of the same length in {WIDTH} dimensions, mean and standard deviation of {DRAWS} draws, "
        "and the formula. The second paper (3.1) names 1/4; the limit is 1/2. SimAOU and SimAOU_projected are 0."
    )
    axis = ("length of each update / norm of the state", "SimAOU_norm (cosine)")
    title = "SimAOU_norm of random updates against their length"
    yield Chart(f"random_updates_{model}", title, caption, [Panel("", series)], *axis, scale="log", zero=True)


FIGURES = [experiments.nearest_account, over_tasks, similarities, alpha, similarity_of_heads, accuracy_by_depth]
FIGURES += [experiments.short_circuits, experiments.dynamics, experiments.accuracy_by_order, step_sizes, step_figures]
FIGURES += [partition, gradient_norms, experiments.clipping, experiments.accuracy_by_k, rate_figures]
FIGURES += [displacement_figures, experiments.learning_rates, experiments.switched_labels, against_length]
FIGURES += [random_updates]
"""In the order of the page."""
