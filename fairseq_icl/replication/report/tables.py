"""The papers' tables with our numbers beside the published ones, and tables that compare variants with each other."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from fairseq_icl.errors import UserError
from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report import published
from fairseq_icl.replication.report.published import inits_of, published_figures
from fairseq_icl.replication.report.run import Run, needs, plain
from fairseq_icl.results import LENGTH_RATIO
from fairseq_icl.settings import READING, nearest

AVERAGE, PLAIN = "average", "plain run"
SHARES = ("accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp", "rpa", "rpa_correct", "rpa_incorrect")
METRICS: tuple[str, ...] = (*SHARES, "sim_aou", "sim_aou_norm", "sim_aou_random", "sim_aou_norm_random")
METRICS += ("sim_am_before", "sim_am_after", "sim_am_delta", "alpha")
METRICS += ("recall_tokens", "recall_examples", "kendall_tokens", "kendall_examples")
"""Metrics that comparison tables show, in this order."""
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

    mean: float | None = None  # None: the cell is not finished, or the value is not defined (`is_undefined`)
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    runs: int = 0
    planned: int = 0
    published: float | None = None
    published_sd: float | None = None
    doubtful: str = ""
    authors: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # precision -> their mean and SD
    repeats: float | None = None  # how far the authors' own repeats of one run (fp16) lie apart
    below_rounding: bool = False  # whether cosines of updates that are not above rounding were left out of it
    keys: tuple[str, ...] = ()
    length_ratio: float | None = None  # of a cosine: how long FT's vector is in units of ICL's
    mark: str = ""  # what has to be known to read the number: one of MARKS

    @property
    def is_undefined(self) -> bool:
        """Whether the cells are finished but have no value: a share of no examples (Rec2FTP if FT mends none)."""
        return self.mean is None and 0 < self.planned == self.runs

    @property
    def difference(self) -> float | None:
        """Ours minus the published figure (or, in comparisons, minus the plain run)."""
        return None if self.mean is None or self.published is None else self.mean - self.published

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
    reference: str = "published"  # what the second number of an entry is
    notes: tuple[str, ...] = ()


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
    tables, known = [], published_figures()["tables"]
    models = list(run.planned["model"].drop_duplicates())
    for name in (name for name in run.tables if name in known):
        for model in models:  # innermost: two models stand side by side
            own = run.planned.loc[run.planned["model"] == model, "dataset"]
            sizes = list(dict.fromkeys(size for row in known[name]["rows"] for size in row.get("published", {})))
            if model in sizes or not sizes or not set(own) & set(known[name]["columns"]):
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
    said = published_figures()["tables"][name]
    paper = published_figures()["papers"][said["paper"]]
    own = run.planned.loc[run.planned["model"] == model, "dataset"].drop_duplicates()
    # The paper's order of columns, as far as the run has them, and then its own.
    columns = [dataset for dataset in said["columns"] if dataset in set(own)]
    columns += [dataset for dataset in own if dataset not in columns]
    rows = [(row["label"], _paper_row(run, said, row, model, size, columns)) for row in said["rows"]]
    entries = [entry for _, row in rows for entry in row]
    notes = [f"Ours: {model}; published: {size}."] if size != model else []
    notes += [f"{said['note']}."] if "note" in said else []
    notes += [
        f"Doubtful: {row['label']}, {dataset}: {why}."
        for row in said["rows"]
        for dataset, why in row.get("doubtful", {}).items()
        if dataset in columns
    ]
    if any(entry.is_undefined for entry in entries):
        notes.append("0/0: a share of no examples, so it has no value here (and the row no average).")
    notes += _notes_of_marks(rows)
    notes += [REPEATS] if any(entry.repeats is not None for entry in entries) else []
    source = f"{paper['authors']}, {paper['title']} ({paper['where']})"
    return Table(name, said["title"], (*columns, AVERAGE), tuple(rows), said["decimals"], source, notes=tuple(notes))


def _paper_row(
    run: Run, table: dict[str, Any], row: dict[str, Any], model: str, size: str, columns: list[str]
) -> tuple[Entry, ...]:
    """The entries of one row of a published table, and their average."""
    printed, scale = table["columns"], 100.0 if table.get("percent") else 1.0
    figures = row.get("published", {}).get(size, {})
    figure, spread = (dict(zip(printed, figures.get(name, []), strict=False)) for name in ("values", "sd"))
    selection = {"variant": "", "init": "pretrained", **row["select"], "model": model}
    metric, inits = selection.pop("metric"), inits_of(selection["init"])
    planned = set(run.planned.loc[run.planned["model"] == model, "init"])
    selection["init"] = next((init for init in inits if init in planned), inits[0])
    entries = []
    for dataset in columns:
        place = selection | {"dataset": dataset}
        about = _authors(row["select"], dataset, scale) if size == published.AUTHORS_MODEL else {}
        about |= {"published": figure.get(dataset), "published_sd": spread.get(dataset)}
        about |= {"doubtful": row.get("doubtful", {}).get(dataset, ""), "planned": len(_select(run.planned, place))}
        entries.append(_measured(_select(run.summary, place), metric, scale, **about))
    # Datasets that the paper's table does not have stand in it, but take no part in an average that is like its own.
    is_whole = columns[: len(printed)] == printed
    averaged = [entry for entry in entries[: len(printed) if is_whole else None] if entry.planned]
    average = figures.get("avg") if is_whole else None
    means = [entry.mean for entry in averaged if entry.mean is not None]
    if not means or len(means) < len(averaged):  # once all planned datasets have a number
        return *entries, Entry(published=average)
    average = average if len(means) == len(printed) else None
    return *entries, Entry(math.fsum(means) / len(means), runs=min(entry.runs for entry in averaged), published=average)


def _authors(select: dict[str, Any], dataset: str, scale: float) -> dict[str, Any]:
    """Of the authors' runs that a row of a published table stands for: mean and SD by precision, and their repeats."""
    variant = select.get("variant", "")
    clip = float(variant.removeprefix("clip_norm=")) if variant.startswith("clip_norm=") else 0.0
    init = inits_of(select.get("init", "pretrained"))[0]
    place = {x: (select["metric"], select.get("method"), init, clip, dataset, x) for x in ("fp16", "fp32")}
    known = published.authors_means() if clip or not variant else {}
    found = {precision: known[run][:2] for precision, run in place.items() if run in known}
    repeats = published.authors_noise().get(place["fp16"], (None,))[0]
    authors = {precision: (mean * scale, number(sd, scale)) for precision, (mean, sd) in found.items()}
    return {"authors": authors, "repeats": number(repeats, scale)}


def _measured(cells: pd.DataFrame, metric: str, scale: float, **about: Any) -> Entry:
    """The entry of a metric, given all rows of `run.summary` that are of its cells."""
    groups = cells.groupby("metric")  # a selection may leave the method open
    means, labels = groups["mean"].max(), groups["least"].min().get("labels_ft", 2.0)
    below = bool(means.get(f"zero_updates_{metric}", 0.0) > 0)
    found = cells[cells["metric"] == metric]
    if found.empty:
        undefined = cells.loc[cells["metric"] == f"undefined_{metric}", "runs"].sum()
        return Entry(runs=int(undefined), mark=NO_UPDATE if below else "", **about)
    mark = ONE_LABEL if labels == 1 and metric in OF_PREDICTIONS else ""
    mark = ONE_EXAMPLE if means.get("examples", 2.0) == 1 else mark
    row, ratio = found.iloc[0], number(groups["mean"].first().get(f"{LENGTH_RATIO}{metric}"))
    about |= {name: number(row.get(name), scale) for name in ("mean", "sd", "low", "high")}
    about = {"below_rounding": below, **about, "runs": int(row["runs"]), "keys": tuple(row["keys"])}
    return Entry(mark=mark, length_ratio=ratio, **about)


def _notes_of_marks(rows: Iterable[tuple[str, Sequence[Entry]]]) -> list[str]:
    entries = [entry for _, row in rows for entry in row]
    found = {entry.mark for entry in entries}
    lengths = [LENGTHS] if any(entry.length_ratio is not None for entry in entries) else []
    noisy = [label for label, row in rows if any(entry.below_rounding for entry in row)]
    below = [BELOW.format(", ".join(noisy))] if noisy else []
    return lengths + below + [text for mark, text in MARKS.items() if mark in found]


def _select(frame: pd.DataFrame, selection: dict[str, Any]) -> pd.DataFrame:
    return frame[(frame[list(selection)] == list(selection.values())).all(axis=1)]


def number(value: Any, scale: float = 1.0) -> float | None:
    """A value as tables have it: None if it is missing or not a number."""
    return None if pd.isna(value) else float(value) * scale


def entries_of(values: Iterable[Any], keys: Sequence[str], scale: float = 1.0) -> tuple[Entry, ...]:
    """Entries whose values all are of the cells with these keys."""
    return tuple(Entry(number(value, scale), runs=len(keys), keys=tuple(keys)) for value in values)


@needs(differing=["variant"])
def comparison_tables(run: Run) -> list[Table]:
    """For every model, init and method with variants: what each variant does to every metric, over all datasets."""
    tables = []
    for (model, init, method), group in run.planned.groupby(["model", "init", "method"], sort=False):
        variants = list(group["variant"].drop_duplicates())
        if len(variants) < 2:
            continue
        chosen = _select(run.summary, {"model": model, "init": init, "method": method})
        metrics = [metric for metric in METRICS if metric in set(chosen["metric"])]
        how = {"mean": "mean", "sd": "mean", "least": "min", "runs": "sum", "keys": "sum"}
        average = chosen.groupby(["variant", "metric"], sort=False).agg(how).reset_index()
        plain_means = average[average["variant"] == ""].set_index("metric")["mean"]
        rows, same = [], []
        for variant in variants:
            own, entries = average[average["variant"] == variant], []
            for metric in metrics:
                scale = shown_as(metric)[2]
                reference = number(plain_means.get(metric), scale) if variant else None
                is_there = metric in set(own["metric"])
                about = {"published": reference, "below_rounding": False}
                entries.append(_measured(own, metric, scale, **about) if is_there else Entry(published=reference))
            differences = {entry.difference for entry in entries} - {None}
            if variant.partition("=")[0] in READING and differences == {0.0}:
                same.append(variant)  # a reading of the layer-causal loss, say, is none of gd's
            else:
                rows.append((variant or "(plain)", tuple(entries)))
        title = f"{method} on {model}, {init}: what each variant does to every metric (mean over datasets and seeds)"
        notes = ["Shares (accuracies, Rec2FTP, RPA) in percent. Differences are to the plain run."]
        notes += _notes_of_marks(rows)
        notes += [f"Left out, since no number differs from the plain run's: {', '.join(same)}."] if same else []
        name, columns = f"variants_{model}_{init}_{method}", tuple(metrics)
        tables.append(Table(name, title, columns, tuple(rows), 3, reference=PLAIN, notes=tuple(notes)))
    return tables


OVERVIEW = {"accuracy_{}": "accuracy", "auc_{}": "AUC"}
OVERVIEW |= {metric: shown_as(metric)[0] for metric in ("rpa", "sim_aou", "sim_am_delta")}


def overview(run: Run, model: str) -> Table:
    """What came out, at a glance: a row for ZSL, ICL and every method, means over datasets and seeds."""
    chosen = run.summary[run.summary["model"] == model]
    chosen = plain(chosen, model) if (chosen["variant"] == "").any() else chosen
    foreign = {str(name): str(name) for said in run.configurations.values() for name in said.get("metrics") or {}}
    columns = {**OVERVIEW, **foreign}
    rows: list[tuple[str, tuple[Entry, ...]]] = []
    for place, own in chosen.groupby(["method", "init", "variant"], sort=False):
        means, keys = own.groupby("metric")["mean"].mean(), tuple(own["keys"].explode().unique())
        label = ", ".join(word for word in place if word not in ("", "pretrained"))
        for side, name in (("ft", label),) if rows else (("zsl", "ZSL"), ("icl", "ICL"), ("ft", label)):
            found = [means.get(x.format(side)) if side == "ft" or "{}" in x else None for x in columns]
            if any(pd.notna(mean) for mean in found):
                rows.append((name, entries_of(found, keys)))
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
    found: dict[str, dict[str, Any]] = {}
    for configuration in run.configurations.values():
        if "rows" in configuration:  # results of earlier versions have none
            counts = {split: record.get("count") for split, record in configuration["rows"].items()}
            found.setdefault(str(configuration["cell"].get("dataset")), {}).update(counts)
    if not found:
        return []
    rows = []
    for label, split in (("train rows", "train"), ("evaluation rows", "valid"), ("mean length as printed", "length")):
        printed = dict(zip(said["columns"], said.get(split, []), strict=False))
        counts = {name: count for name, of in found.items() if isinstance(count := of.get(split), int | float)}
        entries = [Entry(number(counts.get(name)), published=printed.get(name)) for name in found]
        rows.append((label, tuple(entries)))
    note = "The printed length is in characters of the string of token ids (docs/protocol.md)."
    source = "Deutch et al., appendix A and the notebooks behind it"
    return [Table("data", "The data", tuple(found), tuple(rows), 1, source, notes=(note,))]
