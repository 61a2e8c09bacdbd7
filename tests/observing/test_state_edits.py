"""Edits of states: where they act, that looking changes nothing, and that ICL's states give ICL's answers."""

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.models.state_edits import Recorder, StateEdit
from fairseq_icl.observing import Observation, Observer
from fairseq_icl.prompts.encoding import Query
from tests.models.tiny_transformers import tiny_decoder
from tests.observing.tiny import as_model, make_prompts, make_queries, tiny_model

KINDS = ("fairseq", "llama", "gpt_neox")


def lm_of(kind: str) -> PretrainedLM:
    return tiny_model() if kind == "fairseq" else PretrainedLM(tiny_decoder(kind)).eval()


def look(lm: PretrainedLM, queries: list[Query], edit: StateEdit | None, position: str = "query", **how: bool):
    return Observer(as_model(lm, edit=edit), make_prompts(queries, position=position), **how)(queries)


def differing(one: Observation, other: Observation) -> list[str]:
    mine = other.tensors()
    return [name for name, value in one.tensors().items() if not torch.equal(value, mine[name])]


class Patch(StateEdit):
    """The states that somebody else recorded, layer by layer."""

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def layer(self, layer: int, state: Tensor) -> Tensor:
        return self.states[layer]


@pytest.mark.parametrize("whole_prompt", [False, True])
@pytest.mark.parametrize("position", ["query", "option0", "gold"])
@pytest.mark.parametrize("queries", ["single", "multi", "inputs"])
def test_an_edit_that_changes_nothing_is_zero_shot_to_the_bit(queries: str, position: str, whole_prompt: bool):
    lm, asked = tiny_model(), make_queries(queries)
    plain = look(lm, asked, None, position, whole_prompt=whole_prompt)
    edit = Recorder(wants_heads=not whole_prompt)
    assert differing(plain, look(lm, asked, edit, position, whole_prompt=whole_prompt)) == []
    assert sorted(edit.states) == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_icls_states_of_all_layers_give_icls_answers_to_the_bit(kind: str):
    lm, asked = lm_of(kind), make_queries("single")
    recorder = Recorder()
    icl = look(lm, asked, recorder, in_context=True)
    patched = look(lm, asked, Patch(recorder.stacked(recorder.states)))
    zsl = look(lm, asked, None)
    assert torch.equal(patched.option_logprobs, icl.option_logprobs)
    assert torch.equal(patched.depth_scores, icl.depth_scores)
    assert torch.equal(patched.top_logprobs, icl.top_logprobs)
    assert not torch.isclose(zsl.option_logprobs, icl.option_logprobs).any()


@pytest.mark.parametrize("kind", KINDS)
def test_icls_states_without_the_last_layers_do_not(kind: str):
    lm, asked = lm_of(kind), make_queries("single")
    recorder = Recorder()
    icl = look(lm, asked, recorder, in_context=True)

    class Lower(Patch):
        def layer(self, layer: int, state: Tensor) -> Tensor:
            return self.states[layer] if layer < 2 else state

    assert not torch.equal(
        look(lm, asked, Lower(recorder.stacked(recorder.states))).option_logprobs, icl.option_logprobs
    )


class Push(StateEdit):
    """Adds to what the heads, the attention or a layer put out, in layer 1."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.rows = defaultdict[str, int](int)

    @property
    def sees_heads(self) -> bool:
        return self.point == "heads"

    def _pushed(self, point: str, layer: int, x: Tensor) -> Tensor:
        self.rows[point] = len(x)
        return x + torch.linspace(0, 1, x.size(-1)) * (point == self.point and layer == 1)

    def heads(self, layer: int, heads: Tensor) -> Tensor:
        return self._pushed("heads", layer, heads)

    def attention(self, layer: int, output: Tensor, received: Tensor, state: Tensor) -> Tensor:
        return self._pushed("attention", layer, output)

    def layer(self, layer: int, state: Tensor) -> Tensor:
        return self._pushed("layer", layer, state)


@pytest.mark.parametrize("kind", ["fairseq", "llama"])
@pytest.mark.parametrize("point", ["heads", "attention", "layer"])
def test_what_is_edited_shows_from_there_on_and_not_before(kind: str, point: str):
    lm, asked = lm_of(kind), make_queries("single")
    plain, edit = look(lm, asked, None), Push(point)
    seen = look(lm, asked, edit)
    moved = [not torch.equal(seen.attention_output[:, layer], plain.attention_output[:, layer]) for layer in range(3)]
    assert moved == [False, point != "layer", True]
    if point == "attention":
        expected = plain.attention_output[:, 1] + torch.linspace(0, 1, plain.attention_output.size(2))
        torch.testing.assert_close(seen.attention_output[:, 1], expected)
    assert edit.rows["layer"] == len(asked)


@pytest.mark.parametrize("queries", ["single", "multi", "inputs"])
def test_the_shared_prefix_and_the_whole_prompt_edit_the_same_tokens(queries: str):
    """Also where several sequences share an input, and where every option has its own."""
    lm, asked = tiny_model(), make_queries(queries)
    packed, whole = (look(lm, asked, Push("attention"), whole_prompt=whole) for whole in (False, True))
    torch.testing.assert_close(packed.option_logprobs, whole.option_logprobs, atol=2e-5, rtol=2e-5)
    assert not torch.isclose(packed.option_logprobs, look(lm, asked, None).option_logprobs).all()


def test_heads_that_are_not_handed_over_are_refused():
    with pytest.raises(UserError, match="does not hand them over"):
        look(tiny_model(), make_queries("single"), Push("heads"), whole_prompt=True)
