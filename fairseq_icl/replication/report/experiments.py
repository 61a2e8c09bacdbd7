"""Tables and figures of single experiments: short circuits, dynamics, orders, stability, logged steps, sweeps."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.charts import Chart, Panel, Series, by_dataset, curves, labelled
from fairseq_icl.replication.report.published import AUTHORS_MODEL, authors_runs, authors_trajectory
from fairseq_icl.replication.report.run import IDENTITY, Run, needs, over_seeds, plain
from fairseq_icl.replication.report.tables import METRICS, Entry, Table, entries_of

PERCENT = 100.0
BY_DEPTH = {"accuracy_by_depth_zsl": "ZSL", "accuracy_by_depth_icl": "ICL", "accuracy_by_depth_ft": "FT"}
SWITCHED = {"demonstrations": "the prompt's demonstrations", "finetuning": "the demonstrations of fine-tuning"}
SWITCHED |= {"both": "the demonstrations of both"}
SIMILARITIES = ("sim_aou", "sim_aou_norm", "sim_am_after", "sim_am_delta")
DEPTH_AXES = ("cut after layer", "accuracy (percent)")


@needs(differing=["layers"])
def short_circuits(run: Run, model: str) -> Iterator[Chart]:
    """Models fine-tuned while cut after a layer, scored cut and whole, against that layer."""
    values = run.values[(run.values["model"] == model) & (run.values["method"] == "short_circuit")]
    cuts = pd.to_numeric(values["key"].map(lambda key: run.settings[key].get("layers")), errors="coerce")
    points = values.assign(cut=cuts, at=values["layer"].astype(float), method="none", init="none")[cuts.notna()]
    if points["cut"].nunique() < 2:
        return
    at_cut, whole = points[points["at"] == points["cut"]], points[points["at"].isna()]
    lines = [at_cut[at_cut["metric"] == metric].assign(label=f"{name}, cut") for metric, name in BY_DEPTH.items()]
    lines.append(whole[whole["metric"] == "accuracy_ft"].assign(label="FT, whole"))
    caption = (
        f"{model}. At each layer: the model fine-tuned while it was cut there, scored cut there and whole, beside ZSL "
        "and ICL of the unchanged model cut there. Error bars: standard deviation over seeds. Layers from 0."
    )
    panels = by_dataset(over_seeds(pd.concat(lines), ["dataset", "label", "init", "method", "cut"]), "cut", PERCENT)
    yield Chart(f"short_circuits_{model}", "Fine-tuning of short-circuited models", caption, panels, *DEPTH_AXES)


@needs(kept=["curves"])
def dynamics(run: Run, model: str) -> Iterator[Chart]:
    """ICL with j demonstrations beside fine-tuning after j of them: accuracies, RPA and similarities, a figure each."""
    cells = plain(run.planned[run.planned["key"].isin(run.curves)], model)
    parts = [run.curves[cell["key"]].assign(**{name: cell[name] for name in IDENTITY}) for _, cell in cells.iterrows()]
    if not parts:
        return
    points = over_seeds(pd.concat(parts), [*IDENTITY, "metric", "demonstrations"])
    figures = {"accuracy": {"accuracy_zsl": "ZSL", "accuracy_icl": "ICL", "accuracy_ft": "FT"}}
    figures |= {name: {name: ""} for name in ("rpa", "sim_aou", "sim_am_delta") if name in set(points["metric"])}
    caption = (
        f"{model}. ICL with the first j demonstrations in the prompt, and the model fine-tuned on them one by one, "
        "after j steps. On the first curve_examples validation examples; error bars: standard deviation over seeds."
    )
    for short, metrics in figures.items():
        name, unit, scale = shown_as(list(metrics)[-1])
        name = "Accuracy" if short == "accuracy" else name
        panels = by_dataset(labelled(points, metrics, "demonstrations"), "demonstrations", scale)
        title = f"Dynamics: {name} after each demonstration"
        yield Chart(f"dynamics_{short}_{model}", title, caption, panels, "demonstrations j", f"{name} ({unit})")


NEARNESS = ("sim_aou", "sim_am_delta", "rpa", "auc_ft", "accuracy_ft")  # accounts stand in the order of the first


@needs(experiments=["accounts"])
def nearest_account(run: Run, model: str) -> Iterator[Chart]:
    """Bars: every account of ICL by its likeness to it, beside what would be likeness by chance, or ICL itself."""
    summary = plain(run.summary, model)
    found = summary.pivot_table(index=["method", "dataset"], columns="metric", values="mean", sort=False)
    if not {*NEARNESS, "icl_changed", "ft_changed", "examples"} <= set(found):
        return
    icl, ft = (found[f"{name}_changed"] / found["examples"] for name in ("icl", "ft"))
    beside = {"rpa": icl * ft / (icl + ft - icl * ft), "sim_aou": found.get("sim_aou_random_matched")}
    beside |= {f"{name}_ft": found.get(f"{name}_icl") for name in ("accuracy", "auc")}
    deviations = summary.pivot_table(index=["method", "dataset"], columns="metric", values="sd", sort=False)
    deviations = deviations.reindex(index=found.index, columns=found.columns)
    methods = list(found["sim_aou"].groupby(level="method").mean().sort_values(ascending=False).index)
    datasets = list(found.index.get_level_values("dataset").drop_duplicates())
    panels = []
    for metric in NEARNESS:
        name, unit, scale = shown_as(metric)
        series = []
        for method in methods:
            values, spread = (frame[metric].xs(method, level="method") for frame in (found, deviations))
            places = [datasets.index(dataset) for dataset in values.index]
            series.append(Series(method, places, list(scale * values), list(scale * spread), {"method": method}))
        if (control := beside.get(metric)) is not None:
            height = control.groupby(level="dataset", sort=False).mean()
            places = [datasets.index(dataset) for dataset in height.index]
            word = "ICL itself" if metric.endswith("_ft") else "by chance"
            series.append(Series(word, places, list(scale * height)))
        panels.append(Panel(f"{name} ({unit})" if unit else name, series))
    caption = (
        f"{model}. Accounts of ICL on the same prompts, the one whose attention output moves most as in ICL first. By "
        "chance: a random update as long (SimAOU); as many changed predictions, whichever they are (RPA); means over "
        "the accounts. Error bars: standard deviation over seeds. A cosine is missing in runs in which an account "
        "moves no attention output (a vector at the last layer). match_icl is trained on ICL's own outputs: no "
        "account, but what is possible."
    )
    title = "Which account of ICL is nearest?"
    yield Chart(f"accounts_{model}", title, caption, panels, "", "", kind="bars", ticks=datasets)


SIDES = {"icl": "ICL", "ft": "FT"}
PER_EXAMPLE = [f"{name}_{side}" for name in ("prediction", "gold_probability") for side in SIDES]
SPREADS = ("accuracy, SD", "changed predictions", "probability, SD")
ORDER_COLUMNS = (*(f"{name}: {spread}" for spread in SPREADS for name in SIDES.values()), "token overlap")


def ordered_cells(run: Run) -> pd.DataFrame:
    """The finished cells that differ from another one in nothing but the permutation."""
    cells = run.planned[run.planned["finished"]].drop_duplicates([*IDENTITY, "seed", "permutation"])
    cells = cells[cells["key"].isin(run.values.loc[run.values["metric"] == "accuracy_ft", "key"])]
    return cells[cells.groupby([*IDENTITY, "seed"])["permutation"].transform("nunique") > 1]


@needs(differing=["permutation"])
def order_tables(run: Run) -> list[Table]:
    """How much answers depend on the order: a table for every model and init with demonstrations in several orders."""
    tables = []
    notes = (
        "SDs over orders, mean over seeds: of the accuracy in percent, and of the gold label's probability among "
        "the options (mean over examples). Changed predictions: examples, in percent, whose prediction is not the "
        "same in every order. Token overlap: the share of the ten likeliest tokens of ICL that FT has too.",
    )
    for (model, init), cells in ordered_cells(run).groupby(["model", "init"], sort=False):
        rows = []
        for (dataset, method, variant), group in cells.groupby(["dataset", "method", "variant"], sort=False):
            name = f"{dataset}: {method}{variant and f' [{variant}]'}, {group['permutation'].nunique()} orders"
            rows.append((name, _over_orders(run, group)))
        title = f"Spread over orders of the same demonstrations, {model}, {init}"
        tables.append(Table(f"order_{model}_{init}", title, ORDER_COLUMNS, tuple(rows), 3, notes=notes))
    return tables


def _over_orders(run: Run, group: pd.DataFrame) -> tuple[Entry, ...]:
    """One entry for each of ORDER_COLUMNS, of the cells of one dataset, method and variant."""
    overall = run.values[run.values["key"].isin(group["key"]) & run.values["layer"].isna()]
    accuracies = [overall[overall["metric"] == f"accuracy_{side}"].groupby("seed")["value"].std() for side in SIDES]
    spreads = []
    for _, cells in group.groupby("seed", sort=False):
        found = [run.cell_folder(cell.model, cell.key).values(PER_EXAMPLE) for cell in cells.itertuples()]
        by_order = {name: pd.concat([values[name][-1] for values in found], axis=1) for name in PER_EXAMPLE}  # (N, O)
        changed = [float((by_order[f"prediction_{side}"].nunique(axis=1) > 1).mean()) * PERCENT for side in SIDES]
        spreads.append(changed + [float(by_order[f"gold_probability_{side}"].std(axis=1).mean()) for side in SIDES])
    overlap = overall.loc[overall["metric"] == "token_overlap", "value"].mean()
    numbers = [*(spread.mean() * PERCENT for spread in accuracies), *pd.DataFrame(spreads).mean(), overlap]
    return entries_of(numbers, tuple(group["key"]))


@needs(differing=["permutation"])
def accuracy_by_order(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy of ICL and FT in every order: a panel for every dataset."""
    ordered = ordered_cells(run)
    keys = ordered.loc[ordered["model"] == model, "key"]
    shown = run.values[run.values["key"].isin(keys) & run.values["layer"].isna()]
    points = over_seeds(shown, ["dataset", "init", "method", "variant", "metric", "permutation"])
    metrics = {f"accuracy_{side}": name for side, name in SIDES.items()}
    panels = by_dataset(labelled(points, metrics, "permutation"), "permutation", PERCENT)
    caption = f"{model}. The same demonstrations in different orders; error bars: standard deviation over seeds."
    axes = ("order (index of the permutation)", "accuracy (percent)")
    yield Chart(f"order_{model}", "Accuracy in every order of the demonstrations", caption, panels, *axes)


SPREAD_COLUMNS = ("mean", "SD over perturbations", "SD over seeds beyond that", "half width of the interval")


@needs(differing=["perturbation"])
def stability_tables(run: Run) -> list[Table]:
    """What moving every weight by one unit in the last place does: a table for every model, init and method."""
    draws = {key: said.get("perturbation", 0) for key, said in run.settings.items()}
    others = {key: json.dumps({**said, "perturbation": 0}, sort_keys=True) for key, said in run.settings.items()}
    overall, same = run.values[run.values["layer"].isna()], ["model", "dataset", "method", "others", "metric"]
    overall = overall.assign(draw=overall["key"].map(draws), others=overall["key"].map(others))
    overall = overall.drop_duplicates([*same, "draw"])  # of cells that differ in nothing but the perturbation:
    perturbed = overall[overall.groupby(same)["draw"].transform("nunique") > 1]
    tables = []
    for (model, init, method), group in perturbed.groupby(["model", "init", "method"], sort=False):
        rows, wide = [], []
        for dataset, cells in group.groupby("dataset", sort=False):
            for metric in (metric for metric in METRICS if metric in set(cells["metric"])):
                measured = cells[cells["metric"] == metric]
                half = ((measured["high"] - measured["low"]) / 2).mean()
                spread, of_seeds = spreads(measured, ["seed", "permutation"])
                numbers = (measured["value"].mean(), spread, of_seeds, half)
                rows.append((f"{dataset}: {metric}", entries_of(numbers, tuple(measured["key"]), shown_as(metric)[2])))
                wide += [f"{dataset}: {metric}"] * bool(spread > half)
        title = f"Numerical spread of {method} on {model}, {init}: every weight moved by one unit in the last place"
        notes = ["Shares in percent. SDs over perturbations at one seed, and over seeds without what those add."]
        notes += [f"The numerical spread exceeds the examples' interval in: {', '.join(wide)}."] * bool(wide)
        name = f"stability_{model}_{init}_{method}"
        tables.append(Table(name, title, SPREAD_COLUMNS, tuple(rows), 4, notes=tuple(notes)))
    return tables


def spreads(measured: pd.DataFrame, by: list[str]) -> tuple[float, float]:
    """The SD within the groups, pooled, and that of the groups themselves without what the first adds to it."""
    groups = measured.groupby(by)["value"]
    within = groups.var().mean()
    own = groups.mean().var() - within * (1 / groups.count()).mean()
    return float(np.sqrt(within)), float(np.sqrt(np.maximum(0.0, own)))


STEPS = {"loss_bits": "loss (bits a token, layers added)", "sample_size": "tokens", "gradient_norm": "gradient norm"}
# The settings of the logged run, besides the authors' reading.
LOGGED = {"num_demonstrations": 32, "lr": 0.003, "seed": 4, "permutation": 0, "init": "pretrained", "clip_norm": 0.0}
LAYERS = 24


@needs(experiments=["trajectory"])
def trajectory_tables(run: Run) -> list[Table]:
    """A table of steps for every layer-causal cell; the authors' log of them beside it where it can be compared."""
    cells = run.planned[(run.planned["method"] == "lcgd") & run.planned["key"].isin(run.steps)].drop_duplicates("key")
    tables = []
    for cell in cells.to_dict("records"):
        problem = _why_not_logged(run, cell)
        log = {} if problem else authors_trajectory().to_dict("list")
        rows = []
        for number, step in enumerate(run.steps[cell["key"]].to_dict("records")):
            logged = {name: float(column[number]) for name, column in log.items() if name in STEPS}
            entries = [Entry(float(step[x]), published=logged.get(x), keys=(cell["key"],)) for x in STEPS]
            rows.append((f"step {number + 1}", tuple(entries)))
        title = f"The steps of lcgd on {cell['dataset']}, {cell['model']}, seed {cell['seed']}"
        note = f"Cannot be compared with the authors' log: {problem}." if problem else "The log is of an fp16 run."
        said = "" if problem else "the authors' log of one run (Subj, seed 4, permutation 0, learning rate 0.003, fp16)"
        name, columns = f"trajectory_{cell['model']}_{cell['dataset']}_{cell['seed']}", tuple(STEPS.values())
        tables.append(Table(name, title, columns, tuple(rows), 3, said, "authors' log", (note,)))
    return tables


def _why_not_logged(run: Run, cell: dict[str, Any]) -> str:
    """Why the cell is not the logged run; empty if it is."""
    settings, layers = run.settings[cell["key"]], run.gradients[cell["key"]].shape[1]
    if cell["model"] != AUTHORS_MODEL or layers != LAYERS:
        return f"it is of the {AUTHORS_MODEL} model with {LAYERS} layers, and this is {cell['model']} with {layers}"
    if cell["dataset"] != "subj":
        return f"it is of subj, and this is {cell['dataset']}"
    different = [name for name, value in LOGGED.items() if settings.get(name, value) != value]
    if different or cell["variant"]:
        return f"it was run with another {', '.join(different) or 'variant'}"
    logged, steps = len(authors_trajectory()), len(run.steps[cell["key"]])
    return "" if steps == logged else f"it has {logged} steps, and this has {steps}"


@needs(differing=["clip_norm"])
def clipping(run: Run, model: str) -> Iterator[Chart]:
    """Similarities against the norm that gradients are clipped to, beside the drafts' sweep."""
    points = run.against("clip_norm")
    points = points[points["model"] == model]
    points = points[points.groupby(["dataset", "init", "method"])["clip_norm"].transform("nunique") > 1]
    theirs = authors_runs()
    theirs = theirs[theirs["layer"].isna() & (theirs["precision"] == "fp16")]
    norms = sorted({*points["clip_norm"], *theirs.loc[theirs["method"] == "lcgd", "clip_norm"]} - {0.0})
    places = {norm: place for place, norm in enumerate([*norms, 0.0])}
    points = points.assign(place=points["clip_norm"].map(places))
    for metric in ("sim_aou_norm", "sim_am_after"):
        panels = []
        for panel in by_dataset(points[points["metric"] == metric], "place"):
            series: list[Series] = []
            for line in panel.series:
                said = theirs[(theirs["dataset"] == panel.title) & (theirs["metric"] == metric)]
                said = said[(said["method"] == line.tags["method"]) & (said["init"] == line.tags["init"])]
                means = said.groupby("clip_norm")["value"].mean()
                values = ([places[norm] for norm in means.index], list(means))
                beside = Series(f"authors' runs: {line.label}", *values, None, line.tags, True, line.label)
                series += [line, beside] if len(said) else [line]
            panels.append(replace(panel, series=series))
        name, unit, _ = shown_as(metric)
        title, axes = f"{name} against the norm that gradients are clipped to", ("clipping norm", f"{name} ({unit})")
        caption = (
            f"{model}. l2 norm of all layers' gradients together; none: not clipped. Thin lines: the authors' runs "
            f"({AUTHORS_MODEL}, fp16, one seed)."
        )
        ticks = [*(f"{norm:g}" for norm in norms), "none"]
        yield Chart(f"clipping_{metric}_{model}", title, caption, panels, *axes, ticks=ticks)


@needs(differing=["num_demonstrations"])
def accuracy_by_k(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy of ICL and ZSL against the number of demonstrations."""
    metrics, setting = {"accuracy_icl": "ICL", "accuracy_zsl": "ZSL"}, "num_demonstrations"
    title = "Accuracy against the number of demonstrations"
    yield from curves(run.against(setting), model, metrics, "accuracy_by_k", title, setting, "accuracy")


@needs(differing=["lr"])
def learning_rates(run: Run, model: str) -> Iterator[Chart]:
    """Accuracy after fine-tuning and the similarities against the learning rate, a figure each."""
    points = run.against("lr")
    for metric in ("accuracy_ft", *SIMILARITIES):
        word = shown_as(metric)[0]
        name, title = f"learning_rate_{metric}", f"{word} against the learning rate"
        yield from curves(points, model, {metric: word}, name, title, "lr", word)


@needs(differing=["switch_labels", "switch_fraction"])
def switched_labels(run: Run, model: str) -> Iterator[Chart]:
    """Accuracies and the similarities against the share of false labels, a figure each for where the labels are."""
    points = run.against("switch_labels", "switch_fraction")
    none = points[points["switch_labels"] == "none"].assign(switch_fraction=0.0)
    for where, words in SWITCHED.items():
        chosen = pd.concat([none, points[points["switch_labels"] == where]])
        for metrics in (("accuracy_icl", "accuracy_ft"), *((metric,) for metric in SIMILARITIES)):
            shown = {metric: shown_as(metric)[0] for metric in metrics}
            word = "Accuracy" if len(metrics) > 1 else shown[metrics[0]]
            name, title = f"switched_{where}_{metrics[-1]}", f"{word} against the share of false labels in {words}"
            yield from curves(chosen, model, shown, name, title, "switch_fraction", word)
