"""The report as one self-contained HTML file: tables, inline figures, and the configuration of every cell."""

import base64
import io
import json
import re
from collections.abc import Sequence
from html import escape

import pandas as pd

from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.tables import Entry, Table
from fairseq_icl.replication.report.text import MISSING, NOT_PLANNED, kinds_of
from fairseq_icl.results.drawing import Drawing

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #1c1c1c; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: 0.3rem; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #bbb; }
h3 { font-size: 1rem; margin: 1.6rem 0 0.4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.86rem; }
th, td { padding: 0.15rem 0.6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.kind { text-align: left; }
thead th { border-bottom: 2px solid #333; } tbody tr.first td { border-top: 1px solid #ccc; }
td.kind, tr.published td, tr.interval td { color: #555; } tr.difference td { font-style: italic; }
td.missing { border: 1px dashed #555; font-style: italic; }
a { color: inherit; text-decoration: underline dotted; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: 0.86rem; max-width: 60rem; }
pre { background: #f4f4f4; padding: 0.6rem; overflow-x: auto; font-size: 0.78rem; white-space: pre-wrap; }
details { margin: 0.2rem 0; } details:target { outline: 2px solid #333; }
@media print { details { display: none; } }
"""
OPEN_TARGET = """
function openTarget() { const cell = document.getElementById(location.hash.slice(1)); if (cell) { cell.open = true; } }
addEventListener("hashchange", openTarget); addEventListener("load", openTarget);
"""


def page(run: Run, papers: Sequence[Table], comparisons: Sequence[Table], drawings: Sequence[Drawing]) -> str:
    """The whole report."""
    title = f"Report: {', '.join(run.experiments)}"
    parts = [f"<h1>{escape(title)}</h1>", _state(run)]
    if papers:
        parts += ["<h2>The papers' tables</h2>", *(table_html(table) for table in papers)]
    if comparisons:
        parts += ["<h2>Variants</h2>", *(table_html(table) for table in comparisons)]
    if drawings:
        parts += ["<h2>Figures</h2>", *(figure_html(drawing) for drawing in drawings)]
    parts += ["<h2>Cells</h2>", _cells(run)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
    body = "\n".join([*parts, f"<script>{OPEN_TARGET}</script>"])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _state(run: Run) -> str:
    """What was planned, what is there, and how to read the tables."""
    models = ", ".join(run.planned["model"].drop_duplicates())
    finished = int(run.planned["finished"].sum())
    text = [f"Model: {escape(models)}. {finished} of {len(run.planned)} cells finished."]
    if len(run.missing):
        text.append(f"<strong>{len(run.missing)} missing</strong>: the same command again computes just these.")
    text += [f"<strong>{escape(warning)}</strong>" for warning in run.warnings]
    text.append(
        "Ours is the mean over seeds ± its sample standard deviation; the interval is the 95 % bootstrap interval over "
        "validation examples (mean of the seeds' limits); the difference is ours minus published; ? marks a doubtful "
        "published figure. A number links to the configuration of the cells behind it."
    )
    return f'<p class="note">{" ".join(text)}</p>'


def table_html(table: Table) -> str:
    """One table; every number of ours links to its cells."""
    head = "".join(f"<th>{escape(column)}</th>" for column in ("", "", *table.columns))
    body = []
    for label, entries in table.rows:
        for place, (kind, show) in enumerate(kinds_of(entries, table.reference)):
            cells = "".join(_place(entry, show(entry, table.decimals), link=place == 0) for entry in entries)
            names = f"<td>{escape(label) if place == 0 else ''}</td><td class='kind'>{escape(kind)}</td>"
            style = {"ours": "first", "difference": "difference", "95 % interval": "interval"}.get(kind, "published")
            body.append(f'<tr class="{style}">{names}{cells}</tr>')
    notes = [f"Source: {table.source}." if table.source else "", *table.notes]
    note = f'<p class="note">{escape(" ".join(n for n in notes if n))}</p>' if any(notes) else ""
    name = escape(table.name)
    return (
        f'<h3 id="{name}">{escape(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{note}"
    )


def _place(entry: Entry, text: str, *, link: bool) -> str:
    if text == MISSING:
        return f'<td class="missing">{MISSING}</td>'
    shown = escape(text)
    if entry.doubtful and text.endswith("?"):
        shown = f'<span title="{escape(entry.doubtful, quote=True)}">{shown}</span>'
    if link and entry.keys and text != NOT_PLANNED:
        shown = f'<a href="#{escape(anchor(entry.keys[0]))}" title="{len(entry.keys)} cell(s)">{shown}</a>'
    return f"<td>{shown}</td>"


def figure_html(drawing: Drawing) -> str:
    """One figure as an inline SVG image."""
    source = base64.b64encode(svg(drawing)).decode()
    title = escape(drawing.title, quote=True)
    return (
        f'<figure id="{escape(drawing.name, quote=True)}"><h3>{title}</h3>'
        f'<img alt="{title}" src="data:image/svg+xml;base64,{source}">'
        f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
    )


def svg(drawing: Drawing) -> bytes:
    """The figure as SVG, without a date, so that the same numbers give the same bytes."""
    content = io.BytesIO()
    drawing.save(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def _cells(run: Run) -> str:
    """Every planned cell with its configuration."""
    parts = []
    for key, group in run.planned.groupby("key", sort=False):
        place, shown = escape(anchor(key)), escape(f"{_label(group)} ({key})")
        if key in run.configurations:
            text = escape(json.dumps(run.configurations[key], indent=1, ensure_ascii=False))
            parts.append(f'<details id="{place}"><summary>{shown}</summary><pre>{text}</pre></details>')
        else:
            parts.append(f'<p id="{place}" class="note">{shown}: missing</p>')
    return "\n".join(parts)


def anchor(key: object) -> str:
    """The name of a cell's place in the page; keys come from files, which may hold anything."""
    return f"cell-{re.sub(r'[^A-Za-z0-9_.-]', '-', str(key))}"


def _label(group: pd.DataFrame) -> str:
    first = group.iloc[0]
    variants = [variant for variant in group["variant"] if variant]
    named = f" [{'; '.join(variants)}]" if variants else ""
    run = f"seed {first['seed']}, permutation {first['permutation']}"
    return f"{first['model']}, {first['init']}, {first['dataset']}, {run}, {first['method']}{named}"
