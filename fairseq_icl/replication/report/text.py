"""Tables and verdicts as Markdown, LaTeX, CSV and plain text for the terminal."""

import csv
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fairseq_icl.replication.report.claims import LEVEL, NO_DATA, Effect, Verdict, authors_verdicts
from fairseq_icl.replication.report.tables import ONE_EXAMPLE, PLAIN, Entry, Table
from fairseq_icl.results import text_table

OURS, INTERVAL, RATIO, DIFFERENCE, REPEATS = "ours", "95 % interval", "length ratio", "difference", "their repeats"
AUTHORS = {precision: f"authors' runs, {precision}" for precision in ("fp16", "fp32")}
MISSING, UNDEFINED, NOT_PLANNED = "missing", "0/0", "–"
NEGATIVE = re.compile(r"-\d+(\.\d+)?(e[+-]\d+)?|-inf")
SPECIAL = {character: f"\\{character}" for character in "_%&#${}"}
SPECIAL |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {"–": "--", "±": r"$\pm$", "−": "$-$"}


class Line(NamedTuple):
    """One line of a row of a table: all numbers of one kind. Only a row's first line has its label."""

    label: str
    kind: str
    cells: list[str]
    entries: tuple[Entry, ...]


def shown(entry: Entry, decimals: int, reference: str) -> dict[str, str]:
    """What an entry has to say, by the kind of number.

    Ours is always there: mean ± SD over seeds; else `0/0`, `missing` (planned, without a result) or a dash.
    """

    def digits(value: float) -> str:
        seems_zero = 1e-9 < abs(value) < 0.5 * 10**-decimals  # a learning rate, say; less is rounding
        return f"{value:.0e}" if seems_zero else f"{value:.{decimals}f}"

    def number(mean: float, sd: float | None) -> str:
        return digits(mean) + (f" ± {digits(sd)}" if sd is not None else "")

    said = {OURS: MISSING if entry.planned else NOT_PLANNED}
    if entry.is_undefined:
        said[OURS] = entry.mark or UNDEFINED
    elif entry.mean is not None:
        said[OURS] = number(entry.mean, entry.sd) + (f" ({entry.mark})" if entry.mark else "")
    if entry.low is not None and entry.high is not None:  # the interval of a single example is that example
        limits = f"[{entry.low:.{decimals}f}, {entry.high:.{decimals}f}]"
        said[INTERVAL] = ONE_EXAMPLE if entry.mark == ONE_EXAMPLE else limits
    if entry.length_ratio is not None:
        said[RATIO] = number(entry.length_ratio, None)
    if entry.published is not None:
        if reference != PLAIN:  # the plain run is the first row already
            said[reference] = number(entry.published, entry.published_sd) + ("?" if entry.doubtful else "")
        difference = "" if entry.difference is None else f"{entry.difference:+.{decimals}f}"
        said[DIFFERENCE] = (difference or NOT_PLANNED) + (" (exact)" if entry.is_exact else "")
    said |= {AUTHORS[precision]: number(*numbers) for precision, numbers in entry.authors.items()}
    if entry.repeats is not None:  # a digit more than the table has
        said[REPEATS] = f"{entry.repeats:.{decimals + 1}f}"
    return said


@dataclass(frozen=True)
class Sheet:
    """A table as text: its head and its lines, of which the first `names` columns are words."""

    name: str
    title: str
    lines: list[list[str]]
    notes: list[str]
    names: int = 2
    of_numbers: Sequence[Line] = ()  # the same lines, with the entries behind them


def sheet(table: Sheet | Table, *, intervals: bool = True) -> Sheet:
    """A table of numbers as text: of each row a line for our numbers, and one for every other kind that it has."""
    if isinstance(table, Sheet):
        return table
    order = [OURS, *([INTERVAL] if intervals else []), RATIO, table.reference, *AUTHORS.values(), DIFFERENCE, REPEATS]
    found = []
    for label, entries in table.rows:
        said = [shown(entry, table.decimals, table.reference) for entry in entries]
        for kind in (kind for kind in order if any(kind in one for one in said)):
            cells = [one.get(kind, NOT_PLANNED) for one in said]
            found.append(Line(label if kind == OURS else "", kind, cells, entries))
    names = 1 if all(line.kind == OURS for line in found) else 2  # numbers of one kind need no word for it
    lines: list[list[str]] = [[*[""] * names, *table.columns]]
    lines += [[*(line.label, line.kind)[:names], *line.cells] for line in found]
    source = [f"Source: {table.source}."] if table.source else []
    return Sheet(table.name, table.title, lines, [*source, *table.notes], names, found)


VERDICT_HEAD = ["claim", "source", "here", "effect", "control", "why", "all claims together"]
VERDICT_HEAD += ["authors' runs", "their effect", "their why"]
VERDICT_NOTES = [
    "Effect: what the claim is about, where it is decided (on average over the datasets, or at the least clear of the "
    "places that the claim needs), with the interval that decides: over draws of demonstrations and examples, 95 % or, "
    "where some of several places are enough, more (of the authors' runs: over draws; their examples are not known). "
    "Control: the same of what means nothing, a random update as long as the true one. Undecided says what would "
    "decide. Each claim is tested by itself, with an error of at most 2.5 % on either side (docs/verdicts.md); all "
    "claims together: what is left of it if no error at all is wanted among them (Holm's correction)."
]


def verdict_sheet(model: str, verdicts: Sequence[Verdict]) -> Sheet:
    """What became of every claim: on this run, and on the authors' own runs."""
    lines = [VERDICT_HEAD]
    for verdict, theirs in zip(verdicts, authors_verdicts(), strict=True):
        own = [verdict.status, decided_by(verdict), effect_text(verdict.control), verdict.reason]
        other = [theirs.status, decided_by(theirs), theirs.reason]
        lines.append([verdict.claim.says, verdict.claim.source, *own, verdict.corrected, *other])
    title = f"Do the papers' claims hold? {model}"
    return Sheet(f"verdicts_{model}", title, lines, VERDICT_NOTES, names=len(VERDICT_HEAD))


def effect_text(effect: Effect | None, level: float = LEVEL) -> str:
    """An effect with its interval, if it has one."""
    if effect is None:
        return NOT_PLANNED
    low, high = effect.interval(level)
    return f"{effect.value:+.3f}" + ("" if effect.problem else f" [{low:+.3f}, {high:+.3f}]")


def decided_by(verdict: Verdict) -> str:
    """The effect that decides a claim, with the interval that does, and where it is."""
    if verdict.judged is None:
        return NOT_PLANNED
    place = verdict.judged.place
    return f"{effect_text(verdict.judged, verdict.judged_at)} {'in' if place.startswith('layer ') else 'on'} {place}"


def plain(table: Table) -> str:
    """The table for a terminal, without intervals."""
    shown = sheet(table, intervals=False)
    return "\n".join([shown.title, text_table(shown.lines, names=shown.names), *table.notes])


def plain_verdicts(verdicts: Sequence[Verdict]) -> str:
    """The verdicts for a terminal: one line for every claim that could be asked."""
    lines = [["claim", "here", "effect where it is decided", "authors' runs"]]
    for verdict, theirs in zip(verdicts, authors_verdicts(), strict=True):
        if verdict.status != NO_DATA:
            lines.append([verdict.claim.name, verdict.status, decided_by(verdict), theirs.status])
    return text_table(lines, names=4) if len(lines) > 1 else ""


def markdown(table: Sheet | Table) -> str:
    """The table in Markdown."""
    shown = sheet(table)
    lines = ["| " + " | ".join(map(marked, line)) + " |" for line in shown.lines]
    lines.insert(1, "|" + "---|" * shown.names + "---:|" * (len(shown.lines[0]) - shown.names))
    return "\n".join([f"### {marked(shown.title)}", "", *lines, "", *map(marked, shown.notes), ""])


def marked(text: str) -> str:
    """`text` in one line with Markdown's and HTML's special characters made literal."""
    # An underscore or a star inside a word (sim_aou) is literal already.
    text = re.sub(r"[\\`<>\[\]|]|(?<!\w)[*_]|[*_](?!\w)", lambda found: f"\\{found[0]}", " ".join(text.splitlines()))
    return re.sub(r"&(?=\w|#)", "&amp;", text)


def latex(table: Sheet | Table) -> str:
    """The table in LaTeX (booktabs)."""
    shown = sheet(table)
    columns = "l" * shown.names + "r" * (len(shown.lines[0]) - shown.names)
    head, *body = [" & ".join(map(escaped, line)) + r" \\" for line in shown.lines]
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
    caption = " ".join([f"{shown.title}.", *shown.notes])
    lines += [*body, r"\bottomrule", r"\end{tabular}", rf"\caption{{{escaped(caption.strip())}}}"]
    return "\n".join([*lines, rf"\label{{tab:{file_name(shown.name)}}}", r"\end{table}", ""])


def escaped(text: str) -> str:
    """`text` with LaTeX's special characters made literal."""
    return "".join(SPECIAL.get(character, character) for character in " ".join(text.splitlines()))


def file_name(text: str) -> str:
    """`text` as a name for files, LaTeX labels and links: what is no letter, digit, dot or dash becomes a dash."""
    safe = re.sub(r"[^A-Za-z0-9_.=-]+", "-", text).lstrip(".")[:150]
    # Two names must stay two.
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:6]}"


def comma_separated(tables: Sequence[Table]) -> str:
    """All tables as one CSV, a line for every place."""
    names = ["mean", "sd", "low", "high", "runs", "planned", "published", "published_sd", "difference", "doubtful"]
    names += ["length_ratio"]
    lines = [["table", "row", "column", *names, "authors_fp16", "authors_fp32", "reference", "cells"]]
    for table in tables:
        for label, entries in table.rows:
            for column, entry in zip(table.columns, entries, strict=True):
                values = [getattr(entry, name) for name in names]
                values += [entry.authors.get(precision, (None,))[0] for precision in AUTHORS]
                told = ["" if x is None else f"{x:.6g}" if isinstance(x, float) else str(x) for x in values]
                lines.append([table.name, label, column, *told, table.reference, " ".join(map(str, entry.keys))])
    return csv_of(lines)


def csv_of(lines: Sequence[Sequence[str]]) -> str:
    """Lines of text cells as CSV that no spreadsheet takes for formulas; negative numbers stay numbers."""
    text = io.StringIO()
    safe = [[cell if NEGATIVE.fullmatch(cell) else spreadsheet_safe(cell) for cell in line] for line in lines]
    csv.writer(text, lineterminator="\n").writerows(safe)
    return text.getvalue()


def spreadsheet_safe(text: str) -> str:
    """`text` with a quote in front if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
