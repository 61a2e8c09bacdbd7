"""docs/findings_cells.csv: one row a cell and metric, what is added to it, and what it answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fairseq_icl.replication.report.displacement import AT_EQUAL_LENGTH, at_equal_length, sweeps
from fairseq_icl.replication.report.effects import LEVEL, Part
from fairseq_icl.replication.report.run import IDENTITY, Run, load_run
from fairseq_icl.settings import SETTINGS

CELL = ["model", "dataset", "init", "method", "queries", "limit", "lr", "perturbation", "layer_step_size", "others"]
"""What tells cells apart, besides seed and permutation; `others`: any further setting that is not at its default."""
COLUMNS = [*CELL, "seed", "permutation", "metric", "value", "key", "seconds"]
PLAIN = {"init": "pretrained", "perturbation": "0", "layer_step_size": "", "others": ""}
"""What is meant where nothing is said."""
NAMED = ("num_demonstrations", "precision")
"""Settings with which a model is another one everywhere on the page: where not at their default, its name says them."""
UNSAID = {*CELL, *NAMED, "seed", "permutation", "layer_step", "gradient_norms", "device"}
"""Settings that stand in a column of their own, or change no number of the page."""
WORDS = dict.fromkeys(("limit", "lr", "layer_step_size", "others"), str)
"""Columns that are words, though some look like numbers."""
ANSWERS = {"auc": "AUC, macro over classes", "accuracy": "accuracy", "log_likelihood": "log-likelihood of the label"}
SIMILARITIES = {
    "sim_aou": "SimAOU",
    "sim_aou_random_matched": "SimAOU of a random update of that length",
    "sim_aou_projected": "SimAOU_projected",
    "sim_aou_norm": "SimAOU_norm",
    "sim_aou_norm_random_matched": "SimAOU_norm of a random update of that length",
    "length_ratio_sim_aou": "length ratio, FT / ICL",
    "sim_am_before": "SimAM before fine-tuning",
    "sim_am_after": "SimAM after it",
    "sim_am_delta": "SimAM_delta",
    "kendall_tokens": "Kendall's tau over training tokens",
    "rec2ftp": "Rec2FTP",
    "rpa": "RPA",
    "alpha": "alpha: SimAM_delta between gd and lcgd",
}
SHARES = (*ANSWERS, "rec2ftp", "rpa")  # from 0 to 1; similarities are from -1
UNLIMITED = ("log_likelihood", "demonstration_log_likelihood", "length_ratio")
METRICS = {
    *(f"{metric}_{condition}" for metric in ANSWERS for condition in ("zsl", "icl", "ft")),
    *(f"demonstration_log_likelihood_{condition}" for condition in ("zsl", "ft")),
    *SIMILARITIES,
}
"""What the file has of every cell."""


def cells_file(page: Path) -> Path:
    """The file that a page is made of."""
    return page.with_name(f"{page.stem}_cells.csv")


def with_folders(file: Path, folders: Sequence[Path]) -> pd.DataFrame:
    """The cells of the file and of the folders, which take the place of earlier ones with the same settings."""
    found = [cells_of(load_run(folder)) for folder in folders]
    if file.is_file():
        found.append(pd.read_csv(file, keep_default_na=False, dtype=WORDS))
    cells = pd.concat([some for some in found if len(some)] or found, ignore_index=True)
    newest = cells.groupby(COLUMNS[:-4], sort=False, dropna=False)["key"].transform("first")  # the folders' stand first
    cells = cells[cells["key"] == newest].drop_duplicates(COLUMNS[:-3])
    return cells.sort_values(COLUMNS[:-3], ignore_index=True)


def cells_of(run: Run) -> pd.DataFrame:
    """The run's finished cells, means over examples and layers: COLUMNS, one row a cell and metric."""
    values = run.values[run.values["layer"].isna() & run.values["metric"].isin(METRICS)]
    values = values.drop_duplicates(["key", "metric"]).dropna(subset="value").round({"value": 6})
    if values.empty:  # nothing is finished yet
        return pd.DataFrame(columns=COLUMNS)
    rows = {}
    for model, key in values[["model", "key"]].drop_duplicates().itertuples(index=False):
        settings = {name: known.default for name, known in SETTINGS.items()}
        settings |= run.configurations[key]["cell"]["settings"]
        unusual = {name: x for name, x in settings.items() if name in SETTINGS and x != SETTINGS[name].default}
        others = {name: value for name, value in unusual.items() if name not in UNSAID}
        named = ", ".join(f"{name}={unusual[name]}" for name in NAMED if name in unusual)
        rows[key] = {name: settings[name] for name in ("queries", "perturbation", "layer_step_size")}
        rows[key]["named"] = f" ({named})" if named else ""
        rows[key]["limit"] = "all" if settings["limit"] is None else str(settings["limit"])
        rates = run.configurations[key]["cell"].get("rates") or {"": settings["lr"]}
        rows[key]["lr"] = written_rates(rates) if settings["layer_step"] == "rate" else ""  # which equal steps undo
        rows[key] |= {"others": " ".join(f"{name}={value}" for name, value in sorted(others.items()))}
        rows[key] |= {"seconds": round(run.cell_folder(model, key).seconds(), 1)}
    said = pd.DataFrame.from_dict(rows, orient="index").rename_axis("key").reset_index()
    said = said.assign(layer_step_size=said["layer_step_size"].map(_written))
    values = values.merge(said, on="key")
    return values.assign(model=values["plain_model"] + values["named"])[COLUMNS]


def answer(cells: pd.DataFrame, words: Sequence[str]) -> str:
    """The rows that the words ask for, and what they are on average; of two askings the difference, paired by seed."""
    values = values_of(cells, words)
    mean, count, told = float(values.mean()), len(values), ""
    if count > 1:
        low, high = interval_of(values, words)
        told = f", SD {values.std():.4f}, 95 % [{low:.4f}, {high:.4f}]"
    drawn = "permutation" if values.index.unique("seed").size < count else "seed"
    return f"{values.to_string()}\nmean {mean:.4f}{told} over {count} {drawn}{'s' if count > 1 else ''}"


def interval_of(values: pd.Series, words: Sequence[str]) -> tuple[float, float]:
    """Student's interval of the mean over seeds, within what there can be; ValueError if there is one seed alone."""
    metric = wanted_by([word for word in words if word != "minus"])["metric"]
    if len(values) < 2:
        raise ValueError("one seed has no interval")
    low, high = (0.0 if metric.startswith(SHARES) else -1.0), 1.0
    if metric.startswith(UNLIMITED):
        low, high = -np.inf, np.inf
    for _ in range(("-" in metric) + ("minus" in words)):
        low, high = low - high, high - low
    mean, half = float(values.mean()), half_interval(values)
    return max(mean - half, low), min(mean + half, high)


def values_of(cells: pd.DataFrame, words: Sequence[str]) -> pd.Series:
    """The value of every seed and permutation; after `minus` stand the words in which what is taken away differs.

    A metric may be the difference of two: sim_aou_norm-sim_aou_norm_random_matched. With lr=all or layer_step_size=all
    and a name like sim_aou_at_equal_length it is what a method has where it moves the model as far as ICL does.
    """
    at = words.index("minus") if "minus" in words else len(words)
    wanted = PLAIN | wanted_by(words[:at])
    sides = [wanted, wanted | wanted_by(words[at + 1 :])] if "minus" in words else [wanted]
    values = []
    for side in sides:
        one, *less = [_values(cells, side | {"metric": name}) for name in side["metric"].split("-")]
        values.append(one - less[0] if less else one)
    return (values[0] - values[1] if len(values) > 1 else values[0]).dropna()


def _values(cells: pd.DataFrame, wanted: Mapping[str, str]) -> pd.Series:
    """One metric of one kind of cells, or of a sweep at a length ratio of 1; by seed and permutation."""
    if wanted.get("metric", "").endswith(AT_EQUAL_LENGTH):
        by = [column for column in ("lr", "layer_step_size") if wanted.get(column) == "all"]
        if len(by) != 1:
            raise ValueError(f"{wanted['metric']} is of a sweep; say lr=all or layer_step_size=all")
        free = ["metric", "perturbation", "lr", "layer_step_size"]
        rows = rows_of(cells, {name: value for name, value in wanted.items() if name not in free}, may_differ=free)
        swept = rows[(rows["layer_step_size"] == "") == (by == ["lr"])]
        found = at_equal_length(sweeps(run_of(swept), str(rows["model"].iloc[0]))) if len(swept) else swept
        if found.empty:
            raise ValueError("no seed gets to a length ratio of 1, but at rates that rounding decides")
        values = found.assign(value=found.get(wanted["metric"].removesuffix(AT_EQUAL_LENGTH)))
    else:
        values = rows_of(cells, wanted)
    return values.set_index(["seed", "permutation"])["value"]


def wanted_by(words: Sequence[str]) -> dict[str, str]:
    """COLUMN=VALUE and names of metrics as the columns' values."""
    parts = (word.partition("=") for word in words)
    return dict((name, value) if is_column else ("metric", name) for name, is_column, value in parts)


def rows_of(cells: pd.DataFrame, wanted: Mapping[str, str], may_differ: Sequence[str] = ()) -> pd.DataFrame:
    """The rows with these columns; ValueError if there are none, or of several kinds (but for what may differ)."""
    rows = cells
    for column, value in sorted(wanted.items(), key=lambda item: item[0] != "metric"):  # of which there are most
        if column not in rows:
            raise ValueError(f"the file has no column {column}; it has {', '.join(COLUMNS)}")
        known = rows[column].astype(str)
        rows = rows[known == value]
        if rows.empty:
            raise ValueError(f"no cell with {column}={value} is left; there are {', '.join(sorted(known.unique()))}")
    kinds = [column for column in [*CELL, "metric"] if rows[column].nunique() > 1 and column not in may_differ]
    if kinds:
        some = ", ".join(f"{column}={{{'|'.join(sorted(map(str, rows[column].unique())))}}}" for column in kinds)
        raise ValueError(f"cells of one kind only are averaged; say {some}")
    return rows


def half_interval(values: pd.Series) -> float:
    """Half the interval of the mean of several seeds' values."""
    return Part(float(values.var()) / len(values), len(values) - 1).half(LEVEL)


def _written(value: Any) -> str:
    """A number as the file has it; nothing where there is none."""
    return "" if value is None or pd.isna(value) else f"{float(value):g}"


def written_rates(rates: Mapping[str, float | None]) -> str:
    """The learning rate of a cell's method; gd=0.003,lcgd=0.03 where it compares two that differ in it."""
    values = dict.fromkeys(map(_written, rates.values()))
    return ",".join(values if len(values) == 1 else (f"{name}={_written(rate)}" for name, rate in rates.items()))


def run_of(cells: pd.DataFrame) -> Run:
    """The cells as a run that the report's tables and figures can be asked for; ValueError if searches are mixed."""
    searched = cells[cells["queries"] == "train"]
    for place, search in searched.groupby(["model", "dataset", "method"]):
        for name in ("limit", "others"):
            if search[name].nunique() > 1:
                some = " and ".join(f"{name}={value}" for value in sorted(search[name].unique()))
                raise ValueError(f"{', '.join(place)}: rates were searched with {some}; keep one in the file of cells")
    names = {"lr": cells["queries"] == "train", "perturbation": cells["perturbation"] != 0}
    names["layer_step_size"] = cells["layer_step_size"] != ""
    words = [
        [f"{name}={value}" for name, is_said in names.items() for value in [row[name]] if is_said[at]]
        + row["others"].split()
        for at, row in cells[[*names, "others"]].iterrows()
    ]
    values = cells.assign(variant=[" ".join(said) for said in words], plain_model=cells["model"])
    values = values.assign(layer=np.nan, low=np.nan, high=np.nan)
    planned = values[[*IDENTITY, "plain_model", "seed", "permutation", "key"]].drop_duplicates().assign(finished=True)
    configurations = {}
    for cell in cells.drop_duplicates("key").to_dict("records"):
        settings = {name: cell[name] for name in ("queries", "limit", "perturbation", "seed", "permutation", "init")}
        numbers = {name: pd.to_numeric(cell[name], errors="coerce") for name in ("lr", "layer_step_size")}
        settings |= {name: None if pd.isna(value) else float(value) for name, value in numbers.items()}
        configurations[cell["key"]] = {"cell": {"settings": settings, "dataset": cell["dataset"]}}
    return Run(Path(), planned, configurations, values, experiments=[], tables=[])
