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
"""

import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import stdtr

from examples.findings.cells import PLAIN, interval_of, rows_of, values_of, wanted_by
from fairseq_icl.replication.report.effects import LEVEL
from fairseq_icl.replication.report.experiments import spreads

HEAD = re.compile(r"\A<!--\n(.*?)-->\n+", re.DOTALL)
ASKED = re.compile(r"\{\{(?:(\w+):\s)?([^{}]+)\}\}")
Words = Sequence[str]


def filled(file: Path, cells: pd.DataFrame) -> tuple[str, list[list[str]]]:
    """The prose with its numbers; and of each of them the number, the words that ask for it, and if it is a difference
    whether it is decided by itself, and together with all others."""
    text = file.read_text("utf-8")
    head = HEAD.match(text)
    aliases: dict[str, list[str]] = {}
    for line in head[1].splitlines() if head else ():
        alias, _, words = line.partition(" = ")
        aliases[alias] = expanded(shlex.split(words), aliases)
    numbers: dict[str, str] = {}
    levels: dict[str, float] = {}

    def put(found: re.Match[str]) -> str:
        words = expanded(shlex.split(found[2]), aliases)
        kind = found[1] or ("interval" if "minus" in words else "number")
        if kind == "count":
            return found[0]  # once all others are known
        try:
            if kind not in KINDS:
                raise ValueError(f"no kind {kind}; there are {', '.join(KINDS)}")
            told = KINDS[kind](cells, words)
        except ValueError as error:
            raise ValueError(f"{file}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}: {error}") from error
        suffix = f" ({found[1]})" if found[1] in ("range", "spread") else ""
        place = f"`{shlex.join(words)}`{suffix}"
        numbers[place] = told
        if kind == "interval" and "minus" in words:
            levels[place] = level_of(values_of(cells, words))
        return told

    text = ASKED.sub(put, text)[head.end() if head else 0 :]
    decided = {place for place, level in levels.items() if level <= LEVEL}
    kept = together(levels)
    counts = {"differences": len(levels), "decided": len(decided), "together": len(kept)}
    try:
        text = ASKED.sub(lambda found: str(counts[found[2]]), text)
    except KeyError as error:
        raise ValueError(f"{file}: no count of {error}; there are {', '.join(counts)}") from error
    told = {place: "all together" if place in kept else "alone" if place in decided else "open" for place in levels}
    return wrapped(text), [[number, place, told.get(place, "")] for place, number in numbers.items()]


def level_of(values: pd.Series) -> float:
    """At which level the mean over seeds is still told from zero, by Student's t (two sides)."""
    error = float(values.std()) / len(values) ** 0.5
    if error == 0:
        return 0.0 if values.mean() else 1.0
    return float(2 * stdtr(len(values) - 1, -abs(values.mean()) / error))


def together(levels: Mapping[str, float]) -> set[str]:
    """Those that are told from zero if no error at all is wanted among them (Holm's correction)."""
    kept: set[str] = set()
    for rank, place in enumerate(sorted(levels, key=lambda one: levels[one])):
        if levels[place] > LEVEL / (len(levels) - rank):
            break
        kept.add(place)
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


def _mean(cells: pd.DataFrame, words: Words) -> str:
    return written(values_of(cells, words).mean(), signed="minus" in words)


def _number(cells: pd.DataFrame, words: Words) -> str:
    values = values_of(cells, words)
    return _mean(cells, words) + (f" ± {written(values.std())}" if len(values) > 1 else "")


def _interval(cells: pd.DataFrame, words: Words) -> str:
    low, high = interval_of(cells, words)
    return f"{_mean(cells, words)} [{written(low)}, {written(high)}]"


def _range(cells: pd.DataFrame, words: Words) -> str:
    values = values_of(cells, words)
    return f"{written(values.min())} to {written(values.max())}"


def _spread(cells: pd.DataFrame, words: Words) -> str:
    wanted = PLAIN | wanted_by(words)
    by, other = ("permutation", "perturbation") if "order=" in wanted["others"] else ("perturbation", "permutation")
    rows = rows_of(cells, {name: value for name, value in wanted.items() if name != by}, may_differ=[by])
    within, over = spreads(rows[rows.groupby("seed")[by].transform("nunique") > 1], ["seed", other])
    if np.isnan(within):
        raise ValueError(f"no seed has several draws of {by}")
    return written(within) if np.isnan(over) else f"{written(within)} and {written(over)}"


KINDS: dict[str, Callable[[pd.DataFrame, Words], str]] = {
    "number": _number,
    "mean": _mean,
    "interval": _interval,
    "range": _range,
    "spread": _spread,
}


def written(value: float, signed: bool = False) -> str:
    """.123, 1.23, 12.3; what is smaller than that with its first digit."""
    value = 0.0 if abs(value) < 5e-7 else value  # the file has six places
    places = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1
    text = f"{value:+.{places}f}" if signed else f"{value:.{places}f}"
    if value and abs(value) < 0.0005:
        text = f"{value:+.0e}" if signed else f"{value:.0e}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and "e" not in text else text
