"""The pretraining's curve, drawn from fairseq's log: label loss, accuracy on the held-out datasets, level."""

import re
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

NUMBER = r"([\d.]+)"


def read_log(log: str) -> tuple[list[tuple[int, float, int]], dict[str, list[tuple[int, float]]]]:
    """(update, label loss, level) of the training lines, and dataset -> (update, accuracy at k = 16 to 31)."""
    training = re.findall(rf"train_inner .*? label_loss={NUMBER},.* level=(\d+),.* num_updates=(\d+)", log)
    held_out: dict[str, list[tuple[int, float]]] = {}
    pattern = rf"valid on '(\w+)' subset .*accuracy_k16 {NUMBER} .*num_updates (\d+)"
    for dataset, accuracy, update in re.findall(pattern, log):
        held_out.setdefault(dataset, []).append((int(update), float(accuracy)))
    return [(int(update), float(loss), int(level)) for loss, level, update in training], held_out


def plot_curve(log: Path, picture: Path) -> None:
    """Two panels over the updates: label loss with the levels' beginnings, and accuracy on the held-out datasets."""
    training, held_out = read_log(log.read_text(encoding="utf-8"))
    figure = plt.Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([update for update, _, _ in training], [loss for _, loss, _ in training], linewidth=1)
    for before, after in pairwise(training):
        if after[2] > before[2]:
            left.axvline(before[0], color="0.8", linewidth=0.8, zorder=0)
    left.set(xlabel="update", ylabel="label loss (nats)", title="pretraining; grey: episodes widen")
    for dataset, points in held_out.items():
        right.plot(*zip(*points, strict=True), label=dataset, linewidth=1)
    right.set(xlabel="update", ylabel="accuracy", ylim=(0, 1.02), title="held-out, 16 to 31 demonstrations")
    right.legend(fontsize=8)
    figure.savefig(picture, dpi=110)
