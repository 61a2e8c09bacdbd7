"""A drawing of layer-causal descent beside vanilla descent: where losses are taken and how far gradients reach.

    vanilla        loss = CE(U(h_L))                                        a layer learns from everything above it
    layer-causal   loss = sum_l CE(U(layer_l(stop_gradient(h_{l-1}))))      a layer learns from its own output alone

After Deutch et al. (2024, arXiv 2311.07772): ICL computes layer l from the layers below it, so a descent that is to
resemble ICL must not let information flow down from above.

`python -m examples.layer_causal_drawing fairseq_icl/theory/layer_causal.png` drew the picture of `fairseq-icl theory`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

INK, GRADIENT, FROZEN, LAYER, LOSS = "#22303c", "#c8352b", "#e9ecef", "#d6e6f5", "#fbe3c8"
LAYERS = ("layer 1", "layer 2", "layer 3")
BOTTOM, GAP = 1.55, 1.45
"""Height of the first layer's centre, and from one layer to the next."""
COLUMN, UNEMBEDDING, LOSS_AT = 1.6, 4.35, 6.55
"""Horizontal centres: layers, unembedding U, loss."""


def draw_layer_causal(path: Path) -> None:
    """Write the drawing to a path, whose suffix says the format: png, svg, pdf."""
    # A figure of its own, without pyplot: drawing must not change the state of a notebook's figures.
    figure = Figure(figsize=(12.6, 6.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    vanilla, layer_causal = figure.subplots(1, 2)
    _draw_vanilla(vanilla)
    _draw_layer_causal(layer_causal)
    handles: list[Artist] = [
        Line2D([], [], color=INK, lw=1.8, label="forward pass"),
        Line2D([], [], color=GRADIENT, lw=2.2, ls=(0, (4, 2)), label="gradient"),
        Line2D([], [], color=GRADIENT, lw=3.2, label="cut: values pass upwards, gradients do not pass downwards"),
        Patch(facecolor=LAYER, edgecolor=INK, label="learns"),
        Patch(facecolor=FROZEN, edgecolor=INK, label="frozen"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=11)
    figure.savefig(path, dpi=130)


def _draw_vanilla(axes: Axes) -> None:
    _panel(
        axes,
        "Vanilla gradient descent",
        r"$\mathcal{L} = \mathrm{CE}(U(h_3),\, y)$",
        "One loss at the top. The update of layer 1 depends on layers 2 and 3:\n"
        "information flows down, which it never does in a forward pass.",
    )
    top = _height(len(LAYERS) - 1)
    _draw_column(axes, cut=False)
    _draw_loss(axes, top, r"$\mathcal{L}$", "$h_3$")
    # The gradient retraces the whole forward path, from the loss to the lowest layer.
    _arrow(axes, (LOSS_AT - 0.55, top - 0.2), (UNEMBEDDING + 0.75, top - 0.2), GRADIENT, dashed=True)
    _arrow(axes, (UNEMBEDDING - 0.75, top - 0.2), (COLUMN + 0.95, top - 0.2), GRADIENT, dashed=True)
    for upper in range(len(LAYERS) - 1, 0, -1):
        start, end = (COLUMN + 0.45, _height(upper) - 0.36), (COLUMN + 0.45, _height(upper - 1) + 0.36)
        _arrow(axes, start, end, GRADIENT, dashed=True)


def _draw_layer_causal(axes: Axes) -> None:
    _panel(
        axes,
        "Layer-causal gradient descent",
        r"$\mathcal{L} = \sum_l \mathcal{L}_l, \quad \mathcal{L}_l = \mathrm{CE}(U(h_l),\, y),"
        r" \quad h_l = \mathrm{layer}_l(\mathrm{stop\_gradient}(h_{l-1}))$",
        "A loss at every layer, read through the same frozen $U$. The update of layer $l$\n"
        "depends on layers 1 to $l$ only, as the computation of ICL does.",
    )
    _draw_column(axes, cut=True)
    for index in range(len(LAYERS)):
        height = _height(index)
        _draw_loss(axes, height, rf"$\mathcal{{L}}_{index + 1}$", f"$h_{index + 1}$")
        _arrow(axes, (LOSS_AT - 0.55, height - 0.2), (UNEMBEDDING + 0.75, height - 0.2), GRADIENT, dashed=True)
        _arrow(axes, (UNEMBEDDING - 0.75, height - 0.2), (COLUMN + 0.95, height - 0.2), GRADIENT, dashed=True)


def _panel(axes: Axes, title: str, formula: str, remark: str) -> None:
    axes.set(xlim=(0, 7.4), ylim=(-1.35, 6.6), aspect="equal")
    axes.axis("off")
    axes.text(3.7, 6.35, title, ha="center", va="center", fontsize=16, weight="bold", color=INK)
    axes.text(3.7, 5.72, formula, ha="center", va="center", fontsize=12.5, color=INK)
    axes.text(3.7, -0.75, remark, ha="center", va="center", fontsize=11, color=INK, linespacing=1.4)


def _height(index: int) -> float:
    return BOTTOM + GAP * index


def _draw_column(axes: Axes, cut: bool) -> None:
    """Embedding and layers with the forward pass between them; with `cut`, a bar across every connection of layers."""
    below = BOTTOM - 1.3
    _box(axes, COLUMN, below, 1.9, 0.6, "embedding", FROZEN)
    for index, name in enumerate(LAYERS):
        height = _height(index)
        _box(axes, COLUMN, height, 1.9, 0.72, name, LAYER)
        start, end = (below + 0.3 if index == 0 else _height(index - 1) + 0.36), height - 0.36
        _arrow(axes, (COLUMN, start), (COLUMN, end), INK)
        if cut:
            middle = (start + end) / 2
            axes.plot([COLUMN - 0.42, COLUMN + 0.42], [middle - 0.09, middle + 0.09], color=GRADIENT, lw=3.2, zorder=5)


def _draw_loss(axes: Axes, height: float, loss: str, state: str) -> None:
    """From a layer's state through U to a loss."""
    _box(axes, UNEMBEDDING, height, 1.5, 0.72, "norm,\nunembed $U$", FROZEN, size=10)
    _box(axes, LOSS_AT, height, 1.1, 0.72, loss, LOSS, size=15)
    _arrow(axes, (COLUMN + 0.95, height + 0.15), (UNEMBEDDING - 0.75, height + 0.15), INK)
    _arrow(axes, (UNEMBEDDING + 0.75, height + 0.15), (LOSS_AT - 0.55, height + 0.15), INK)
    axes.text((COLUMN + UNEMBEDDING) / 2 + 0.1, height + 0.36, state, ha="center", va="center", fontsize=12, color=INK)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, size: float = 12.0
) -> None:
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=color, edgecolor=INK, lw=1.2))
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, dashed: bool = False) -> None:
    line = (0, (4, 2)) if dashed else "solid"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=15,
            lw=2.2 if dashed else 1.8,
            linestyle=line,
            color=color,
            shrinkA=1,
            shrinkB=1,
            zorder=4,
        )
    )


def main(arguments: Sequence[str]) -> None:
    """Draw into the file named by the first argument."""
    draw_layer_causal(Path(arguments[0] if arguments else "layer_causal.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
