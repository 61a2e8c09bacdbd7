"""Overlap of the most likely tokens, and the probability of the gold label."""

from dataclasses import replace

import pytest
import torch

from fairseq_icl.metrics.predictions import gold_probability, token_overlap
from fairseq_icl.observing.observation import Observation
from tests.metrics.observations import random_observation
from tests.observing.tiny import CONTEXT, look, make_queries, tiny_model


def with_top(tokens: list[int], probabilities: list[float]) -> Observation:
    seen = random_observation(0, n=1)
    return replace(seen, top_tokens=torch.tensor([tokens]), top_logprobs=torch.tensor([probabilities]).log())


def test_overlap_counts_tokens_in_any_order() -> None:
    icl, ft = with_top([5, 9, 7, 2], [0.4, 0.3, 0.2, 0.1]), with_top([7, 5, 1, 3], [0.6, 0.2, 0.1, 0.1])
    assert token_overlap(icl, ft).tolist() == [0.5]


def test_the_same_distribution_overlaps_wholly_and_another_not_at_all() -> None:
    icl, ft = with_top([5, 9], [0.4, 0.3]), with_top([1, 2], [0.4, 0.3])
    assert token_overlap(icl, icl).item() == 1
    assert token_overlap(icl, ft).item() == 0


def test_gold_probability_is_among_the_options() -> None:
    seen = replace(random_observation(0, n=2, options=2), gold=torch.tensor([0, 1]))
    seen = replace(seen, option_logprobs=torch.tensor([[0.1, 0.3], [0.2, 0.2]]).log())
    torch.testing.assert_close(gold_probability(seen), torch.tensor([0.25, 0.5]).double())


@pytest.mark.parametrize("kind", ["single", "multi", "inputs"])
def test_top_tokens_are_those_that_may_follow_the_input(kind: str) -> None:
    model, queries = tiny_model(), make_queries(kind)
    seen = look(model, queries, in_context=True)
    assert seen.top_tokens.shape == seen.top_logprobs.shape == (6, 10)
    for query, tokens, logprobs in zip(queries, seen.top_tokens, seen.top_logprobs, strict=True):
        with torch.no_grad():
            logits = model.decoder(torch.tensor([[*CONTEXT, *query.inputs[0]]]))[0][0, -1]
        expected = logits.log_softmax(-1).topk(10)
        torch.testing.assert_close(logprobs, expected.values, rtol=1e-4, atol=1e-4)
        assert tokens[0] == expected.indices[0]
