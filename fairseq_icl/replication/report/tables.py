"""The papers' tables with our numbers beside the published ones, and tables that compare variants with each other."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from fairseq_icl.errors import UserError
from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.published import (
    AUTHORS_MODEL,
    authors_means,
    authors_noise,
    inits_of,
    published_figures,
)
from fairseq_icl.replication.report.run import Run, needs, plain
from fairseq_icl.results import LENGTH_RATIO
from fairseq_icl.settings import READING, nearest

AVERAGE = "average"
PLAIN = "plain run"
METRICS: tuple[str, ...] = (
    "accuracy_zsl",
    "accuracy_icl",
    "accuracy_ft",
    "rec2ftp",
    "rpa",
    "rpa_correct",
    "rpa_incorrect",
    "sim_aou",
)
METRICS += ("sim_aou_norm", "sim_aou_random", "sim_aou_norm_random", "sim_am_before", "sim_am_after", "sim_am_delta")
METRICS += ("alpha", "recall_tokens", "recall_examples", "kendall_tokens", "kendall_examples")
"""Metrics that comparison tables show, in this order; metrics of other packages follow."""
NO_UPDATE, ONE_EXAMPLE, ONE_LABEL = "no update", "n=1", "one label"
MARKS = {
    NO_UPDATE: "no update: no update is above rounding here, so that no cosine has a value.",
    ONE_EXAMPLE: "n=1: a single validation example, which has no interval.",
    ONE_LABEL: "one label: a fine-tuned model gives the same label to every example, so that the share is ICL's alone.",
}
OF_PREDICTIONS = ("rec2ftp", "rpa", "rpa_same_label", "rpa_correct", "rpa_incorrect")
BELOW = "Cosines of updates that are not above rounding are left out of these means: {}."
REPEATS = (
    "their repeats: how far apart the authors' own runs of one configuration lie (fp16, overall); a difference within "
    "it is exact. Of AGNews, gd, single layers do not repeat at all (up to 0.17 in SimAOU_norm, 0.41 in SimAM_delta)."
)
LENGTHS = "length ratio: how long FT's vector is in units of ICL's, at every cosine of the two (of their mean lengths)."


@dataclass(frozen=True)
class Entry:
    """One place of a table: ours, the published figure, or both."""

    mean: float | None = None
    """None: the cell is not finished, or the value is not defined (`is_undefined`)."""
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    runs: int = 0
    planned: int = 0
    published: float | None = None
    published_sd: float | None = None
    doubtful: str = ""
    authors: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """Precision -> mean and SD over seeds of the authors' own runs."""
    repeats: float | None = None
    """How far the authors' own repeats of one run (fp16) lie apart."""
    below_rounding: bool = False
    """Whether some of the cosines behind it are of updates that are not above rounding, and left out."""
    keys: tuple[str, ...] = ()
    length_ratio: float | None = None
    """Of a cosine: how long FT's vector is in units of ICL's."""
    mark: str = ""
    """What has to be known to read the number: one of MARKS."""

    @property
    def is_undefined(self) -> bool:
        """Whether the cells are finished but have no value: a share of no examples (Rec2FTP if FT mends none)."""
        return self.mean is None and 0 < self.planned == self.runs

    @property
    def difference(self) -> float | None:
        """Ours minus the published figure (or, in comparisons, minus the plain run)."""
        if self.mean is None or self.published is None:
            return None
        return self.mean - self.published

    @property
    def is_exact(self) -> bool:
        """Whether ours differs from the published figure by no more than the authors' own repeats do."""
        return self.difference is not None and self.repeats is not None and abs(self.difference) <= self.repeats


@dataclass(frozen=True)
class Table:
    """Rows and columns of entries, with what stands around them."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    decimals: int
    source: str = ""
    reference: str = "published"
    """What the second number of an entry is."""
    notes: tuple[str, ...] = field(default=())


def check_tables(names: Sequence[Any]) -> None:
    """Refuse names of tables that are not published, before anything is computed for them."""
    known = published_figures()["tables"]
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise UserError(f"tables={name}: no such published table; {nearest(str(name), known)}")


def paper_tables(run: Run) -> list[Table]:
    """The published tables that the run's experiments name, once for every model of the run.

    A model that the paper does not have is set beside each one that it has.
    """
    tables = []
    models = list(run.planned["model"].drop_duplicates())
    for name in (name for name in run.tables if name in published_figures()["tables"]):
        for model in models:  # innermost: two models stand side by side
            rows = published_figures()["tables"][name]["rows"]
            sizes = list(dict.fromkeys(size for row in rows for size in row.get("published", {})))
            own = run.planned.loc[run.planned["model"] == model, "dataset"]
            if model in sizes or not sizes or not set(own) & set(published_figures()["tables"][name]["columns"]):
                sizes = [model]
            for size in sizes:
                words = {model: model} if len(models) > 1 else {}
                words |= {size: f"published: {size}"} if len(sizes) > 1 else {}
                label, title = "_".join([name, *words]), f" ({', '.join(words.values())})" if words else ""
                table = paper_table(run, name, model, size)
                tables.append(replace(table, name=label, title=table.title + title))
    return tables


def paper_table(run: Run, name: str, model: str, size: str) -> Table:
    """One published table with the numbers of `model` beside the paper's for `size`."""
    figures = published_figures()
    said = figures["tables"][name]
    paper = figures["papers"][said["paper"]]
    own = run.planned.loc[run.planned["model"] == model, "dataset"].drop_duplicates()
    # The paper's order of columns, as far as the run has them, and then its own.
    columns = [dataset for dataset in said["columns"] if dataset in set(own)]
    columns += [dataset for dataset in own if dataset not in columns]
    scale = 100.0 if said.get("percent") else 1.0
    rows = [_paper_row(run, row, model, size, columns, said["columns"], scale) for row in said["rows"]]
    notes = [f"Ours: {model}; published: {size}."] if size != model else []
    notes += [f"{said['note']}."] if "note" in said else []
    notes += [
        f"Doubtful: {row['label']}, {dataset}: {why}."
        for row in said["rows"]
        for dataset, why in row.get("doubtful", {}).items()
        if dataset in columns
    ]
    if any(entry.is_undefined for _, entries in rows for entry in entries):
        notes.append("0/0: a share of no examples, so it has no value here (and the row no average).")
    notes += _notes_of_marks(rows)
    notes += [REPEATS] if any(entry.repeats is not None for _, entries in rows for entry in entries) else []
    source = f"{paper['authors']}, {paper['title']} ({paper['where']})"
    return Table(name, said["title"], (*columns, AVERAGE), tuple(rows), said["decimals"], source, notes=tuple(notes))


def _paper_row(
    run: Run, row: dict[str, Any], model: str, size: str, columns: list[str], published: list[str], scale: float
) -> tuple[str, tuple[Entry, ...]]:
    figures = row.get("published", {}).get(size, {})
    figure = dict(zip(published, figures.get("values", []), strict=False))
    spread = dict(zip(published, figures.get("sd", []), strict=False))
    selection = {"variant": "", "init": "pretrained", **row["select"], "model": model}
    planned = set(run.planned.loc[run.planned["model"] == model, "init"])
    inits = inits_of(selection["init"])
    selection["init"] = next((init for init in inits if init in planned), inits[0])
    entries = [
        look_up(
            run,
            selection | {"dataset": dataset},
            scale=scale,
            **(_authors(row["select"], dataset, scale) if size == AUTHORS_MODEL else {}),
            published=figure.get(dataset),
            published_sd=spread.get(dataset),
            doubtful=row.get("doubtful", {}).get(dataset, ""),
        )
        for dataset in columns
    ]
    # Datasets that the paper's table does not have stand in it, but take no part in an average that is like its own.
    if columns[: len(published)] == published:
        return row["label"], (*entries, _average(entries[: len(published)], figures.get("avg")))
    return row["label"], (*entries, _average(entries, None))


def _authors(select: dict[str, Any], dataset: str, scale: float) -> dict[str, Any]:
    """Of the authors' runs that a row of a published table stands for: mean and SD by precision, and their repeats."""
    variant = select.get("variant", "")
    clip = float(variant.removeprefix("clip_norm=")) if variant.startswith("clip_norm=") else 0.0
    known = authors_means() if clip or not variant else {}
    found, repeats = {}, None
    for precision in ("fp16", "fp32"):
        place = (inits_of(select.get("init", "pretrained"))[0], clip, dataset, precision)
        run = (select["metric"], select.get("method"), *place)
        if run in known:
            mean, sd, _ = known[run]
            found[precision] = mean * scale, None if math.isnan(sd) else sd * scale
        if precision == "fp16" and run in authors_noise():
            repeats = _number(authors_noise()[run][0], scale)
    return {"authors": found, "repeats": repeats}


def look_up(run: Run, selection: dict[str, Any], scale: float = 1.0, **reference: Any) -> Entry:
    """The entry of one (model, init, dataset, method, variant, metric)."""
    found = _select(run.summary, selection)
    planned = len(_select(run.planned, {key: value for key, value in selection.items() if key != "metric"}))
    others = {key: value for key, value in selection.items() if key != "metric"}
    of_cells = _select(run.summary, others).groupby("metric")  # a selection may leave the method open
    counts, labels = of_cells["mean"].max(), of_cells["least"].min().get("labels_ft", 2.0)
    mark = _mark(selection["metric"], counts, labels, found.empty)
    if found.empty:
        undefined = _select(run.summary, selection | {"metric": f"undefined_{selection['metric']}"})
        return Entry(runs=int(undefined["runs"].sum()), planned=planned, mark=mark, **reference)
    row = found.iloc[0]
    numbers: dict[str, Any] = {name: _number(row[name], scale) for name in ("mean", "sd", "low", "high")}
    beside = _select(run.summary, selection | {"metric": f"{LENGTH_RATIO}{selection['metric']}"})
    ratio = None if beside.empty else float(beside.iloc[0]["mean"])
    runs, keys = int(row["runs"]), tuple(row["keys"])
    left_out = bool(counts.get(f"zero_updates_{selection['metric']}", 0.0) > 0)
    about: dict[str, Any] = {"mark": mark, "length_ratio": ratio, "below_rounding": left_out}
    return Entry(**numbers, runs=runs, planned=planned, keys=keys, **about, **reference)


def _mark(metric: str, counts: pd.Series, labels: float, is_missing: bool) -> str:
    """What to say of a number, given the counts of its cells by name and the fewest labels that one of them gives."""
    if is_missing:
        return NO_UPDATE if counts.get(f"zero_updates_{metric}", 0.0) > 0 else ""
    if counts.get("examples", 2.0) == 1:
        return ONE_EXAMPLE
    return ONE_LABEL if labels == 1 and metric in OF_PREDICTIONS else ""


def _notes_of_marks(rows: Iterable[tuple[str, Sequence[Entry]]]) -> list[str]:
    entries = [entry for _, row in rows for entry in row]
    found = {entry.mark for entry in entries}
    lengths = [LENGTHS] if any(entry.length_ratio is not None for entry in entries) else []
    noisy = [label for label, row in rows if any(entry.below_rounding for entry in row)]
    below = [BELOW.format(", ".join(noisy))] if noisy else []
    return lengths + below + [text for mark, text in MARKS.items() if mark in found]


def _select(frame: pd.DataFrame, selection: dict[str, Any]) -> pd.DataFrame:
    chosen = pd.Series(True, index=frame.index)
    for column, value in selection.items():
        chosen &= frame[column] == value
    return frame[chosen]


def _number(value: Any, scale: float) -> float | None:
    return None if pd.isna(value) else float(value) * scale


def _average(entries: Sequence[Entry], published: float | None) -> Entry:
    """Mean over the planned datasets once all have a number; the paper's average beside it if it is over the same."""
    means = [entry.mean for entry in entries if entry.planned]
    defined = [mean for mean in means if mean is not None]
    if not means or len(defined) < len(means):
        return Entry(published=published)
    runs = min(entry.runs for entry in entries if entry.planned)
    return Entry(
        mean=math.fsum(defined) / len(defined), runs=runs, published=published if len(means) == len(entries) else None
    )


@needs(differing=["variant"])
def comparison_tables(run: Run) -> list[Table]:
    """For every model, init and method with variants: what each variant does to every metric, over all datasets."""
    tables = []
    for (model, init, method), group in run.planned.groupby(["model", "init", "method"], sort=False):
        if group["variant"].nunique() > 1:
            tables.append(_comparison(run, model, init, method, list(group["variant"].drop_duplicates())))
    return tables


def _comparison(run: Run, model: str, init: str, method: str, variants: list[str]) -> Table:
    chosen = _select(run.summary, {"model": model, "init": init, "method": method})
    metrics = [metric for metric in METRICS if metric in set(chosen["metric"])]
    average = chosen.groupby(["variant", "metric"], sort=False).agg(
        mean=("mean", "mean"), sd=("sd", "mean"), least=("least", "min"), runs=("runs", "sum"), keys=("keys", "sum")
    )
    rows, same = [], []
    for variant in variants:
        entries = [_compared(average, variant, metric) for metric in metrics]
        differences = {entry.difference for entry in entries} - {None}
        if variant.partition("=")[0] in READING and differences == {0.0}:
            same.append(variant)  # a reading of the layer-causal loss, say, is none of gd's
        else:
            rows.append((variant or "(plain)", tuple(entries)))
    title = f"{method} on {model}, {init}: what each variant does to every metric (mean over datasets and seeds)"
    name = f"variants_{model}_{init}_{method}"
    notes = ["Shares (accuracies, Rec2FTP, RPA) in percent. Differences are to the plain run.", *_notes_of_marks(rows)]
    notes += [f"Left out, since no number differs from the plain run's: {', '.join(same)}."] if same else []
    return Table(name, title, tuple(metrics), tuple(rows), 3, reference=PLAIN, notes=tuple(notes))


def _compared(average: pd.DataFrame, variant: str, metric: str) -> Entry:
    scale = shown_as(metric)[2]
    plain = average["mean"].get(("", metric))
    reference = None if plain is None or not variant else _number(plain, scale)
    if (variant, metric) not in average.index:
        return Entry(published=reference)
    row = average.loc[(variant, metric)]
    mean, sd = _number(row["mean"], scale), _number(row["sd"], scale)
    own, labels = average["mean"].loc[variant], average["least"].get((variant, "labels_ft"), 2.0)
    mark, ratio = _mark(metric, own, labels, mean is None), _number(own.get(f"{LENGTH_RATIO}{metric}"), 1.0)
    runs, keys = int(row["runs"]), tuple(row["keys"])
    return Entry(mean, sd, runs=runs, published=reference, keys=keys, mark=mark, length_ratio=ratio)


OVERVIEW = {"accuracy_{}": "accuracy", "auc_{}": "AUC"}
OVERVIEW |= {metric: shown_as(metric)[0] for metric in ("rpa", "sim_aou", "sim_am_delta")}


def overview(run: Run, model: str) -> Table:
    """What came out, at a glance: a row for ZSL, ICL and every method, means over datasets and seeds."""
    chosen = run.summary[run.summary["model"] == model]
    chosen = plain(chosen, model) if (chosen["variant"] == "").any() else chosen
    foreign = {str(name): str(name) for said in run.configurations.values() for name in said.get("metrics") or {}}
    columns = {**OVERVIEW, **foreign}
    rows: list[tuple[str, list[Entry]]] = []
    for place, own in chosen.groupby(["method", "init", "variant"], sort=False):
        means, keys = own.groupby("metric")["mean"].mean(), tuple(own["keys"].explode().unique())
        label = ", ".join(word for word in place if word not in ("", "pretrained"))
        for side, name in (("ft", label),) if rows else (("zsl", "ZSL"), ("icl", "ICL"), ("ft", label)):
            own_columns = [column.format(side) for column in columns if side == "ft" or "{}" in column]
            numbers = [_number(means.get(column), 1.0) for column in own_columns]
            if any(number is not None for number in numbers):
                numbers += [None] * (len(columns) - len(numbers))
                rows.append((name, [Entry(x, runs=len(keys), keys=keys) for x in numbers]))
    kept = [i for i in range(len(columns)) if any(entries[i].mean is not None for _, entries in rows)]
    titles, shown = list(columns.values()), ((label, tuple(entries[i] for i in kept)) for label, entries in rows)
    planned = run.planned[(run.planned["model"] == model) & run.planned["finished"]]
    counts = [f"{planned[x].nunique()} {x}{'s' * (planned[x].nunique() != 1)}" for x in ("dataset", "seed")]
    title = f"{model}: means over {' and '.join(counts)}"
    notes = (
        "Shares between 0 and 1, cosines between -1 and 1 (means over the layers in which both moved: few, and the "
        "upper ones, for a method that acts on one layer only). A dash: there is no such number.",
    )
    return Table(f"overview_{model}", title, tuple(titles[i] for i in kept), tuple(shown), 3, notes=notes)


@needs()
def data_tables(run: Run) -> list[Table]:
    """Sizes of the datasets, beside those of the second paper's appendix A."""
    said = published_figures()["other"]["deutch2024"]["datasets"]
    found: dict[str, dict[str, float]] = {}
    for configuration in run.configurations.values():
        rows = configuration.get("rows")  # results of earlier versions have none
        if isinstance(rows, dict):
            numbers = {split: record.get("count") for split, record in rows.items() if isinstance(record, dict)}
            found.setdefault(str(configuration["cell"].get("dataset")), {}).update(numbers)
    if not found:
        return []
    rows = []
    for label, split in (("train rows", "train"), ("evaluation rows", "valid"), ("mean length as printed", "length")):
        printed = dict(zip(said["columns"], said.get(split, []), strict=False))
        counts = {name: numbers.get(split) for name, numbers in found.items()}
        known = {name: float(count) for name, count in counts.items() if isinstance(count, int | float)}
        entries = [Entry(known.get(name), published=printed.get(name)) for name in found]
        rows.append((label, tuple(entries)))
    note = "The printed length is in characters of the string of token ids (docs/protocol.md)."
    source = "Deutch et al., appendix A and the notebooks behind it"
    return [Table("data", "The data", tuple(found), tuple(rows), 1, source, notes=(note,))]
