"""Cut a list of queries into batches of similar length."""

from collections.abc import Sequence

from fairseq_icl.observe.layout import Position, sequences_of
from fairseq_icl.prompts.build import Query

MAX_TOKENS = 512
"""Rows that a batch gives to the matrix products: enough for their full speed on a processor (30 rows reach a third of
it, 500 rows nine tenths), few enough that activations stay far below the weights in memory."""


def plan_batches(
    queries: Sequence[Query], position: Position = "option0", max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    """Indices of the queries, shortest first, in batches of at most `max_tokens` tokens (or of one query)."""
    longest = [max(map(len, sequences_of(query, position))) for query in queries]
    batches: list[list[int]] = []
    num_sequences = 0
    for index in sorted(range(len(queries)), key=lambda index: (longest[index], index)):
        num_sequences += len(sequences_of(queries[index], position))
        if not batches or num_sequences * longest[index] > max_tokens:
            batches.append([])
            num_sequences = len(sequences_of(queries[index], position))
        batches[-1].append(index)
    return batches
