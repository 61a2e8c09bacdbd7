"""The statements on rotary decoders: grouped heads, gated MLPs without biases, and parallel blocks."""

import pytest
import torch

from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.models.attention import Rule, relaxed, rule_of, set_rule
from fairseq_icl.theory.linear_attention import softmax_attention
from fairseq_icl.theory.on_decoder import _heads, implicit_updates, relaxed_model, run_on_decoder
from tests.models.tiny_transformers import tiny_decoder
from tests.observing.tiny import tiny_model

START, CONTEXT = [0], [0, 5, 6, 11, 7, 12, 11, 9, 13]
QUERIES = [[4, 5, 6], [8, 12], [13, 13, 7, 11]]


@pytest.mark.parametrize("family", ["stablelm", "gpt_neox", "gpt2"], ids=["gated", "parallel", "absolute"])
def test_every_statement_holds_on_decoders_of_transformers(family: str):
    model = tiny_decoder(family).double().eval()
    before = model(torch.tensor([CONTEXT]))[0]
    records = run_on_decoder(model, START, [CONTEXT[:4], CONTEXT], QUERIES)
    assert [record.holds for record in records] == [True] * 4
    assert torch.equal(model(torch.tensor([CONTEXT]))[0], before)
    assert all(layer.fc2.bias is None for layer in model.layers) == (family == "stablelm")


def test_a_gate_that_is_left_out_breaks_the_implicit_update(monkeypatch: pytest.MonkeyPatch):
    model = tiny_decoder("stablelm").double().eval()
    assert float(implicit_updates(model, START, [CONTEXT], QUERIES[0]).error.max()) < 1e-10
    monkeypatch.setattr("fairseq_icl.theory.implicit_update._first_weights", lambda block: [block.fc1.weight])
    assert float(implicit_updates(model, START, [CONTEXT], QUERIES[0]).error.max()) > 1e-3


def test_heads_are_rotated_as_the_model_rotates_them():
    model, seen = tiny_decoder("stablelm").double().eval(), {}
    attention = model.layers[1].self_attn
    attention.register_forward_hook(lambda _, __, out: seen.update(out=out[0]))
    with torch.no_grad():
        heads = _heads(model, CONTEXT)[1]
        last = softmax_attention(heads.query[:, -1:], heads.key, heads.value)
        assert relative_error(attention.out_proj(last.flatten()), seen["out"][-1, 0]) < 1e-10


@pytest.mark.parametrize("family", ["fairseq", "rotary", "momentum"])
def test_relaxing_changes_the_model_and_is_undone(family: str):
    model = tiny_decoder("stablelm").double().eval() if family == "rotary" else tiny_model().decoder.double()
    if family == "momentum":
        set_rule(model, Rule(momentum=0.5))
    tokens = torch.tensor([[0, 5, 6, 7, 8]])
    modules, before = [layer.self_attn for layer in model.layers], model(tokens)[0]
    with relaxed(model):
        linear = model(tokens)[0]
        assert rule_of(model.layers[0].self_attn) == Rule(True, 0.5 if family == "momentum" else 0.0)
    assert relative_error(linear, before) > 1e-3
    assert [layer.self_attn for layer in model.layers] == modules
    assert torch.equal(model(tokens)[0], before)


def test_a_model_whose_attention_is_linear_already_is_no_distance_away():
    model = tiny_model().decoder.double()
    far = relaxed_model(model, START, CONTEXT, QUERIES)
    assert far.distance > 0.01
    set_rule(model, Rule(linear=True))
    near = relaxed_model(model, START, CONTEXT, QUERIES)
    assert near.distance == 0
    assert near.agreement == 1
    assert near.moved > 0
    torch.testing.assert_close(near.cosine, torch.ones_like(near.cosine))
