"""Token sequences, masks and context lengths equal those of the authors' code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairseq_icl.prompts.build import Prompts
from tests.golden.folder import Golden


@pytest.fixture
def expected(golden: Golden, golden_case: tuple[str, int]) -> dict[str, Any]:
    return golden.tokens(*golden_case)


@pytest.fixture
def prompts(golden: Golden, golden_case: tuple[str, int], golden_spec: Callable[[str], Path]) -> Prompts:
    return golden.prompts(*golden_case, golden_spec(golden_case[0]))


def sequences(prompts: Prompts, context: tuple[int, ...]) -> tuple[list[list[int]], list[list[bool]], list[int]]:
    """(tokens, masks, gold labels) of every option of every query after the context."""
    tokens, masks, golds = [], [], []
    for query in prompts.queries:
        for inputs, labels in zip(query.inputs, query.labels, strict=True):
            tokens.append([*context, *inputs, *labels])
            masks.append([False] * (len(context) + len(inputs)) + [True] * len(labels))
            golds.append(query.gold)
    return tokens, masks, golds


def test_validation_rows_are_in_the_authors_order(prompts: Prompts, expected: dict[str, Any]) -> None:
    order = expected["shuffled_valid_idx"]
    assert [query.row for query in prompts.queries] == order[: len(prompts.queries)]


@pytest.mark.parametrize("setting", ["zs", "icl"])
def test_query_sequences_masks_and_context_lengths_are_equal(
    prompts: Prompts, expected: dict[str, Any], setting: str
) -> None:
    context = prompts.context if setting == "icl" else prompts.context[:1]
    tokens, masks, golds = sequences(prompts, context)
    assert tokens == expected[setting]["src_tokens"]
    assert masks == expected[setting]["loss_mask"]
    assert golds == expected[setting]["labels"]
    assert [len(context)] * len(tokens) == expected[setting]["context_len"]


def test_finetuning_sequences_and_masks_are_equal(prompts: Prompts, expected: dict[str, Any]) -> None:
    assert [list(sequence.tokens) for sequence in prompts.finetuning] == expected["ft"]["src_tokens"]
    # The first token has nothing before it to predict it from; the authors' mask says True there all the same.
    masks = [[False, *mask[1:]] for mask in expected["ft"]["loss_mask"]]
    assert [list(sequence.scored) for sequence in prompts.finetuning] == masks


def test_demonstrations_are_the_first_rows_of_the_shuffled_train_split(
    prompts: Prompts, expected: dict[str, Any]
) -> None:
    rows = expected["shuffled_train_idx"][: prompts.settings.num_demonstrations]
    assert sorted(sequence.row for sequence in prompts.finetuning) == sorted(rows)
    assert set(prompts.context_rows) <= set(rows)
    for row, (start, end) in zip(prompts.context_rows, prompts.context_spans, strict=True):
        trained = next(sequence for sequence in prompts.finetuning if sequence.row == row)
        assert prompts.context[start:end] == trained.tokens[1:]
        assert prompts.context[end] == 2
