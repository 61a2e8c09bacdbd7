"""Short circuits: the scores after layer l are those of a model that has no more layers than that."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing.layers import states_at
from tests.observing.tiny import look, make_queries, tiny_model

WAYS = {"zero-shot": {}, "prefix": {"in_context": True}, "whole prompt": {"in_context": True, "whole_prompt": True}}


@contextmanager
def shortened(lm: PretrainedLM, layers: int) -> Iterator[None]:
    """The model with its first layers only."""
    whole = lm.decoder.layers
    lm.decoder.layers = whole[:layers]
    try:
        yield
    finally:
        lm.decoder.layers = whole


def test_states_are_those_of_a_plain_pass_and_only_one_stays_in_memory() -> None:
    decoder, tokens = tiny_model().eval().decoder, torch.tensor([[0, 5, 7, 4], [0, 8, 6, 9]])
    rows = torch.tensor([1, 0]), torch.tensor([3, 2])
    with torch.no_grad():
        plain, extra = decoder.extract_features(tokens, None)
        expected = [state[rows[1], rows[0]] for state in extra["inner_states"][1:]]
        with states_at(decoder, *rows) as found:
            features, extra = decoder.extract_features(tokens, None)
    assert torch.equal(features, plain)
    assert len(found) == len(decoder.layers) > 1
    assert all(map(torch.equal, found, expected))
    assert len({state.data_ptr() for state in extra["inner_states"][1:]}) == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", ["single", "multi", "inputs"])
def test_scores_after_a_layer_are_those_of_a_shorter_model(kind: str, way: dict[str, bool]) -> None:
    model, queries = tiny_model(), make_queries(kind)
    seen = look(model, queries, **way)
    assert seen.depth_scores.shape == (6, 3, 3)
    for layer in range(3):
        with shortened(model, layer + 1):
            shorter = look(model, queries, **way)
        expected, found = shorter.option_logprobs, seen.depth_scores[:, layer]
        torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-5, atol=1e-5)
        assert torch.equal(found.argmax(-1), shorter.prediction)


@pytest.mark.parametrize("kind", ["single", "multi", "inputs"])
def test_a_cut_at_the_last_layer_is_the_whole_model_to_the_bit(kind: str) -> None:
    seen = look(tiny_model(), make_queries(kind), in_context=True)
    assert torch.equal(seen.depth_scores[:, -1], seen.option_logprobs)
    assert not torch.equal(seen.depth_scores[:, -2].log_softmax(-1), seen.option_logprobs.log_softmax(-1))


def test_a_model_of_one_layer_has_one_depth() -> None:
    seen = look(tiny_model(decoder_layers=1), make_queries("single"))
    assert torch.equal(seen.depth_scores, seen.option_logprobs[:, None])


def test_the_expansion_of_a_linearized_model_is_taken_after_every_layer() -> None:
    model, queries = tiny_model(), make_queries("single")
    model.freeze_all_but("self_attn.v_proj", biases=True)
    expansion = LinearizedLM.around(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for delta in expansion._deltas().values():
            delta.normal_(std=0.1)
    seen = look(expansion, queries)
    base = look(model, queries)
    step = 1e-3
    with torch.no_grad():
        for delta in expansion._deltas().values():
            delta.mul_(step)
    small = look(expansion, queries)
    # The expansion of the logits is linear: a thousandth of the step is a thousandth of the change.
    for layer in range(2):
        change = _logit_gaps(seen.depth_scores[:, layer]) - _logit_gaps(base.depth_scores[:, layer])
        part = _logit_gaps(small.depth_scores[:, layer]) - _logit_gaps(base.depth_scores[:, layer])
        torch.testing.assert_close(part, change * step, rtol=0.05, atol=1e-5)
        assert change.abs().max() > 1e-2


def _logit_gaps(scores: torch.Tensor) -> torch.Tensor:
    """Differences to the first option, which no normalisation touches: (n, C) -> (n, C - 1)."""
    return scores[:, 1:] - scores[:, :1]


def test_depth_can_be_left_out() -> None:
    seen = look(tiny_model(), make_queries("single"), by_depth=False)
    assert seen.depth_scores is None
