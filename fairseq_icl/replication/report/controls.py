"""What a similarity is for nothing: against the length of the update, for random updates; and the data behind it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from fairseq_icl.metrics import shown_as
from fairseq_icl.replication.report.charts import Chart, Panel, Series
from fairseq_icl.replication.report.published import published_figures
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.tables import Entry, Table
from fairseq_icl.results import LENGTH_RATIO

SIMILARITIES = {"sim_aou_norm": "sim_aou_norm_random_matched", "sim_aou_projected": ""}
"""Metrics to be shown against the length of the update, and what a random update as long has."""
METHODS = ("gd", "lcgd")
LENGTHS = np.geomspace(0.05, 20, 40)
WIDTH, DRAWS = 1024, 20


def against_length(run: Run, model: str) -> Iterator[Chart]:
    """Similarities by layer against how far fine-tuning moves the attention output, in units of ICL's way."""
    plain = run.layers[(run.layers["model"] == model) & (run.layers["variant"] == "")]
    plain = plain[(plain["init"] == "pretrained") & plain["method"].isin(METHODS)]
    table = plain.pivot_table(index=["dataset", "method", "layer"], columns="metric", values="mean", sort=False)
    ratio = f"{LENGTH_RATIO}sim_aou"
    for metric, random in SIMILARITIES.items():
        if not {metric, ratio} <= set(table):
            continue
        panels, told = [], []
        for dataset, own in table.groupby(level="dataset", sort=False):
            series = []
            for method, line in own.groupby(level="method", sort=False):
                tags = {"dataset": str(dataset), "method": str(method), "init": "pretrained"}
                series += [_line(f"{method}", line, ratio, metric, tags)]
                if random in line:
                    series += [_line(f"random, as long as {method}'s", line, ratio, random, tags)]
            panels.append(Panel(str(dataset), series, tags={"dataset": str(dataset)}))
            told.append(f"{dataset}: {', '.join(f'{one.label} {at_one(one.x, one.y)}' for one in series)}")
        name = shown_as(metric)[0]
        caption = (
            f"{model}. A point is a layer (mean over seeds). 1: FT moves the attention output as far as ICL does."
            f" At 1, between the layers on either side of it: {'; '.join(told)}."
        )
        title = f"{name} against the length of the update"
        yield Chart(
            f"against_length_{metric}_{model}",
            title,
            caption,
            panels,
            "length of FT's update / ICL's",
            f"{name} (cosine)",
            scale="log",
            zero=True,
        )


def _line(label: str, line: pd.DataFrame, x: str, y: str, tags: dict[str, str]) -> Series:
    known = line[[x, y]].dropna().sort_values(x)
    return Series(label, list(known[x]), list(known[y]), tags=tags)


def at_one(x: Any, y: Any) -> str:
    """The value at a ratio of 1, between neighbours on the logarithmic axis, if it is reached."""
    if not len(x) or not min(x) <= 1 <= max(x):
        return "not reached"
    return f"{np.interp(0.0, np.log(x), y):.3f}"


def random_updates(run: Run, model: str) -> Iterator[Chart]:
    """SimAOU_norm of two unrelated updates against their length: 1/4 where they double the norm of the state."""
    if "sim_aou_norm_random_matched" not in set(run.summary.loc[run.summary["model"] == model, "metric"]):
        return
    exact = (1 - 1 / np.sqrt(1 + LENGTHS**2)) / 2  # metrics/attention_outputs.py derives it
    drawn = np.array([similarity_of_random(length) for length in LENGTHS[::4]])  # (lengths, draws)
    series = [
        Series("updates orthogonal to each other and to the state", list(LENGTHS), list(exact)),
        Series("drawn", list(LENGTHS[::4]), list(drawn.mean(1)), list(drawn.std(1))),
        Series("both double the norm of the state", [3**0.5], [0.25]),
    ]
    caption = (
        f"Two random updates of the same length in {WIDTH} dimensions, mean and standard deviation of {DRAWS} draws, "
        "and the formula. The second paper (3.1) names 1/4; the limit is 1/2. SimAOU and SimAOU_projected are 0."
    )
    axis = ("length of each update / norm of the state", "SimAOU_norm (cosine)")
    title = "SimAOU_norm of random updates against their length"
    yield Chart(f"random_updates_{model}", title, caption, [Panel("", series)], *axis, scale="log", zero=True)


def similarity_of_random(length: float) -> np.ndarray:
    """SimAOU_norm of pairs of random updates of a length, to a state of length 1: (draws,)"""
    draw = np.random.default_rng(0).standard_normal((3, DRAWS, WIDTH))
    state, *updates = draw / np.linalg.norm(draw, axis=-1, keepdims=True)
    moved = [state + length * update for update in updates]
    one, other = (there / np.linalg.norm(there, axis=-1, keepdims=True) - state for there in moved)
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


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
        entries = [Entry(_number(found[name].get(split)), published=printed.get(name)) for name in found]
        rows.append((label, tuple(entries)))
    note = "The printed length is in characters of the string of token ids (docs/protocol.md)."
    source = "Deutch et al., appendix A and the notebooks behind it"
    return [Table("data", "The data", tuple(found), tuple(rows), 1, source, notes=(note,))]


def _number(number: Any) -> float | None:
    return float(number) if isinstance(number, int | float) else None
