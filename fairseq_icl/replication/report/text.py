"""Tables and verdicts as Markdown, LaTeX, CSV and plain text for the terminal."""

import csv
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fairseq_icl.replication.report.claims import Effect, Verdict, authors_verdicts, summary
from fairseq_icl.replication.report.tables import ONE_EXAMPLE, PLAIN, Entry, Table
from fairseq_icl.results import text_table

Show = Callable[[Entry, int], str]
MISSING = "missing"
UNDEFINED = "0/0"
NOT_PLANNED = "–"
NEGATIVE = re.compile(r"-\d+(\.\d+)?")
PRECISIONS = ("fp16", "fp32")
SPECIAL = {character: f"\\{character}" for character in "_%&#${}"}
SPECIAL |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {"–": "--", "±": r"$\pm$", "−": "$-$"}


def ours(entry: Entry, decimals: int) -> str:
    """Our number: mean ± SD over seeds; else `0/0`, `missing` (planned, without a result) or a dash (not planned)."""
    if entry.is_undefined:
        return entry.mark or UNDEFINED
    if entry.mean is None:
        return MISSING if entry.planned else NOT_PLANNED
    text = f"{entry.mean:.{decimals}f}"
    text += f" ± {entry.sd:.{decimals}f}" if entry.sd is not None else ""
    return f"{text} ({entry.mark})" if entry.mark else text


def beside(entry: Entry, decimals: int) -> str:
    """The published number with its SD, marked if doubtful."""
    if entry.published is None:
        return NOT_PLANNED
    text = f"{entry.published:.{decimals}f}"
    text += f" ± {entry.published_sd:.{decimals}f}" if entry.published_sd is not None else ""
    return text + ("?" if entry.doubtful else "")


def of_authors(entry: Entry, decimals: int, precision: str) -> str:
    """What the authors' own runs gave in this precision."""
    if precision not in entry.authors:
        return NOT_PLANNED
    mean, sd = entry.authors[precision]
    return f"{mean:.{decimals}f}" + (f" ± {sd:.{decimals}f}" if sd is not None else "")


def difference(entry: Entry, decimals: int) -> str:
    """Ours minus the published number, with its sign."""
    if entry.difference is None:
        return NOT_PLANNED
    return f"{entry.difference:+.{decimals}f}" + (" (exact)" if entry.is_exact else "")


def repeats(entry: Entry, decimals: int) -> str:
    """How far the authors' own repeats lie apart, with a digit more than the table has."""
    return NOT_PLANNED if entry.repeats is None else f"{entry.repeats:.{decimals + 1}f}"


def interval(entry: Entry, decimals: int) -> str:
    """The 95 % bootstrap interval over examples."""
    if entry.low is None or entry.high is None:
        return NOT_PLANNED
    if entry.mark == ONE_EXAMPLE:  # the interval of a single example is that example
        return ONE_EXAMPLE
    return f"[{entry.low:.{decimals}f}, {entry.high:.{decimals}f}]"


def length_ratio(entry: Entry, decimals: int) -> str:
    """How long the second vector of a cosine is in units of the first."""
    return NOT_PLANNED if entry.length_ratio is None else f"{entry.length_ratio:.{decimals}f}"


def kinds_of(entries: Sequence[Entry], reference: str, *, intervals: bool = True) -> list[tuple[str, Show]]:
    """The lines a row needs: our number always, the others where any of its entries has them."""
    kinds: list[tuple[str, Show]] = [("ours", ours)]
    if intervals and any(entry.low is not None for entry in entries):
        kinds.append(("95 % interval", interval))
    if any(entry.length_ratio is not None for entry in entries):
        kinds.append(("length ratio", length_ratio))
    published = any(entry.published is not None for entry in entries)
    if published and reference != PLAIN:  # the plain run is the first row already
        kinds.append((reference, beside))
    for precision in sorted({precision for entry in entries for precision in entry.authors}):
        kinds.append((f"authors' runs, {precision}", partial(of_authors, precision=precision)))
    kinds += [("difference", difference)] if published else []
    return [*kinds, ("their repeats", repeats)] if any(entry.repeats is not None for entry in entries) else kinds


def grid(table: Table, *, intervals: bool = True) -> list[list[str]]:
    """The table as lines of text cells, the first being the head. Every row has a line for each kind of number."""
    lines = [["", "", *table.columns]]
    for label, entries in table.rows:
        for place, (kind, show) in enumerate(kinds_of(entries, table.reference, intervals=intervals)):
            shown = [show(entry, table.decimals) for entry in entries]
            lines.append([label if place == 0 else "", kind, *shown])
    return lines


@dataclass(frozen=True)
class Sheet:
    """A table as text: its head and its lines, of which the first `names` columns are words."""

    name: str
    title: str
    lines: list[list[str]]
    notes: list[str]
    names: int = 2


def sheet(table: Table, *, intervals: bool = True) -> Sheet:
    """A table of numbers as text."""
    notes = [f"Source: {table.source}."] if table.source else []
    return Sheet(table.name, table.title, grid(table, intervals=intervals), [*notes, *table.notes])


OWN = ["here", "effect", "control", "why", "all claims together"]
VERDICT_HEAD = ["claim", "source", *OWN, "authors' runs", "their effect", "their why"]
VERDICT_NOTES = [
    "Effect: what the claim is about, averaged over datasets, with its 95 % interval over draws of demonstrations and "
    "examples (of the authors' runs: over draws; their examples are not known). Control: the same of what means "
    "nothing, a random update as long as the true one. Undecided says what would decide. Each claim is tested by "
    "itself, with an error of at most 2.5 % on either side (docs/verdicts.md); all claims together: what is left by "
    "Holm's correction."
]


def verdict_sheet(model: str, verdicts: Sequence[Verdict]) -> Sheet:
    """What became of every claim: on this run, and on the authors' own runs."""
    lines = [VERDICT_HEAD]
    for verdict, theirs in zip(verdicts, authors_verdicts(), strict=True):
        own = [verdict.status, effect_text(verdict.average), effect_text(verdict.control), verdict.reason]
        other = [theirs.status, effect_text(theirs.average), theirs.reason]
        lines.append([verdict.claim["says"], verdict.claim["source"], *own, verdict.corrected, *other])
    notes = [summary(model, verdicts), *VERDICT_NOTES]
    return Sheet(f"verdicts_{model}", f"Do the papers' claims hold? {model}", lines, notes, names=len(VERDICT_HEAD))


def effect_text(effect: Effect | None) -> str:
    """An effect with its interval, if it has one."""
    if effect is None:
        return NOT_PLANNED
    low, high = effect.interval()
    return f"{effect.value:+.3f}" + ("" if effect.problem else f" [{low:+.3f}, {high:+.3f}]")


def plain(table: Sheet | Table) -> str:
    """The table for a terminal; of numbers without intervals."""
    shown = sheet(table, intervals=False) if isinstance(table, Table) else table
    notes = table.notes if isinstance(table, Table) else []
    return "\n".join([shown.title, text_table(shown.lines, names=shown.names), *notes])


def plain_verdicts(model: str, verdicts: Sequence[Verdict]) -> str:
    """The verdicts for a terminal: one line each."""
    lines = [["claim", "here", "effect", "authors' runs"]]
    for verdict, theirs in zip(verdicts, authors_verdicts(), strict=True):
        lines.append([verdict.claim["name"], verdict.status, effect_text(verdict.average), theirs.status])
    return "\n".join([f"Do the papers' claims hold? {summary(model, verdicts)}", text_table(lines, names=4)])


def markdown(table: Sheet | Table) -> str:
    """The table in Markdown."""
    shown = sheet(table) if isinstance(table, Table) else table
    head, *body = shown.lines
    lines = ["| " + " | ".join(map(marked, head)) + " |"]
    lines += ["|" + "---|" * shown.names + "---:|" * (len(head) - shown.names)]
    lines += ["| " + " | ".join(map(marked, line)) + " |" for line in body]
    return "\n".join([f"### {marked(shown.title)}", "", *lines, "", *map(marked, shown.notes), ""])


def marked(text: str) -> str:
    """`text` in one line with Markdown's and HTML's special characters made literal."""
    # An underscore or a star inside a word (sim_aou) is literal already.
    text = re.sub(r"[\\`<>\[\]|]|(?<!\w)[*_]|[*_](?!\w)", lambda found: f"\\{found[0]}", " ".join(text.splitlines()))
    return re.sub(r"&(?=\w|#)", "&amp;", text)


def latex(table: Sheet | Table) -> str:
    """The table in LaTeX (booktabs)."""
    shown = sheet(table) if isinstance(table, Table) else table
    head, *body = shown.lines
    columns = "l" * shown.names + "r" * (len(head) - shown.names)
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    lines += [" & ".join(escaped(cell) for cell in head) + r" \\", r"\midrule"]
    lines += [" & ".join(escaped(cell) for cell in line) + r" \\" for line in body]
    caption = " ".join([f"{shown.title}.", *shown.notes])
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{escaped(caption.strip())}}}"]
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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ["mean", "sd", "low", "high", "runs", "planned", "published", "published_sd", "difference", "doubtful"]
    names += ["length_ratio"]
    authors = [f"authors_{precision}" for precision in PRECISIONS]
    writer.writerow(["table", "row", "column", *names, *authors, "reference", "cells"])
    for table in tables:
        for label, entries in table.rows:
            for column, entry in zip(table.columns, entries, strict=True):
                values = [_blank(getattr(entry, name)) for name in names]
                values += [_blank(entry.authors.get(precision, (None,))[0]) for precision in PRECISIONS]
                words = (table.name, label, column, table.reference, " ".join(map(str, entry.keys)))
                name, label_text, column_text, reference, keys = map(spreadsheet_safe, words)
                writer.writerow([name, label_text, column_text, *values, reference, keys])
    return text.getvalue()


def csv_of(lines: Sequence[Sequence[str]]) -> str:
    """Lines of text cells as CSV that no spreadsheet takes for formulas; negative numbers stay numbers."""
    text = io.StringIO()
    safe = [[cell if NEGATIVE.fullmatch(cell) else spreadsheet_safe(cell) for cell in line] for line in lines]
    csv.writer(text, lineterminator="\n").writerows(safe)
    return text.getvalue()


def spreadsheet_safe(text: str) -> str:
    """`text` with a quote in front if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _blank(value: object) -> object:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value
