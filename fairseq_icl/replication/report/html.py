"""The report as one self-contained HTML file: verdicts, tables, charts, examples, and the configuration of every cell.

It opens from disk and asks for nothing: its style and script (page.css, page.js) are in it, and a content security
policy lets no other script run and no request leave. Everything that comes from files is escaped by the template
(page.html), or becomes text in the script.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from fairseq_icl.replication.report import text
from fairseq_icl.replication.report.charts import Chart
from fairseq_icl.replication.report.claims import FAILS, HOLDS, OPEN, TOO_FEW, authors_verdicts, summary
from fairseq_icl.replication.report.published import published_figures
from fairseq_icl.replication.report.run import Run

if TYPE_CHECKING:
    from fairseq_icl.replication.report import Contents

HERE = Path(__file__).parent
MOST_BYTES = 2_500_000  # of all examples together: the page stays small enough to be sent around
CLASSES = {HOLDS: "holds", FAILS: "fails", OPEN: "open", TOO_FEW: "open"}


def page(contents: "Contents", charts: Sequence[Chart]) -> str:
    """The whole report."""
    run, verdicts = contents.run, contents.verdicts
    models = list(run.planned["model"].drop_duplicates())
    script, style, template = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css", "html"))
    sheets = {sheet.name: sheet for sheet in map(text.sheet, contents.sheets)}
    copied = {name: {"csv": text.csv_of(sheet.lines), "latex": text.latex(sheet)} for name, sheet in sheets.items()}
    examples = page_examples(run)
    data = {"charts": [chart.data() for chart in charts], "sheets": copied, "examples": examples}
    theirs = [("the authors' own runs (1.3b)", authors_verdicts())] if verdicts else []
    tables = [("papers", "The papers' tables", contents.papers), ("variants", "Variants", contents.comparisons)]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"text": text, "summary": summary, "anchor": anchor, "classes": CLASSES}
    return environment.from_string(template).render(
        title=f"Report: {', '.join(run.experiments)}",
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        script=script,
        # A data block is not run; "<" cannot end it early.
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        contents=contents,
        sheets=sheets,
        papers=published_figures()["papers"],
        columns=[*((f"here: {model}", found) for model, found in verdicts.items()), *theirs],
        tables=[(name, words, _paired(found, models)) for name, words, found in tables if found],
        overviews=_paired(contents.overviews, models),
        charts=_paired(charts, models),
        numbers={chart.name: number for number, chart in enumerate(charts)},
        examples=examples,
        cells=_cells(run),
    )


def _paired(items: Sequence[Any], models: Sequence[str]) -> list[list[Any]]:
    """Tables or charts in groups that differ in the model alone: they stand side by side where the page is wide."""
    names = "|".join(map(re.escape, sorted(models, key=len, reverse=True))) if len(models) > 1 else "(?!)"
    return [list(group) for _, group in groupby(items, key=lambda item: re.sub(names, "", item.title))]


def _cells(run: Run) -> Iterator[tuple[str, str, str]]:
    """Every planned cell: key, what it is, and its configuration (none: it is missing)."""
    for key, group in run.planned.groupby("key", sort=False):
        cell, variants = group.iloc[0], "; ".join(filter(None, group["variant"]))
        place = f"{cell['model']}, {cell['init']}, {cell['dataset']}, seed {cell['seed']}"
        label = f"{place}, permutation {cell['permutation']}, {cell['method']}{variants and f' [{variants}]'} ({key})"
        known = key in run.configurations
        yield key, label, json.dumps(run.configurations[key], indent=1, ensure_ascii=False) if known else ""


def page_examples(run: Run) -> list[dict[str, Any]]:
    """Examples that cells of the first seed kept, as many as there is room for; what is not re-initialised first."""
    cells = run.planned[run.planned["finished"] & (run.planned["variant"] == "")]
    cells = cells.drop_duplicates(["model", "init", "dataset", "method"])
    cells = cells.sort_values("init", key=lambda init: init != "pretrained", kind="stable")
    groups, room = [], MOST_BYTES
    for cell in cells.to_dict("records"):
        kept = run.cell_folder(cell["model"], cell["key"]).examples() or {}
        group = {name: str(cell[name]) for name in ("model", "init", "dataset", "method", "seed", "key")} | kept
        size = len(json.dumps(group, ensure_ascii=False).encode())
        if kept and size <= room:
            groups.append(group)
            room -= size
    return groups


def anchor(kind: str, name: object) -> str:
    """The name of a place in the page; keys and names come from files, which may hold anything."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]', '-', text.file_name(str(name)))}"
