"""Which queries make a batch, which sequences it needs, where each option's score is read, which token is recorded.

A query's options share every sequence that they can (`sequences_of`): one is enough for labels of a single token, which
are all scored by the logits before the label. Positions count from the first token after the context.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.prompts import Tokens
from fairseq_icl.prompts.encoding import Query

MAX_TOKENS = 1536
"""Rows that a batch gives to the matrix products: enough for their full speed on a processor (30 rows reach a third of
it, 500 rows nine tenths, 1,024 rows 96 %, 3,072 no more) and for some dozens of labels that meet the vocabulary at
once, few enough that activations stay far below the weights in memory."""


def plan_batches(
    queries: Sequence[Query], max_tokens: int = MAX_TOKENS, max_queries: int | None = None
) -> list[list[int]]:
    """Indices of the queries, shortest first, in batches of at most `max_tokens` tokens (or of one query).

    The one batcher of the package: the same queries always meet in the same matrix products, so that a number does not
    depend on who asked for it.
    """
    batches: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(queries)), key=lambda index: queries[index].longest):  # stable: then by number
        own = sum(map(len, sequences_of(queries[index], "option0")))
        tokens += own
        if not batches or len(batches[-1]) == max_queries or tokens > max_tokens:
            batches.append([])
            tokens = own
        batches[-1].append(index)
    return batches


@dataclass(frozen=True)
class Packed:
    """B sequences one after the other, shortest first: N tokens in all, and nothing that only fills up."""

    tokens: Tensor  # (N,)
    position: Tensor  # (N,) of each token in its sequence
    first: Tensor  # (B,) where each sequence begins; in the order in which they were given
    groups: tuple[tuple[int, int], ...]  # (sequences, length): neighbours of equal length

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "Packed":
        """The sequences packed."""
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        order = lengths.argsort(stable=True)
        sorted_lengths = lengths[order]
        first = torch.empty_like(lengths)
        first[order] = sorted_lengths.cumsum(0) - sorted_lengths
        tokens = torch.tensor([token for index in order.tolist() for token in sequences[index]])
        position = torch.cat([torch.arange(length) for length in sorted_lengths.tolist()])
        sizes, counts = (part.tolist() for part in sorted_lengths.unique_consecutive(return_counts=True))
        return cls(tokens, position, first, tuple(zip(counts, sizes, strict=True)))

    def row(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Where token `position` of a sequence is, both (n,): (n,)."""
        return self.first[sequence] + position

    def past(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Where the tokens of these sequences up to the given one are, (n, K); that one again where there are fewer."""
        columns = torch.arange(int(position.max()) + 1)
        return self.first[sequence, None] + columns.minimum(position[:, None])


@dataclass(frozen=True)
class Layout:
    """One batch: B sequences for n queries, R rows of logits to read, E (query, option, label token) entries."""

    sequences: tuple[Tokens, ...]  # B sequences: input, then what is needed of a label
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
    edited_sequence: Tensor  # (A,) every sequence that has the last token of an input, of which there may be several
    edited_position: Tensor  # (A,) where that token, which predicts the label, is

    def tokens(self, before: Sequence[int] = ()) -> Tensor:
        """The sequences, each after the tokens `before`, filled up on the right: (B, T)."""
        return filled_up([(*before, *sequence) for sequence in self.sequences])

    def after(self, opening: Tokens) -> "Layout":
        """The layout of what follows the tokens that every sequence begins with; positions count from there."""
        length = len(opening)
        if any(sequence[:length] != opening for sequence in self.sequences):
            raise ValueError("a query does not begin with what all queries of its prompts begin with")
        return replace(
            self,
            sequences=tuple(sequence[length:] for sequence in self.sequences),
            logit_position=self.logit_position - length,
            recorded_position=self.recorded_position - length,
            edited_position=self.edited_position - length,
        )

    def option_scores(self, log_probs: Tensor) -> Tensor:
        """Mean log-probability of each option's label tokens, -inf where a query has fewer options: (n, C)."""
        return self.by_option(log_probs[self.entry_logits, self.entry_token].float().cpu() * self.entry_weight)

    def by_option(self, values: Tensor) -> Tensor:
        """Sums of the entries' `values` (E,) by query and option, -inf where a query has fewer options: (n, C)."""
        options = torch.arange(int(self.num_options.max()))
        scores = torch.zeros(len(self.num_options), len(options))
        scores.index_put_((self.entry_query, self.entry_option), values, accumulate=True)
        return scores.masked_fill(options >= self.num_options[:, None], -torch.inf)


def filled_up(sequences: Sequence[Sequence[int]], filling: int = 0) -> Tensor:
    """Sequences filled up on the right: (B, T).

    Not with the padding symbol, for which fairseq builds a mask: attention is causal, so nothing that is read sees it.
    """
    filled = torch.full((len(sequences), max(map(len, sequences))), filling, dtype=torch.long)
    for row, sequence in zip(filled, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return filled


def sequences_of(query: Query, position: str) -> list[Tokens]:
    """The sequences that must be run for one query, without the context, in alphabetical order.

    Every token of every label needs the logits after what stands before it. What is the beginning of another sequence
    is not run by itself, so labels of one token need a single sequence, and long labels share what they have in common.
    """
    needed = {tokens + label[:-1] for tokens, label in zip(query.inputs, query.labels, strict=True)}
    ordered = sorted(needed | {recorded_tokens(query, position)})
    # In this order a sequence stands right before the first one that begins with it.
    following = [*ordered[1:], ()]
    return [one for one, after in zip(ordered, following, strict=True) if after[: len(one)] != one]


def lay_out(queries: Sequence[Query], position: str) -> Layout:
    """The layout of one batch of queries."""
    sequences: list[Tokens] = []
    logit_rows: dict[tuple[int, int], int] = {}  # sequence and position -> row
    entries: list[tuple[int, int, int, int]] = []
    recorded: list[tuple[int, int]] = []
    edited: list[tuple[int, int]] = []
    for number, query in enumerate(queries):
        if not all(query.inputs) or not all(query.labels):
            raise UserError(
                f"row {query.row}: an input or a label has no tokens; check the template and the label words"
            )
        own, first = sequences_of(query, position), len(sequences)
        sequences += own
        shown = recorded_tokens(query, position)
        recorded.append((first + bisect_left(own, shown), len(shown) - 1))
        for place, sequence in enumerate(own, first):
            inputs = [tokens for tokens in dict.fromkeys(query.inputs) if sequence[: len(tokens)] == tokens]
            edited += [(place, len(tokens) - 1) for tokens in inputs]
        for option, (tokens, label) in enumerate(zip(query.inputs, query.labels, strict=True)):
            for offset, token in enumerate(label):
                before = tokens + label[:offset]
                at = (first + bisect_left(own, before), len(before) - 1)  # the first one that begins with it
                entries.append((number, option, logit_rows.setdefault(at, len(logit_rows)), token))
    tensors = [
        torch.tensor([len(query.labels) for query in queries]),
        *torch.tensor(list(logit_rows)).unbind(1),
        *torch.tensor(entries).unbind(1),
        torch.tensor([1 / len(queries[number].labels[option]) for number, option, _, _ in entries]),
        *torch.tensor(recorded).unbind(1),
        *torch.tensor(edited).unbind(1),
    ]
    return Layout(tuple(sequences), *tensors)  # in the order of its fields


def recorded_tokens(query: Query, position: str) -> Tokens:
    """The tokens up to the one of which activations are recorded."""
    option = query.gold if position == "gold" else 0
    return query.inputs[option] + (() if position == "query" else query.labels[option])
