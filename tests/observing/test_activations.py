"""Activations at all tokens are those that plain forward hooks see on the model run whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import activations
from fairseq_icl.observing.activations import RECORDS, Activations
from fairseq_icl.prompts.build import Prompts
from tests.models.tiny_transformers import tiny_decoder, tiny_reference
from tests.observing.tiny import CONTEXT, as_model, make_prompts, make_queries, tiny_model

PROMPTS = make_prompts(make_queries("multi", count=3), position="gold")


def close(ours: Tensor, theirs: Tensor) -> None:
    size = max(1.0, float(theirs[theirs.isfinite()].abs().max()))
    torch.testing.assert_close(ours / size, theirs / size, rtol=0, atol=1e-5, equal_nan=True)


def prompt_of(number: int, in_context: bool, prompts: Prompts = PROMPTS) -> list[int]:
    query = prompts.queries[number]
    return [*(CONTEXT if in_context else (0,)), *query.inputs[query.gold], *query.labels[query.gold]]


@contextmanager
def heard(modules: dict[str, list[nn.Module]]) -> Iterator[dict[str, list[Tensor]]]:
    """Lists that fill with what modules put out; of "residual" with what the first receives as well."""
    seen: dict[str, list[Tensor]] = {name: [] for name in modules}

    def listen(name: str) -> Callable[..., None]:
        return lambda _, __, output: seen[name].append(output[0] if isinstance(output, tuple) else output)

    hooks = [module.register_forward_hook(listen(name)) for name, some in modules.items() for module in some]
    hooks.append(modules["residual"][0].register_forward_pre_hook(lambda _, args: seen["residual"].append(args[0])))
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("in_context", [False, True])
@torch.no_grad()
def test_of_fairseqs_decoder(in_context: bool) -> None:
    lm = tiny_model()
    made = fi.observe(as_model(lm), PROMPTS, in_context=in_context, positions="all", record=RECORDS)
    layers = list(lm.decoder.layers)
    parts = {"residual": layers, "attention_output": [layer.self_attn for layer in layers]}
    parts["mlp"] = [layer.fc2 for layer in layers]
    ours = made.activations
    for number in range(3):
        tokens = prompt_of(number, in_context)
        with heard(parts) as seen:
            lm(torch.tensor([tokens]))
        assert ours.tokens[number, : len(tokens)].tolist() == tokens
        assert ours.position[number].tolist() == [*range(len(tokens)), *[-1] * (ours.tokens.size(1) - len(tokens))]
        for name, outputs in seen.items():
            array = getattr(ours, name)[number]
            close(array[:, : len(tokens)], torch.stack(outputs)[:, :, 0])
            assert bool(array[:, len(tokens) :].isnan().all())
        for layer, block in enumerate(layers):
            scores, heads = ours.scores[number, layer, :, : len(tokens)], ours.heads[number, layer, :, : len(tokens)]
            x = block.self_attn_layer_norm(seen["residual"][layer])[:, 0]  # (T, d)
            query, key = (part(x).unflatten(1, (4, 4)).transpose(0, 1) for part in projections(block.self_attn))
            products = query @ key.transpose(1, 2) / 2  # (H, T, T)
            hidden = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
            close(scores[..., : len(tokens)], products.masked_fill(hidden, -torch.inf))
            assert bool((scores[..., len(tokens) :] == -torch.inf).all())
            close(block.self_attn.out_proj(heads.transpose(0, 1).flatten(1)), seen["attention_output"][layer][:, 0])
        close(made.attention_output[number], ours.attention_output[number, :, len(tokens) - 1])


def projections(attention: Any) -> tuple[nn.Module, nn.Module]:
    return attention.q_proj, attention.k_proj


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "opt", "qwen3_moe"])
@torch.no_grad()
def test_of_transformers_decoders(family: str) -> None:
    """Windows (of 16 tokens), capped scores, parallel residuals, experts."""
    model = as_model(PretrainedLM(tiny_decoder(family)).eval())
    ours = fi.observe(model, PROMPTS, in_context=True, positions="all", record=RECORDS).activations
    theirs = tiny_reference(family)
    layers = next(m for m in theirs.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    attention = [getattr(layer, "self_attn", None) or layer.attention for layer in layers]
    parts = {"residual": list(layers), "attention_output": attention}
    parts["mlp"] = [getattr(layer, "mlp", None) or layer.fc2 for layer in layers]
    for number in range(3):
        tokens = prompt_of(number, in_context=True)
        with heard(parts) as seen:
            weights = theirs(torch.tensor([tokens]), output_attentions=True).attentions
        for name, outputs in seen.items():
            stacked = torch.stack([output.reshape(len(tokens), -1) for output in outputs])
            close(getattr(ours, name)[number, :, : len(tokens)], stacked)
        scores = ours.scores[number, ..., : len(tokens), : len(tokens)]
        close(scores.softmax(-1), torch.cat(weights))
        heads = ours.heads[number, :, :, : len(tokens)].transpose(1, 2).flatten(2)  # (L, T, H * D)
        for layer, module in enumerate(model.lm.decoder.layers):
            close(module.self_attn.out_proj(heads[layer]), stacked_of(seen["attention_output"][layer]))


def stacked_of(output: Tensor) -> Tensor:
    return output.flatten(0, 1)


@pytest.fixture(scope="module")
def demo() -> tuple[Model, Prompts]:
    model = fi.load_model("demo")
    return model, fi.build_prompts(model, "demo_sentiment", k=2, limit=4)


def test_chosen_tokens_of_a_fine_tuned_model(demo: tuple[Model, Prompts]) -> None:
    model, prompts = demo
    with fi.fine_tuned(model, prompts, "linearized", lr=0.3) as tuned:
        made = fi.observe(tuned, prompts, positions=[0, -1], record="residual")
        whole = fi.observe(tuned, prompts, limit=2, positions="all", record=("residual", "attention_output"))
    assert repr(made.activations) == f"Activations(tokens {tuple(made.activations.tokens.shape)}, position (4, 2), " + (
        "residual (4, 7, 2, 128))"
    )
    for number in range(2):
        last = len(made.activations.words[number]) - 1
        assert made.activations.position[number].tolist() == [0, last]
        close(made.activations.residual[number], whole.activations.residual[number][:, [0, last]])
        close(whole.activations.attention_output[number, :, last], made.attention_output[number])
    base = fi.observe(model, prompts, positions=[-1], record="residual").activations.residual
    assert float((made.activations.residual[:, :, 1] - base[:, :, 0]).abs().max()) > 0.1


def test_one_token_is_the_default_and_parts_have_no_activations(demo: tuple[Model, Prompts]) -> None:
    model, prompts = demo
    assert fi.observe(model, prompts).activations is None
    made = fi.observe(model, prompts, record="mlp")
    assert isinstance(made.activations, Activations)
    assert made.activations.mlp.shape == (4, 6, 1, 128)
    assert made.take([0]).activations is None
    assert made.between(0, 2).activations is None


def test_what_cannot_be_recorded_is_refused(demo: tuple[Model, Prompts], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = demo
    with pytest.raises(UserError, match="record=values: not something to record; choose from attention_output, "):
        fi.observe(model, prompts, record="values")
    with pytest.raises(UserError, match="there is no token 99 in a prompt of "):
        fi.observe(model, prompts, positions=[99])
    with pytest.raises(UserError, match='give "all", or a list'):
        fi.observe(model, prompts, positions="last")
    monkeypatch.setattr(activations, "MAX_BYTES", 100_000)
    with pytest.raises(UserError, match=r"4 queries with \d+ positions each take .* GiB, .* give limit=2"):
        fi.observe(model, prompts, positions="all")
