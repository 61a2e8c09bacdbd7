"""Batches: every query once, shortest first, and never more work than allowed."""

import pytest
import torch

from fairseq_icl.observing.layout import Packed, lay_out, plan_batches, sequences_of
from fairseq_icl.prompts.encoding import Query
from tests.observing.tiny import make_queries


def longest_of(query: Query) -> int:
    return max(len(tokens) + len(label) for tokens, label in zip(query.inputs, query.labels, strict=True))


def test_plan_sorts_by_length_and_bounds_the_tokens() -> None:
    queries = make_queries("multi", count=40)
    batches = plan_batches(queries, max_tokens=60)
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(40))
    lengths = [longest_of(queries[index]) for index in order]
    assert lengths == sorted(lengths)
    for batch in batches:
        tokens = sum(len(sequence) for index in batch for sequence in sequences_of(queries[index], "option0"))
        assert len(batch) == 1 or tokens <= 60


@pytest.mark.parametrize("kind", ["single", "multi", "inputs"])
def test_plan_bounds_the_number_of_queries(kind: str) -> None:
    queries = make_queries(kind, count=40)
    batches = plan_batches(queries, max_tokens=60, max_queries=2)
    assert sorted(index for batch in batches for index in batch) == list(range(40))
    assert max(map(len, batches)) == 2
    assert plan_batches(queries, max_tokens=10**9, max_queries=40) == plan_batches(queries, max_tokens=10**9)


def test_queries_with_one_token_labels_count_as_one_sequence() -> None:
    query = Query(0, 0, ((5, 6, 7),) * 4, ((8,), (9,), (10,), (11,)))
    assert [len(batch) for batch in plan_batches([query] * 10, max_tokens=16)] == [4, 4, 2]
    several = Query(0, 0, ((5, 6),) * 4, ((8, 9), (9, 8), (10, 9), (11, 7)))
    assert [len(batch) for batch in plan_batches([several] * 10, max_tokens=32)] == [2] * 5


def test_labels_share_the_sequences_that_begin_alike() -> None:
    query = Query(0, 1, ((5, 6),) * 4, ((8, 9, 1), (8, 9, 2), (8, 3), (4,)))
    assert sequences_of(query, "option0") == [(5, 6, 8, 9, 1)]
    assert sequences_of(query, "gold") == [(5, 6, 8, 9, 2)]
    assert sequences_of(query, "query") == [(5, 6, 8, 9)]
    own_inputs = Query(0, 0, ((5, 6), (5, 7)), ((8, 9), (8, 9)))
    assert sequences_of(own_inputs, "query") == [(5, 6, 8), (5, 7, 8)]
    layout = lay_out([own_inputs, query], "option0")
    assert layout.sequences == ((5, 6, 8, 9), (5, 7, 8), (5, 6, 8, 9, 1))
    assert list(zip(layout.logit_sequence.tolist(), layout.logit_position.tolist(), strict=True)) == [
        *[(0, 1), (0, 2), (1, 1), (1, 2)],
        *[(2, 1), (2, 2), (2, 3)],
    ]
    assert layout.entry_logits.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 4]
    assert layout.recorded_sequence.tolist() == [0, 2]
    assert layout.recorded_position.tolist() == [3, 4]


def test_thousands_of_labels_need_few_sequences() -> None:
    labels = tuple((first, second) for first in range(100, 150) for second in range(100))
    query = Query(0, 0, ((5, 6),) * len(labels), labels)
    assert len(sequences_of(query, "option0")) == 50


def test_a_query_longer_than_a_batch_is_one_alone() -> None:
    long, short = Query(0, 0, ((5,) * 99,), ((8,),)), Query(1, 0, ((5,),), ((8,),))
    assert plan_batches([long, short, long], max_tokens=50) == [[1], [0], [2]]
    assert plan_batches([]) == []


def test_sequences_are_filled_up_on_the_right_after_the_context() -> None:
    layout = lay_out([Query(0, 0, ((5, 6),) * 2, ((8,), (9,))), Query(1, 1, ((7,),) * 2, ((8,), (9,)))], "query")
    assert layout.tokens(before=(1, 2)).tolist() == [[1, 2, 5, 6], [1, 2, 7, 0]]
    assert layout.recorded_position.tolist() == [1, 0]


def test_packed_sequences_lie_one_after_the_other_without_filling() -> None:
    sequences = [(5, 6, 7), (8,), (9, 10, 11), (12, 13)]
    packed = Packed.of(sequences)
    assert packed.tokens.tolist() == [8, 12, 13, 5, 6, 7, 9, 10, 11]
    assert packed.position.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2]
    assert packed.groups == ((1, 1), (1, 2), (2, 3))
    for number, sequence in enumerate(sequences):
        every = torch.arange(len(sequence))
        assert packed.tokens[packed.row(torch.tensor([number]), every)].tolist() == list(sequence)
    past = packed.past(torch.tensor([2, 1, 3]), torch.tensor([2, 0, 1]))
    assert packed.tokens[past].tolist() == [[9, 10, 11], [8, 8, 8], [12, 13, 13]]
