"""Which rows, in which order, with which labels: every random choice in the making of prompts.

The order of draws is the authors' (docs/protocol.md): Hugging Face's shuffle is numpy's new generator, permutations of
demonstrations come from numpy's legacy one.
"""

import numpy

from fairseq_icl.settings import Settings

VALIDATION_SEED = 1
"""Evaluation rows are shuffled with this seed whatever the run's seed is."""
NUM_PERMUTATIONS = 5
SWITCHING_STREAM = 7
"""Keeps the generator of label switching apart from the one that shuffles the rows, under the same seed."""


def shuffled(num_rows: int, seed: int) -> list[int]:
    """The row order of Hugging Face's `Dataset.shuffle(seed)`."""
    return numpy.random.default_rng(seed).permutation(num_rows).tolist()


def demonstration_orders(settings: Settings) -> tuple[list[int], list[int]]:
    """The orders of the demonstrations in the ICL prompt and in fine-tuning.

    Five permutations are drawn for the ICL prompt, then five new ones for fine-tuning, and number `permutation`
    (from 0) of each five is used. Index 0 means no permutation where the reading says so, a negative index always does.
    """
    k, permutation = settings.num_demonstrations, settings.permutation
    if permutation < 0 or (permutation == 0 and settings.permutation_zero == "identity"):
        return list(range(k)), list(range(k))
    legacy = numpy.random.RandomState(settings.seed)
    draws = [legacy.permutation(k).tolist() for _ in range(2 * NUM_PERMUTATIONS)]
    icl = draws[permutation]
    return icl, draws[NUM_PERMUTATIONS + permutation] if settings.finetuning_order == "drawn" else list(icl)


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
