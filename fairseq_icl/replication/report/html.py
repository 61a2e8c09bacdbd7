"""The report as one self-contained HTML file: verdicts, tables, charts, examples, and the configuration of every cell.

It opens from disk and asks for nothing: its style and script (page.css, page.js) are in it, and a content security
policy lets no other script run and no request leave. Everything that comes from files is escaped here, or becomes text
in the script.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from fairseq_icl.replication.report.charts import Chart
from fairseq_icl.replication.report.claims import (
    FAILS,
    HOLDS,
    OPEN,
    TOO_FEW,
    Effect,
    Verdict,
    authors_verdicts,
    summary,
)
from fairseq_icl.replication.report.published import published_figures
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.tables import Entry, Table
from fairseq_icl.replication.report.text import (
    MISSING,
    NOT_PLANNED,
    VERDICT_NOTES,
    Sheet,
    csv_of,
    effect_text,
    file_name,
    kinds_of,
    latex,
    sheet,
    verdict_sheet,
)
from fairseq_icl.results.drawing import Drawing

HERE = Path(__file__).parent
MOST_BYTES = 2_500_000
"""Of all examples together: the page stays small enough to be sent around."""
CLASSES = {HOLDS: "holds", FAILS: "fails", OPEN: "open", TOO_FEW: "open"}
READING = (
    "Ours is the mean over seeds ± its sample standard deviation; the interval is the 95 % bootstrap interval over "
    "validation examples (mean of the seeds' limits); the difference is ours minus published; ? marks a doubtful "
    "published figure; authors' runs are the mean of their logs. A number links to the configuration "
    "of the cells behind it."
)


EXAMPLES = (
    '<p class="note">The validation examples on which ICL and fine-tuning disagree most (by half the sum of the '
    "differences of their probabilities), at the first seed. ICL: attention of the observed token to the "
    "demonstrations' tokens, heads added, as a share. FT: the share that fine-tuning, written as attention to its "
    "training tokens (the dual form), would give them.</p>"
    '<div id="example-choices" class="choices"></div><div id="example"></div>'
)


class Page:
    """The parts of a page as they are put together: what it shows, its contents, and the data of its script."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.contents: list[tuple[str, str, list[tuple[str, str]]]] = []
        self.data: dict[str, Any] = {"charts": [], "sheets": {}, "examples": []}

    def section(self, name: str, title: str, items: Iterable[tuple[str, str, str]], before: str = "") -> None:
        """A section of (name, title, HTML) items; none without items."""
        items = list(items)
        if items:
            self.contents.append((name, title, [(item, words) for item, words, _ in items if words]))
            body = "\n".join(html for _, _, html in items)
            self.parts.append(f'<section id="{name}"><h2>{escape(title)}</h2>{before}<div>{body}</div></section>')

    def add_sheet(self, shown: Sheet) -> str:
        """Buttons that copy a table."""
        self.data["sheets"][shown.name] = {"csv": csv_of(shown.lines), "latex": latex(shown)}
        name = escape(shown.name)
        forms = (("csv", "CSV"), ("latex", "LaTeX"))
        buttons = [f'<button data-sheet="{name}" data-form="{form}">copy as {words}</button>' for form, words in forms]
        return f'<div class="actions">{"".join(buttons)}</div>'

    def html(self, title: str) -> str:
        """The whole page."""
        style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        head = (
            f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style>'
        )
        # A data block is not run; "<" cannot end it early.
        content = json.dumps(self.data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        body = "\n".join(self.parts)
        return (
            f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n<div id="page">{self._navigation()}'
            f'<main>\n{body}\n</main></div>\n<script type="application/json" id="data">{content}</script>\n'
            f"<script>{script}</script>\n</body></html>\n"
        )

    def _navigation(self) -> str:
        entries = []
        for name, title, items in self.contents:
            inner = "".join(f'<li><a href="#{escape(item)}">{escape(words)}</a></li>' for item, words in items)
            folded = f"<details><summary>{len(items)} in it</summary><ul>{inner}</ul></details>" if inner else ""
            entries.append(f'<li><a href="#{name}">{escape(title)}</a>{folded}</li>')
        inside = f"<details open><summary>Contents</summary><ul>{''.join(entries)}</ul></details>"
        return f'<nav aria-label="Contents">{inside}</nav>'


def page(
    run: Run,
    verdicts: dict[str, list[Verdict]],
    papers: Sequence[Table],
    comparisons: Sequence[Table],
    figures: Sequence[Chart | Drawing],
) -> str:
    """The whole report; `verdicts` by model."""
    title = f"Report: {', '.join(run.experiments)}"
    made = Page()
    made.parts += ['<button id="theme" type="button">light / dark</button>', f"<h1>{escape(title)}</h1>"]
    made.parts += [f'<p class="answer">{_answer(model, found)}</p>' for model, found in verdicts.items()]
    made.parts.append(_state(run))
    made.section("verdicts", "Do the papers' claims hold?", [("", "", _verdicts(made, verdicts))] if verdicts else [])
    models = list(run.planned["model"].drop_duplicates())
    for name, words, tables in (("papers", "The papers' tables", papers), ("variants", "Variants", comparisons)):
        items = [(anchor("table", table.name), table.title, table_html(table, made)) for table in tables]
        made.section(name, words, _paired(items, models), f'<p class="note">{READING}</p>')
    items = [(anchor("figure", figure.name), figure.title, figure_html(figure, made)) for figure in figures]
    toggles = '<div class="toolbar" id="toggles" role="group" aria-label="What the figures show"></div>'
    made.section("figures", "Figures", _paired(items, models), toggles)
    made.data["examples"] = page_examples(run)
    made.section("examples", "Examples", [("", "", EXAMPLES)] if made.data["examples"] else [])
    made.section("cells", "Cells", [("", "", _cells(run))])
    return made.html(title)


def _paired(items: list[tuple[str, str, str]], models: Sequence[str]) -> list[tuple[str, str, str]]:
    """What differs in the model alone side by side, where the page is wide enough."""
    if len(models) < 2:
        return items

    def without_model(item: tuple[str, str, str]) -> str:
        return re.sub("|".join(map(re.escape, sorted(models, key=len, reverse=True))), "", item[1])

    paired = []
    for _, group in groupby(items, key=without_model):
        first, *others = group
        paired.append((*first[:2], f'<div class="pair">{first[2]}{"" if others else "</div>"}'))
        paired += [(*one[:2], one[2] + ("</div>" if one is others[-1] else "")) for one in others]
    return paired


def _state(run: Run) -> str:
    """What was planned, what is there, and how to read the tables."""
    models = ", ".join(run.planned["model"].drop_duplicates())
    finished = int(run.planned["finished"].sum())
    text = [f"Model: {escape(models)}. {escape(run.computed_in)} {finished} of {len(run.planned)} cells finished."]
    if len(run.missing):
        text.append(f"<strong>{len(run.missing)} missing</strong>: the same command again computes just these.")
    text += [f"<strong>{escape(warning)}</strong>" for warning in run.warnings]
    return f'<p class="note">{" ".join(text)}</p>'


def _answer(model: str, found: Sequence[Verdict]) -> str:
    """The summary, with every claim that it names leading to its row."""
    text = escape(summary(model, found))
    for name in sorted((verdict.claim["name"] for verdict in found), key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){name}(?!\w)", f'<a href="#{anchor("claim", name)}">{name}</a>', text)
    return text


def _verdicts(made: Page, verdicts: dict[str, list[Verdict]]) -> str:
    """The claims, what became of each here and on the authors' own runs."""
    columns = [*verdicts.values(), authors_verdicts()]
    names = [*(f"here: {model}" for model in verdicts), "the authors' own runs (1.3b)"]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("the claim, in our words", *names))
    papers = published_figures()["papers"]
    body = []
    for row in zip(*columns, strict=True):
        claim = row[0].claim
        printed = f" The paper's value: {claim['printed']:g}." if "printed" in claim else ""
        source = f"{papers[claim['source']]['authors']} {papers[claim['source']]['where'].split(';')[0]}."
        about = f'<div class="why">{escape(source)} {escape(claim.get("note", ""))}{printed}</div>'
        cells = "".join(_verdict(verdict, name) for verdict, name in zip(row, names, strict=True))
        body.append(f'<tr id="{anchor("claim", claim["name"])}"><td>{escape(claim["says"])}{about}</td>{cells}</tr>')
    sheets = [(model, made.add_sheet(verdict_sheet(model, found))) for model, found in verdicts.items()]
    buttons = [f"{escape(model) if len(sheets) > 1 else ''}{actions}" for model, actions in sheets]
    return (
        f'{"".join(buttons)}<div class="scroll"><table class="verdicts"><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div><p class="note">{escape(" ".join(VERDICT_NOTES))}</p>'
    )


def _verdict(verdict: Verdict, of: str) -> str:
    cell = f'<td data-of="{escape(of)}">'  # a narrow page has no head to say it
    said = f'<span class="verdict {CLASSES.get(verdict.status, "none")}">{verdict.status}</span>'
    if verdict.average is None:
        return f'{cell}{said}<div class="why">{escape(verdict.reason)}</div></td>'
    places = "".join(_place_row(effect, outcome) for effect, outcome in verdict.places)
    several = f'<summary class="why">{len(verdict.places)} places</summary><table class="places">{places}</table>'
    effect = f'<span class="effect">{escape(effect_text(verdict.average))}</span>'
    control = f'<div class="why">control: {escape(effect_text(verdict.control))}</div>' if verdict.control else ""
    alone = verdict.corrected != verdict.status
    why = verdict.reason + (f"; {verdict.corrected} if all claims are taken together" if alone else "")
    return f'{cell}{said} {effect}{control}<div class="why">{escape(why)}</div><details>{several}</details></td>'


def _place_row(effect: Effect, outcome: str) -> str:
    number = effect.examples if effect.count is None else effect.count
    counts = f"{effect.seeds} seeds" + (f", {number:,} examples" if number else "")
    shown = (escape(effect.place), escape(effect_text(effect)), escape(outcome), counts)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>"


def table_html(table: Table, made: Page) -> str:
    """One table; every number of ours links to its cells."""
    head = "".join(f"<th>{escape(column)}</th>" for column in ("", "", *table.columns))
    body = []
    styles = {"ours": "first", "difference": "difference", "95 % interval": "interval"}
    for label, entries in table.rows:
        for place, (kind, show) in enumerate(kinds_of(entries, table.reference)):
            cells = "".join(_place(entry, show(entry, table.decimals), link=place == 0) for entry in entries)
            names = f"<td>{escape(label) if place == 0 else ''}</td><td class='kind'>{escape(kind)}</td>"
            style = "authors" if kind.startswith("authors' runs") else styles.get(kind, "published")
            body.append(f'<tr class="{style}">{names}{cells}</tr>')
    notes = [f"Source: {table.source}." if table.source else "", *table.notes]
    note = f'<p class="note">{escape(" ".join(n for n in notes if n))}</p>' if any(notes) else ""
    return (
        f'<section class="table" id="{anchor("table", table.name)}"><h3>{escape(table.title)}</h3>'
        f'{made.add_sheet(sheet(table))}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{note}</section>"
    )


def _place(entry: Entry, text: str, *, link: bool) -> str:
    if text == MISSING:
        return f'<td class="missing">{MISSING}</td>'
    shown = escape(text)
    if entry.doubtful and text.endswith("?"):
        shown = f'<span title="{escape(entry.doubtful, quote=True)}">{shown}</span>'
    if link and entry.keys and text != NOT_PLANNED:
        shown = f'<a href="#{anchor("cell", entry.keys[0])}" title="{len(entry.keys)} cell(s)">{shown}</a>'
    return f"<td>{shown}</td>"


def figure_html(figure: Chart | Drawing, made: Page) -> str:
    """One figure: a chart for the script to draw, or a drawing of matplotlib as an image."""
    title = escape(figure.title, quote=True)
    if isinstance(figure, Chart):
        number = len(made.data["charts"])
        made.data["charts"].append(figure.data())
        inner = f'<div class="actions"><button data-chart-csv="{number}">copy as CSV</button></div>'
        inner += f'<div data-chart="{number}"></div>'
    else:
        inner = f'<img alt="{title}" src="data:image/svg+xml;base64,{base64.b64encode(svg(figure)).decode()}">'
    return (
        f'<figure id="{anchor("figure", figure.name)}"><h3>{title}</h3>{inner}'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def svg(drawing: Drawing) -> bytes:
    """The drawing as SVG, without a date, so that the same numbers give the same bytes."""
    content = io.BytesIO()
    drawing.save(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def _cells(run: Run) -> str:
    """Every planned cell with its configuration."""
    parts = []
    for key, group in run.planned.groupby("key", sort=False):
        place, shown = anchor("cell", key), escape(f"{_label(group)} ({key})")
        if key in run.configurations:
            text = escape(json.dumps(run.configurations[key], indent=1, ensure_ascii=False))
            parts.append(f'<details id="{place}"><summary>{shown}</summary><pre>{text}</pre></details>')
        else:
            parts.append(f'<p id="{place}" class="note">{shown}: missing</p>')
    return "\n".join(parts)


def page_examples(run: Run) -> list[dict[str, Any]]:
    """Groups of examples for the page, as many as there is room for: what was not re-initialised comes first."""
    cells = run.planned[run.planned["finished"] & (run.planned["variant"] == "")]
    cells = cells.drop_duplicates(["model", "init", "dataset", "method"])
    cells = cells.sort_values("init", key=lambda init: init != "pretrained", kind="stable")
    groups, room = [], MOST_BYTES
    for cell in cells.to_dict("records"):
        kept = run.cell_folder(cell["model"], cell["key"]).examples()
        if kept is not None:
            group = {name: str(cell[name]) for name in ("model", "init", "dataset", "method", "seed", "key")} | kept
            size = len(json.dumps(group, ensure_ascii=False).encode())
            if size <= room:
                groups.append(group)
                room -= size
    return groups


def anchor(kind: str, name: object) -> str:
    """The name of a place in the page; keys and names come from files, which may hold anything."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]', '-', file_name(str(name)))}"


def _label(group: pd.DataFrame) -> str:
    first = group.iloc[0]
    variants = [variant for variant in group["variant"] if variant]
    named = f" [{'; '.join(variants)}]" if variants else ""
    run = f"seed {first['seed']}, permutation {first['permutation']}"
    return f"{first['model']}, {first['init']}, {first['dataset']}, {run}, {first['method']}{named}"
