"""Which queries make a batch, which sequences it needs, where each option's score is read, which token is recorded.

Single-token options need one sequence a query: every option is scored by the logits before the label. Otherwise each
option has its own sequence. Positions count from the first token after the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.build import Query

MAX_TOKENS = 512
"""Rows that a batch gives to the matrix products: enough for their full speed on a processor (30 rows reach a third of
it, 500 rows nine tenths), few enough that activations stay far below the weights in memory."""


def plan_batches(
    queries: Sequence[Query], max_tokens: int = MAX_TOKENS, max_queries: int | None = None
) -> list[list[int]]:
    """Indices of the queries, shortest first, in batches of at most `max_tokens` tokens (or of one query).

    The one batcher of the package: the same queries always meet in the same matrix products, so that a number does not
    depend on the door through which it was asked for.
    """
    lengths = [query.longest - 1 for query in queries]  # BOS is not counted
    batches: list[list[int]] = []
    num_sequences = 0
    for index in sorted(range(len(queries)), key=lambda index: (lengths[index], index)):
        own = 1 if queries[index].single_token else len(queries[index].labels)
        num_sequences += own
        is_full = bool(batches) and len(batches[-1]) == max_queries
        if not batches or is_full or num_sequences * lengths[index] > max_tokens:
            batches.append([])
            num_sequences = own
        batches[-1].append(index)
    return batches


@dataclass(frozen=True)
class Layout:
    """One batch: B sequences for n queries, R rows of logits to read, E (query, option, label token) entries."""

    sequences: tuple[tuple[int, ...], ...]  # B sequences: input, then what is needed of a label
    num_options: Tensor  # (n,)
    logit_sequence: Tensor  # (R,) sequence whose logits are read
    logit_position: Tensor  # (R,) at which of its tokens
    entry_query: Tensor  # (E,)
    entry_option: Tensor  # (E,)
    entry_logits: Tensor  # (E,) row of logits that predicts this label token
    entry_token: Tensor  # (E,)
    entry_weight: Tensor  # (E,) 1 / number of label tokens: an option's score is a mean
    recorded_sequence: Tensor  # (n,)
    recorded_position: Tensor  # (n,)

    def tokens(self, before: Sequence[int] = ()) -> Tensor:
        """The sequences, each after the tokens `before`, filled up on the right: (B, T).

        The filling is token 0 and not the padding symbol: attention is causal, so nothing that is read sees it, and
        without padding symbols fairseq builds no padding mask.
        """
        filled = torch.zeros(len(self.sequences), len(before) + max(map(len, self.sequences)), dtype=torch.long)
        filled[:, : len(before)] = torch.tensor(before, dtype=torch.long)
        for row, sequence in zip(filled, self.sequences, strict=True):
            row[len(before) : len(before) + len(sequence)] = torch.tensor(sequence)
        return filled

    @property
    def first_row(self) -> Tensor:
        """(n,) row of logits that predicts the first label token of each query's option 0."""
        start = torch.full_like(self.num_options, len(self.logit_sequence))
        return start.scatter_reduce(0, self.entry_query, self.entry_logits, "amin")

    def option_scores(self, log_probs: Tensor) -> Tensor:
        """Mean log-probability of each option's label tokens, -inf where a query has fewer options: (n, C)."""
        return self.by_option(log_probs[self.entry_logits, self.entry_token] * self.entry_weight)

    def by_option(self, values: Tensor) -> Tensor:
        """Sums of the entries' `values` (E,) by query and option, -inf where a query has fewer options: (n, C)."""
        options = torch.arange(int(self.num_options.max()))
        scores = torch.zeros(len(self.num_options), len(options))
        scores.index_put_((self.entry_query, self.entry_option), values, accumulate=True)
        return scores.masked_fill(options >= self.num_options[:, None], -torch.inf)


def sequences_of(query: Query, position: str) -> list[tuple[int, ...]]:
    """The sequences that must be run for one query, without the context."""
    if not query.single_token:
        return [tokens + label for tokens, label in zip(query.inputs, query.labels, strict=True)]
    if position == "query":
        return [query.inputs[0]]
    return [query.inputs[0] + query.labels[query.gold if position == "gold" else 0]]


def lay_out(queries: Sequence[Query], position: str) -> Layout:
    """The layout of one batch of queries."""
    sequences: list[tuple[int, ...]] = []
    logit_rows: list[tuple[int, int]] = []
    entries: list[tuple[int, int, int, int]] = []
    recorded: list[tuple[int, int]] = []
    for number, query in enumerate(queries):
        if not all(query.inputs) or not all(query.labels):
            raise UserError(
                f"row {query.row}: an input or a label has no tokens; check the template and the label words"
            )
        first = len(sequences)
        sequences += sequences_of(query, position)
        recorded.append(_recorded(query, position, first))
        if query.single_token:
            entries += [(number, option, len(logit_rows), label[0]) for option, label in enumerate(query.labels)]
            logit_rows.append((first, len(query.inputs[0]) - 1))
            continue
        for option, (tokens, label) in enumerate(zip(query.inputs, query.labels, strict=True)):
            for offset, token in enumerate(label):
                entries.append((number, option, len(logit_rows), token))
                logit_rows.append((first + option, len(tokens) - 1 + offset))
    weights = [1 / len(queries[number].labels[option]) for number, option, _, _ in entries]
    logit_sequence, logit_position = torch.tensor(logit_rows).unbind(1)
    entry_query, entry_option, entry_logits, entry_token = torch.tensor(entries).unbind(1)
    recorded_sequence, recorded_position = torch.tensor(recorded).unbind(1)
    return Layout(
        sequences=tuple(sequences),
        num_options=torch.tensor([len(query.labels) for query in queries]),
        logit_sequence=logit_sequence,
        logit_position=logit_position,
        entry_query=entry_query,
        entry_option=entry_option,
        entry_logits=entry_logits,
        entry_token=entry_token,
        entry_weight=torch.tensor(weights),
        recorded_sequence=recorded_sequence,
        recorded_position=recorded_position,
    )


def _recorded(query: Query, position: str, first: int) -> tuple[int, int]:
    """Sequence and position of the recorded token of one query whose sequences start at number `first`."""
    option = query.gold if position == "gold" else 0
    length = len(query.inputs[option])
    if position != "query":
        length += len(query.labels[option])
    return (first if query.single_token else first + option, length - 1)
