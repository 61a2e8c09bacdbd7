"""The numbers of all models as Markdown tables, mean and standard deviation over seeds, and the training curves."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg

from examples.demo_model import DEMO_DATASETS
from examples.demo_model.train import read_log
from examples.momentum_attention.measuring import COMPARED, DEMONSTRATIONS, LENGTHS, MOMENTUM, MU
from examples.momentum_attention.training import ETAS, Run
from fairseq_icl.files import PACKAGE, with_part, write_atomically

Measured = Mapping[Run, dict[str, Any]]
Number = Callable[[dict[str, Any]], float]
UPDATES_A_SECOND = r" ups=([\d.]+),"
MARKS = ("<!-- tables -->", "<!-- end of tables -->")
SHOWN_K = 8
"""Demonstrations in the table by dataset."""


def write_tables(measured: Measured, folder: Path, page: Path | None = None) -> None:
    """FOLDER/tables.md and FOLDER/curves.png; and the tables in place of what stands between the marks of `page`."""
    logs = {run: (folder / run.name / "train.log").read_text("utf-8") for run in measured}
    parts = [perplexity_table(measured), accuracy_table(measured), shots_table(measured)]
    parts += [similarity_table(measured), time_table(logs)]
    tables = "\n\n".join(parts) + "\n"
    write_atomically(folder / "tables.md", tables)
    draw_curves(logs, folder / "curves.png")
    if page is not None:
        write_atomically(page, with_part(page.read_text("utf-8"), *MARKS, f"\n{tables}"))
        shutil.copy(folder / "curves.png", page.with_suffix(".png"))


def perplexity_table(measured: Measured) -> str:
    """Of all tokens and of label tokens, by length, in the layout of Dai et al.'s table."""
    columns: dict[str, Number] = {}
    for part, title in (("all", "all tokens"), ("labels", "labels")):
        for length in LENGTHS:
            columns[f"{title}, {length}"] = lambda seen, n=str(length), p=part: float(seen["perplexity"][n][p])
    published = _published("perplexity")
    return "\n".join(["Perplexity (lower is better)", "", *_rows("model", columns, measured, 2), "", *published])


def accuracy_table(measured: Measured) -> str:
    """In-context accuracy by dataset, in the layout of Dai et al.'s table."""
    columns: dict[str, Number] = {
        name: lambda seen, n=name: 100 * seen["datasets"][n]["icl"][str(SHOWN_K)] for name in DEMO_DATASETS
    }
    columns["average"] = lambda seen: _average(seen, SHOWN_K)
    title = f"ICL accuracy in percent, {SHOWN_K} demonstrations"
    return "\n".join([title, "", *_rows("model", columns, measured, 1), "", *_published("icl_accuracy")])


def shots_table(measured: Measured) -> str:
    """In-context accuracy by number of demonstrations, averaged over the datasets."""
    columns: dict[str, Number] = {str(k): lambda seen, k=k: _average(seen, k) for k in DEMONSTRATIONS}
    title = "ICL accuracy in percent by number of demonstrations k, average of the four datasets"
    return "\n".join([title, "", *_rows("model, k =", columns, measured, 1)])


def similarity_table(measured: Measured) -> str:
    """ICL against fine-tuning by SGD with and without momentum."""
    columns: dict[str, Number] = {}
    for metric in ("sim_aou", "sim_am_delta", "accuracy_ft"):
        for method, title in (("gd", "SGD"), (MOMENTUM.name, f"momentum {MU}")):
            columns[f"{metric}, {title}"] = lambda seen, m=method, n=metric: mean(
                seen["datasets"][name]["against"][m][n] for name in DEMO_DATASETS
            )
        if metric != "accuracy_ft":
            columns[f"{metric}, difference"] = lambda seen, n=metric: mean(
                seen["datasets"][name]["against"][MOMENTUM.name][n] - seen["datasets"][name]["against"]["gd"][n]
                for name in DEMO_DATASETS
            )
    title = f"ICL ({COMPARED} demonstrations) against fine-tuning, mean over layers, queries and the four datasets"
    return "\n".join([title, "", *_rows("model", columns, measured, 3)])


def time_table(logs: Mapping[Run, str]) -> str:
    """How fast training was at its fastest: whatever else a machine does can only slow it down."""
    speed = {
        run: {"speed": max(map(float, re.findall(UPDATES_A_SECOND, log)), default=0.0)} for run, log in logs.items()
    }
    columns: dict[str, Number] = {"updates a second, at the fastest": lambda seen: float(seen["speed"])}
    return "\n".join(_rows("model", columns, speed, 1))


def _average(seen: dict[str, Any], k: int) -> float:
    return 100 * mean(seen["datasets"][name]["icl"][str(k)] for name in DEMO_DATASETS)


def _rows(first: str, columns: Mapping[str, Number], measured: Measured, decimals: int) -> list[str]:
    """A Markdown table: one row per eta, mean and standard deviation over the seeds that are there."""
    lines = [f"| {first} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for eta in ETAS:
        models = [seen for run, seen in measured.items() if run.eta == eta]
        cells = [_mean_and_deviation([number(seen) for seen in models], decimals) for number in columns.values()]
        lines.append(f"| {f'momentum {eta:g}' if eta else 'ordinary'} | {' | '.join(cells)} |")
    return lines


def _mean_and_deviation(values: list[float], decimals: int) -> str:
    if not values:
        return "-"
    text = f"{mean(values):.{decimals}f}"
    return f"{text} ± {stdev(values):.{decimals}f}" if len(values) > 1 else text


def _published(table: str) -> list[str]:
    """Dai et al.'s figures: other models, data and sizes, for the size of the difference only."""
    papers = yaml.safe_load((PACKAGE / "config" / "published" / "published.yaml").read_text("utf-8"))
    found = papers["other"]["dai2023"]["momentum_attention"][table]
    lines = [f"| Dai et al. 2023 | {' | '.join(found['columns'])} |", "|" + "---|" * (len(found["columns"]) + 1)]
    for row in ("vanilla", "momentum"):
        lines.append(f"| {row} | {' | '.join(str(value) for value in found[row])} |")
    return lines


def draw_curves(logs: Mapping[Run, str], picture: Path) -> None:
    """Two panels over the updates: label loss, and held-out accuracy with 16 to 31 demonstrations; a line per model."""
    figure = plt.Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for run, log in logs.items():
        training, held_out = read_log(log)
        colour = f"C{ETAS.index(run.eta)}"
        label = (f"momentum {run.eta:g}" if run.eta else "ordinary") if run.seed == min(r.seed for r in logs) else None
        left.plot([row[0] for row in training], [row[1] for row in training], color=colour, linewidth=1, label=label)
        points: dict[int, list[float]] = {}
        for values in held_out.values():
            for update, accuracy in values:
                points.setdefault(update, []).append(accuracy)
        updates = sorted(points)
        right.plot(updates, [mean(points[update]) for update in updates], color=colour, linewidth=1, label=label)
    left.set(xlabel="update", ylabel="label loss (nats)", title="pretraining")
    right.set(xlabel="update", ylabel="accuracy", ylim=(0, 1.02), title="held-out, 16 to 31 demonstrations")
    left.legend(fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
