"""The data statistics of a dataset: rows, average tokens of an example, demonstrations that fit into the model."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from fairseq_icl.prompts import sampling
from fairseq_icl.prompts.build import MAX_VALIDATION, RowEncoder
from fairseq_icl.prompts.catalogue import DatasetSpec
from fairseq_icl.prompts.readers import read_split
from fairseq_icl.prompts.tokens import EOS, Encode


@dataclass(frozen=True)
class Statistics:
    """One line of the table."""

    dataset: str
    train_rows: int
    valid_rows: int
    average_tokens: float
    """Tokens of a training example: input and gold label, without BOS and EOS."""
    longest_query: int
    """Tokens of the longest evaluation sequence, with BOS and label."""
    fitting: int
    """Demonstrations of average length that fit beside the longest evaluation sequence."""


def dataset_statistics(
    spec: DatasetSpec, folder: Path, encode: Encode, *, max_positions: int = 2048, num_rows: int | None = None
) -> Statistics:
    """The statistics over all training rows, or over the first `num_rows` after shuffling, and the evaluation rows."""
    encoder = RowEncoder(spec, encode, EOS, max_positions=sys.maxsize)
    train, valid = read_split(folder, spec, "train"), read_split(folder, spec, "valid")
    lengths = []
    for i in sampling.shuffled(len(train), sampling.VALIDATION_SEED)[:num_rows]:
        example = encoder.query(train[i])
        lengths.append(len(example.inputs[example.gold]) + len(example.labels[example.gold]))
    evaluated = sampling.shuffled(len(valid), sampling.VALIDATION_SEED)[:MAX_VALIDATION]
    longest = max(encoder.query(valid[i]).longest for i in evaluated)
    average = sum(lengths) / len(lengths)
    return Statistics(spec.name, len(train), len(valid), average, longest, num_fitting(average, longest, max_positions))


def num_fitting(length: float, longest: int, max_positions: int) -> int:
    """The largest n with BOS + n * (length + EOS) + longest < max_positions: the authors' rule for equal lengths."""
    return max(0, math.ceil((max_positions - longest - 1) / (length + 1)) - 1)
