"""The prose of docs/findings.md: sentences whose numbers are asked of the file of cells whenever the page is made.

Between double braces stand the words of `--ask`; lines `alias = words` in a comment at the head of the prose name words
that come often. The word before a colon says what is put in their place:

    {{a auc_ft}}               mean ± SD over seeds; of one seed its value
    {{a auc_ft minus b}}       the difference, paired by seed, with its interval: +.100 [.050, .150]
    {{interval: a auc_ft}}     the mean with its interval
    {{mean: a auc_ft}}         the mean alone
    {{range: a auc_ft}}        from the smallest to the largest
    {{spread: a auc_ft}}       SD over draws of rounding (or over orders), and over seeds beyond that: .014 and .101
    {{count: differences}}     how many differences there are in the prose; `decided`: how many of their intervals do
                               not hold zero; `together`: how many are left by Holm's correction over all of them
    {{each mean: .a auc_ft}}   a row of a table: with the line `each = x y` at the head {{mean: x.a auc_ft}} | {{mean:
                               y.a auc_ft}}; a point alone is x and y themselves; `each.NAME` is another such line
"""

import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr

from examples.findings.cells import PLAIN, interval_of, rows_of, values_of, wanted_by
from fairseq_icl.replication.report.effects import LEVEL
from fairseq_icl.replication.report.experiments import spreads

HEAD = re.compile(r"\A<!--\n(.*?)-->\n+", re.DOTALL)
ASKED = re.compile(r"\{\{(?:(\w+):\s)?([^{}]+)\}\}")
EACH = re.compile(r"\{\{(each\S*)\s([^{}]+)\}\}")
Words = Sequence[str]


class Asked(NamedTuple):
    """What stands in the place of a number: what kind of number, and the words of `--ask`."""

    kind: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        suffix = f" ({self.kind})" if self.kind in ("range", "spread") else ""
        return f"`{shlex.join(self.words)}`{suffix}"


def filled(file: Path, cells: pd.DataFrame) -> tuple[str, list[list[str]]]:
    """The prose with its numbers; and of each of them the number, the words that ask for it, and if it is a difference
    whether it is decided by itself, and together with all others (these are in bold)."""
    text = file.read_text("utf-8")
    head = HEAD.match(text)
    aliases: dict[str, list[str]] = {}
    for line in head[1].splitlines() if head else ():
        alias, _, words = line.partition(" = ")
        aliases[alias] = words.split() if alias.startswith("each") else expanded(shlex.split(words), aliases)

    def place(found: re.Match[str]) -> str:
        return f"{file}:{found.string.count(chr(10), 0, found.start()) + 1}: {found[0]}"

    for row in EACH.finditer(text):
        if row[1] not in aliases:
            raise ValueError(f"{place(row)}: the head of the prose has no line {row[1]} = PLACE PLACE")
    text = EACH.sub(lambda row: in_each(row[2], aliases[row[1]]), text)
    numbers: dict[Asked, str] = {}
    levels: dict[Asked, float] = {}

    def asked(found: re.Match[str]) -> Asked:
        words = expanded(shlex.split(found[2]), aliases)
        return Asked(found[1] or ("interval" if "minus" in words else "number"), tuple(words))

    for found in ASKED.finditer(text):
        question = asked(found)
        kind, words = question
        if kind == "count" or question in numbers:  # counted once all others are known
            continue
        try:
            if kind == "spread":
                numbers[question] = _spread(cells, words)
                continue
            if kind not in KINDS:
                raise ValueError(f"no kind {kind}; there are {', '.join(KINDS)}, spread")
            values = values_of(cells, words)
            numbers[question] = KINDS[kind](values, words)
        except ValueError as error:
            raise ValueError(f"{place(found)}: {error}") from error
        if kind == "interval" and "minus" in words:
            levels[question] = level_of(values)
    decided = {question for question, level in levels.items() if level <= LEVEL}
    kept = together(levels)
    counts = {"differences": len(levels), "decided": len(decided), "together": len(kept)}

    def put(found: re.Match[str]) -> str:
        question = asked(found)
        number = str(counts[found[2]]) if question.kind == "count" else numbers[question]
        return f"**{number}**" if question in kept else number

    try:
        text = ASKED.sub(put, text)[head.end() if head else 0 :]
    except KeyError as error:
        raise ValueError(f"{file}: no count of {error}; there are {', '.join(counts)}") from error
    told = {one: "all together" if one in kept else "alone" if one in decided else "open" for one in levels}
    return wrapped(text), [[number, str(one), told.get(one, "")] for one, number in numbers.items()]


def in_each(words: str, places: Words) -> str:
    """The same question of every place, as the cells of a row of a table."""
    asked = [
        " ".join(place + word.rstrip(".") if word.startswith(".") else word for word in words.split())
        for place in places
    ]
    return " | ".join("{{" + question + "}}" for question in asked)


def level_of(values: pd.Series) -> float:
    """At which level the mean over seeds is still told from zero, by Student's t (two sides)."""
    error = float(values.std()) / len(values) ** 0.5
    if error == 0:
        return 0.0 if values.mean() else 1.0
    return float(2 * stdtr(len(values) - 1, -abs(values.mean()) / error))


def together(levels: Mapping[Asked, float]) -> set[Asked]:
    """Those that are told from zero if no error at all is wanted among them (Holm's correction)."""
    kept: set[Asked] = set()
    for rank, question in enumerate(sorted(levels, key=lambda one: levels[one])):
        if levels[question] > LEVEL / (len(levels) - rank):
            break
        kept.add(question)
    return kept


def wrapped(text: str) -> str:
    """Paragraphs and points of lists in lines of one length; tables and blocks of code as they are."""

    def fill(found: re.Match[str]) -> str:
        indent = "  " if found[0].startswith("- ") else ""
        words = " ".join(found[0].split())
        return textwrap.fill(words, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [
        re.sub(r"^(?![#|])\S.*(?:\n(?!- )\S.*|\n  \S.*)*", fill, part, flags=re.MULTILINE) for part in parts[::2]
    ]
    return "".join(parts)


def expanded(words: Words, aliases: Mapping[str, list[str]]) -> list[str]:
    """The words with aliases replaced by what they stand for."""
    return [part for word in words for part in aliases.get(word, [word])]


def _mean(values: pd.Series, words: Words) -> str:
    return written(values.mean(), signed="minus" in words)


def _number(values: pd.Series, words: Words) -> str:
    return _mean(values, words) + (f" ± {written(values.std())}" if len(values) > 1 else "")


def _interval(values: pd.Series, words: Words) -> str:
    low, high = interval_of(values, words)
    return f"{_mean(values, words)} [{written(low)}, {written(high)}]"


def _range(values: pd.Series, words: Words) -> str:
    return f"{written(values.min())} to {written(values.max())}"


def _spread(cells: pd.DataFrame, words: Words) -> str:
    wanted = PLAIN | wanted_by(words)
    by, other = ("permutation", "perturbation") if "order=" in wanted["others"] else ("perturbation", "permutation")
    rows = rows_of(cells, {name: value for name, value in wanted.items() if name != by}, may_differ=[by])
    within, over = spreads(rows[rows.groupby("seed")[by].transform("nunique") > 1], ["seed", other])
    if np.isnan(within):
        raise ValueError(f"no seed has several draws of {by}")
    return written(within) if np.isnan(over) else f"{written(within)} and {written(over)}"


KINDS: dict[str, Callable[[pd.Series, Words], str]] = {
    "number": _number,
    "mean": _mean,
    "interval": _interval,
    "range": _range,
}


def written(value: float, signed: bool = False) -> str:
    """.123, 1.23, 12.3; what is smaller than that with its first digit."""
    value = 0.0 if abs(value) < 5e-7 else value  # the file has six places
    places = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1
    text = f"{value:+.{places}f}" if signed else f"{value:.{places}f}"
    if value and abs(value) < 0.0005:
        text = f"{value:+.0e}" if signed else f"{value:.0e}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and "e" not in text else text
