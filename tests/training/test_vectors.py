"""Task vectors and function vectors, each quantity against a plain pass that computes it the long way."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.models.state_edits import Recorder
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import Query
from fairseq_icl.training.vectors import (
    AtLayer,
    EachRowAtItsLayer,
    chosen_layer,
    context_that_tells_nothing,
    indirect_effects,
    label_logprobs,
    largest,
    mean_head_outputs,
    projected_sum,
    train_queries,
)
from tests.models.tiny_transformers import tiny_decoder
from tests.observing.tiny import CONTEXT, as_model, make_queries, tiny_model

KINDS = ("fairseq", "llama")
KNOWN = (1, 2)
"""Layer and number of the one head that does anything."""


def model_of(kind: str) -> Model:
    lm = tiny_model() if kind == "fairseq" else PretrainedLM(tiny_decoder(kind))
    return as_model(lm.double().eval())


def with_one_head(model: Model) -> Model:
    """The model with all output projections zero but for the part of one head."""
    with torch.no_grad():
        for number, layer in enumerate(model.lm.decoder.layers):
            module = layer.self_attn
            weight = module.out_proj.weight.unflatten(1, (module.num_heads, module.head_dim))
            for head in range(module.num_heads):
                if (number, head) != KNOWN:
                    weight[:, head] = 0
    return model


def plain_logprob(
    model: Model, context: tuple[int, ...], query: Query, changed: tuple[int, int, Tensor] | None
) -> float:
    """Log-probability of the right label after the whole prompt; one head's last output may be changed."""
    tokens = torch.tensor([[*context, *query.inputs[query.gold]]])
    decoder, hooks = model.lm.decoder, []
    if changed is not None:
        layer, head, output = changed
        module = decoder.layers[layer].self_attn
        weight = module.out_proj.weight.unflatten(1, (module.num_heads, module.head_dim))[:, head]
        recorded: list[Tensor] = []

        def replace_head(_: object, args: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            moved = result[0].clone()
            moved[-1, 0] += weight @ (output - recorded[0])  # the projection is linear
            return (moved, *result[1:])

        recorded.append(head_outputs(model, context, query)[layer, head])
        hooks.append(module.register_forward_hook(replace_head))
    with torch.no_grad():
        logits = decoder(tokens)[0][0, -1]
    for hook in hooks:
        hook.remove()
    return float(logits.log_softmax(0)[query.labels[query.gold][0]])


def head_outputs(model: Model, context: tuple[int, ...], query: Query) -> Tensor:
    """(L, H, D) at the last token, through queries, keys and values of a plain pass."""
    from fairseq_icl.observing.probe import attention_inputs, attention_modules, queries_keys_values

    decoder, found = model.lm.decoder, []
    with torch.no_grad(), attention_inputs(decoder) as inputs:
        decoder(torch.tensor([[*context, *query.inputs[query.gold]]]))
    for module, x in zip(attention_modules(decoder), inputs, strict=True):
        with torch.no_grad():
            q, k, v = queries_keys_values(module, x)
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        found.append(((q[0, :, -1:] @ k[0].mT).softmax(-1) @ v[0])[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_mean_outputs_of_heads_are_those_of_plain_passes(kind: str):
    model, queries = model_of(kind), make_queries("multi", 3)
    with torch.no_grad():
        found = mean_head_outputs(model, CONTEXT, queries)
    expected = torch.stack([head_outputs(model, CONTEXT, query) for query in queries]).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_indirect_effects_are_those_of_one_plain_pass_for_each_head(kind: str):
    model, queries = model_of(kind), make_queries("single", 2)
    means = torch.randn(3, model.lm.decoder.layers[0].self_attn.num_heads, 8 if kind == "llama" else 4).double()
    with torch.no_grad():
        found = indirect_effects(model, CONTEXT, queries, means)
    for layer, head in ((0, 0), (1, 3), (2, 1)):
        effects = [
            math.exp(plain_logprob(model, CONTEXT, query, (layer, head, means[layer, head])))
            - math.exp(plain_logprob(model, CONTEXT, query, None))
            for query in queries
        ]
        assert float(found[layer, head]) == pytest.approx(sum(effects) / 2, abs=1e-7)  # log-probabilities are fp32


@pytest.mark.parametrize("kind", KINDS)
def test_where_one_head_does_anything_only_that_head_has_an_effect(kind: str):
    model, queries = with_one_head(model_of(kind)), make_queries("single", 3)
    with torch.no_grad():
        means = mean_head_outputs(model, CONTEXT, queries)
        effects = indirect_effects(model, (0, 9, 7, 2), queries, means)
        vector = projected_sum(model, means, largest(effects.abs(), 1))
    others = effects.clone()
    others[KNOWN] = 0
    assert abs(float(effects[KNOWN])) > 1e-5
    assert others.abs().max() < 1e-8
    assert largest(effects.abs(), 1) == [KNOWN]
    module = model.lm.decoder.layers[1].self_attn
    whole = torch.zeros(module.num_heads, module.head_dim).double()
    whole[2] = means[KNOWN]
    torch.testing.assert_close(vector, module.out_proj.weight.detach() @ whole.flatten(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorder_reads_the_likelihood_of_a_plain_pass(kind: str):
    model, (query,) = model_of(kind), make_queries("multi", 1)
    recorder = Recorder()
    with torch.no_grad():
        (found,) = label_logprobs(model, CONTEXT, [query], recorder)
    assert float(found) == pytest.approx(plain_logprob(model, CONTEXT, query, None), abs=1e-6)


@pytest.fixture(scope="module")
def demo() -> tuple[Model, Prompts]:
    model = fi.load_model("demo")
    return model, fi.build_prompts(model, "demo_sentiment", k=8, seed=1, limit=12, position="query")


def test_a_task_vector_is_the_state_of_the_prompt_with_a_dummy_query(demo: tuple[Model, Prompts]):
    model, prompts = demo
    with fi.fine_tuned(model, prompts, "task_vector", layers="1") as tuned:
        edit = tuned.edit
    (dummy,) = train_queries(model, prompts, prompts.settings, 1)
    assert dummy.row not in prompts.context_rows
    states: list[Tensor] = []
    hook = model.lm.decoder.layers[1].register_forward_hook(lambda _, __, result: states.append(result[0][-1, 0]))
    assert isinstance(edit, AtLayer)
    prompt = torch.tensor([[*prompts.context, *dummy.inputs[dummy.gold]]], device=edit.vector.device)
    with torch.no_grad():
        model.lm.decoder(prompt)
    hook.remove()
    torch.testing.assert_close(edit.vector, states[0], rtol=1e-4, atol=1e-4)
    state = torch.zeros(3, len(edit.vector))
    assert torch.equal(edit.layer(0, state), state)
    assert torch.equal(edit.layer(1, state), edit.vector.expand(3, -1))


@pytest.mark.parametrize("method", ["task_vector", "function_vector"])
def test_the_layer_is_the_one_that_makes_labels_of_train_rows_likeliest(demo: tuple[Model, Prompts], method: str):
    model, prompts = demo
    with fi.fine_tuned(model, prompts, method, selection_rows=5) as tuned:
        chosen, seen = tuned.edit.at, fi.observe(tuned, prompts)
    rows = train_queries(model, prompts, prompts.settings, 6)
    rows = rows[1:] if method == "task_vector" else rows[:5]
    likely = []
    for layer in range(len(model.lm.decoder.layers)):
        with fi.fine_tuned(model, prompts, method, selection_rows=5, layers=str(layer)) as tuned:
            asked = fi.observe(tuned, replace(prompts, queries=rows))
        likely.append(float(asked.option_logprobs.gather(1, asked.gold[:, None]).mean()))
    usable = len(likely) - (method == "task_vector")
    assert chosen == max(range(usable), key=likely.__getitem__)
    assert seen.method == method
    assert not torch.equal(seen.option_logprobs, fi.observe(model, prompts).option_logprobs)


def test_a_state_is_not_replaced_after_the_last_layer_where_all_queries_would_get_one_answer(demo):
    model, prompts = demo
    rows = [query for query in train_queries(model, prompts, prompts.settings, 8) if query.gold == 0]
    vectors = torch.zeros(len(model.lm.decoder.layers), model.lm.decoder.embed_dim)
    vectors[-1] = model.lm.decoder.output_projection.weight[rows[0].labels[0][0]]  # names the label of all these rows
    edit = EachRowAtItsLayer(vectors, added=False)
    likely = torch.stack(list(label_logprobs(model, prompts.start, rows, edit, len(vectors)))).mean(0)
    assert int(likely.argmax()) == len(vectors) - 1
    chosen = chosen_layer(model, prompts, prompts.settings, rows, vectors, added=False)
    assert chosen == int(likely[:-1].argmax())


def test_an_added_vector_of_zero_is_zero_shot_to_the_bit(demo: tuple[Model, Prompts]):
    model, prompts = demo
    vector = torch.zeros(model.lm.decoder.embed_dim, device=next(model.lm.parameters()).device)
    edited, plain = (fi.observe(replace(model, edit=edit), prompts) for edit in (AtLayer(1, vector, added=True), None))
    assert all(torch.equal(value, edited.tensors()[name]) for name, value in plain.tensors().items())


def test_the_misleading_prompt_has_half_of_its_labels_switched(demo: tuple[Model, Prompts]):
    model, prompts = demo
    misled = context_that_tells_nothing(model, prompts)
    assert len(misled) == len(prompts.context)
    assert sum(one != other for one, other in zip(misled, prompts.context, strict=True)) == 4


def test_labels_that_were_switched_on_purpose_are_not_missed(demo: tuple[Model, Prompts], caplog):
    model, _ = demo
    prompts = fi.build_prompts(model, "demo_sentiment", k=2, demonstrations="balanced", missing_class="refuse", limit=4)
    misled = context_that_tells_nothing(model, prompts)  # one of two labels is switched, so both are the same
    assert misled != prompts.context
    assert "no demonstration in the prompt has" not in caplog.text


def test_wrong_choices_are_told(demo: tuple[Model, Prompts]):
    model, prompts = demo
    for settings, told in (
        ({"layers": "0-1"}, "a vector is put at one layer"),
        ({"selection_rows": 10**6}, "selection_rows=1000000: the train split of demo_sentiment has only"),
        ({"selection_rows": 0}, "selection_rows=0: must be at least 1"),
    ):
        with pytest.raises(UserError, match=told):
            fi.fine_tuned(model, prompts, "task_vector", **settings).__enter__()
