"""The statements as one page: Markdown, or a self-contained HTML file.

    records = run_statements()
    Path("theory.html").write_text(render_html(records))

`python -m fairseq_icl.theory.page` prints the Markdown. Records may come from elsewhere too (a real model, see
`on_decoder`); their texts are escaped in both formats.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fairseq_icl.theory.statements import EXACT, Record, run_exact
from fairseq_icl.theory.trained import run_trained

TITLE = "In-context learning and gradient descent: the statements, executed"
INTRODUCTION = (
    "Every row is one statement, computed twice: as it is claimed, and with one premise removed. Exact statements must "
    f"hold to {EXACT:.0e} in float64 and fail visibly without it; measured ones show a gap beside a larger one. A "
    "question claims nothing: its two numbers are the answer."
)
HEADER = ("statement", "source", "what was computed", "number", "premise removed", "number then", "kind", "holds")

DRAWING = Path(__file__).with_name("layer_causal.png")
"""Drawn by examples/layer_causal_drawing.py."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .5rem .6rem; border-bottom: 1px solid #8886; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; text-align: right; }
.yes { color: #1a7f37; font-weight: 600; }
.no { color: #c8352b; font-weight: 600; }
figure { margin: 2rem 0; } figure img { max-width: 100%; background: white; }
@media (max-width: 60rem) {
  thead { display: none; }
  tr { display: block; padding: .6rem 0; border-bottom: 2px solid #8886; }
  td, td.number { display: block; border: 0; padding: .1rem 0; text-align: left; white-space: normal; }
  td::before { content: attr(data-name) ": "; color: #888; font-weight: 400; }
  td:first-child { font-weight: 600; } td:first-child::before { content: ""; }
}
"""


def run_statements(seed: int = 0, training: bool = True) -> list[Record]:
    """All statements on random problems; without `training` those that need no trained model, in a second."""
    return run_exact(seed) + (run_trained(seed) if training else [])


def format_number(value: float) -> str:
    """Errors near rounding in powers of ten, gaps as decimals."""
    return f"{value:.1e}" if value < 1e-3 or value >= 1e4 else f"{value:.4f}"


def _cells(record: Record) -> tuple[str, ...]:
    return (
        record.statement,
        record.source,
        record.computed,
        format_number(record.value),
        record.premise,
        format_number(record.broken),
        ("exact" if record.exact else "measured") if record.is_claim else "question",
        ("yes" if record.holds else "NO") if record.is_claim else "-",
    )


def render_markdown(records: Sequence[Record], subject: str = "") -> str:
    """A title, an introduction, on request a line about the model that was looked at, and one table."""
    lines = [f"# {TITLE}", "", INTRODUCTION, ""] + ([_plain(subject), ""] if subject else [])
    lines += [_markdown_row(HEADER), "|" + "---|" * len(HEADER)]
    return "\n".join([*lines, *(_markdown_row(_cells(record)) for record in records)]) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is; a bar would end a cell, a line break the row, and < might open a tag."""
    text = " ".join(escape(text, quote=False).split())
    for mark in ("\\", "|", "*", "_", "`", "["):
        text = text.replace(mark, "\\" + mark)
    return text


def render_html(records: Sequence[Record], subject: str = "") -> str:
    """One HTML page that needs no other file: the statements, what they have by layer, and layer-causal descent drawn.

    `subject` is a line about the model that was looked at.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    rows = "\n".join(_html_row(record) for record in records)
    figure = ""
    series = {title: values for record in records for title, values in record.per_layer.items()}
    if series:
        caption = "The model looked at, layer by layer, at the last token of the queries; means over heads and queries."
        figure = _figure(drawn_by_layer(series), "Measures by layer", caption)
    caption = "Vanilla descent has one loss at the top; layer-causal descent has one at every layer and cuts gradients."
    figure += _figure(DRAWING.read_bytes(), "Vanilla and layer-causal gradient descent", caption)
    about = f"<p>{escape(subject)}</p>" if subject else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(TITLE)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(TITLE)}</h1><p>{escape(INTRODUCTION)}</p>{about}\n"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
        f"{figure}</body></html>\n"
    )


def drawn_by_layer(series: Mapping[str, Sequence[float]]) -> bytes:
    """One small panel for each series of numbers by layer, three in a row, as PNG."""
    rows = -(-len(series) // 3)
    figure = Figure(figsize=(12.6, 2.7 * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 3, squeeze=False).flat
    for (title, values), axes in zip(series.items(), panels, strict=False):
        axes.plot(range(1, len(values) + 1), values, color="#22303c", marker="o", markersize=3, linewidth=1.2)
        axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        axes.set_title(title, fontsize=10, color="#22303c")
        axes.set_xlabel("layer", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8)
        if max(values) > 100 * min(values) > 0:
            axes.set_yscale("log")
    for axes in list(panels):
        axes.set_axis_off()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    return picture.getvalue()


def _figure(picture: bytes, alternative: str, caption: str) -> str:
    data = base64.b64encode(picture).decode("ascii")
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(alternative)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _html_row(record: Record) -> str:
    classes = {3: "number", 5: "number", 7: "asked" if not record.is_claim else "yes" if record.holds else "no"}
    cells = (
        f'<td data-name="{escape(HEADER[i])}" class="{classes.get(i, "text")}">{escape(text)}</td>'
        for i, text in enumerate(_cells(record))
    )
    return f"<tr>{''.join(cells)}</tr>"


if __name__ == "__main__":
    print(render_markdown(run_statements()))
