"""Which rows, in which order, with which labels: every random choice in the making of prompts.

The order of draws is the authors' (docs/protocol.md): Hugging Face's shuffle is numpy's new generator, permutations of
demonstrations come from numpy's legacy one.
"""

from collections import Counter
from collections.abc import Sequence

import numpy

from fairseq_icl.errors import UserError
from fairseq_icl.files import read_small
from fairseq_icl.settings import Settings

VALIDATION_SEED = 1  # evaluation rows are shuffled with it whatever the run's seed is
NUM_PERMUTATIONS = 5
MAX_DIGITS = 12  # longer ones are not numbers of rows
SWITCHING_STREAM = 7  # keeps the generator of switching apart from the one that shuffles rows, under the same seed


def shuffled(num_rows: int, seed: int) -> list[int]:
    """The row order of Hugging Face's `Dataset.shuffle(seed)`."""
    return numpy.random.default_rng(seed).permutation(num_rows).tolist()


def demonstration_rows(golds: Sequence[int], classes: Sequence[str], settings: Settings) -> list[int]:
    """The k rows of the train file that are demonstrations, in their unpermuted order.

    `golds` are the labels of all its rows, `classes` the label words; empty if every row has options of its own.
    """
    k, chosen = settings.num_demonstrations, settings.demonstrations
    if chosen in ("first", "balanced"):
        order = shuffled(len(golds), settings.seed)
        return order[:k] if chosen == "first" else _balanced(order, golds, classes, k)
    rows = read_rows(chosen)
    if rows and max(rows) >= len(golds):
        raise UserError(f"{chosen}: row {max(rows)}, but the train file has rows 0-{len(golds) - 1}; correct the file")
    if len(rows) < k:
        raise UserError(
            f"{chosen}: {len(rows)} rows, but {k} demonstrations are asked for; give num_demonstrations={len(rows)}"
        )
    return rows[:k]


def read_rows(path: str) -> list[int]:
    """The row numbers in a file, one in a line; what follows a # does not count."""
    try:
        lines = read_small(path).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"demonstrations={path}: cannot be read ({error}); give first, balanced, or a text file of row numbers"
        ) from error
    rows: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < MAX_DIGITS):
            raise UserError(f"{path}:{number}: {text[:40]!r} is not a row number; write one number from 0 in a line")
        if int(text) in rows:
            raise UserError(f"{path}:{number}: row {text} is there twice; remove one of them")
        rows.append(int(text))
    return rows


def _balanced(order: Sequence[int], golds: Sequence[int], classes: Sequence[str], k: int) -> list[int]:
    """The first rows in `order` of every class, k // C of each; the remainder goes to the classes that come next."""
    if not classes:
        raise UserError("demonstrations=balanced: the dataset has no classes to balance; use demonstrations=first")
    share, rest = divmod(k, len(classes))
    taken: Counter[int] = Counter()
    rows = []
    for row in order:
        if taken[golds[row]] < share or (taken[golds[row]] == share and rest):
            rest -= taken[golds[row]] == share
            taken[golds[row]] += 1
            rows.append(row)
    if len(rows) < k:
        scarce = classes[min(range(len(classes)), key=lambda number: taken[number])]
        raise UserError(
            f"demonstrations=balanced: the train file has too few rows with the label {scarce} for {k} demonstrations; "
            "lower num_demonstrations"
        )
    return rows


def demonstration_orders(settings: Settings) -> tuple[list[int], list[int]]:
    """The orders of the demonstrations in the ICL prompt and in fine-tuning.

    Five permutations are drawn for the ICL prompt, then five new ones for fine-tuning, and number `permutation`
    (from 0) of each five is used. Index 0 means no permutation where the reading says so, a negative index always does.
    Beyond the authors' five, number p is drawn after these ten: a permutation for the prompt, then one for fine-tuning.
    """
    k, permutation = settings.num_demonstrations, settings.permutation
    if permutation < 0 or (permutation == 0 and settings.permutation_zero == "identity"):
        return list(range(k)), list(range(k))
    legacy = numpy.random.RandomState(settings.seed)
    draws = [legacy.permutation(k).tolist() for _ in range(2 * max(NUM_PERMUTATIONS, permutation + 1))]
    first, second = permutation, NUM_PERMUTATIONS + permutation
    if permutation >= NUM_PERMUTATIONS:
        first, second = 2 * permutation, 2 * permutation + 1
    return draws[first], draws[second] if settings.finetuning_order == "drawn" else list(draws[first])


def switched_labels(golds: list[int], num_options: list[int], fraction: float, seed: int) -> list[int]:
    """The labels with round(fraction * k) of them, chosen at random, replaced by another one drawn uniformly.

    A switched label never equals the true one. The choice depends on the seed alone, not on the order in which the
    demonstrations are shown, so a prompt and a fine-tuning run with the same seed see the same switched labels.
    """
    generator = numpy.random.default_rng([seed, SWITCHING_STREAM])
    chosen = generator.permutation(len(golds))[: int(fraction * len(golds) + 0.5)]
    labels = list(golds)
    for i in chosen.tolist():
        labels[i] = (golds[i] + int(generator.integers(1, num_options[i]))) % num_options[i]
    return labels
