"""A pass on a shared prefix gives what the whole prompt gives, for every kind of fairseq decoder."""

import pytest
import torch

from fairseq_icl.models.attention import ORDINARY, Rule, attention_by_formula, softmax_attention
from fairseq_icl.observing import Observer
from fairseq_icl.observing import prefix as prefix_module
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.prefix import Seen, features_on_prefix, run_prefix, supports_prefix
from fairseq_icl.observing.probe import AttentionProbe, attention_modules
from tests.observing.tiny import CONTEXT, as_model, look, make_prompts, make_queries, tiny_model
from tests.training.small_models import small_model

KINDS = {
    "sinusoidal": {},
    "learned positions": {"decoder_learned_pos": True},
    "no positions": {"no_token_positional_embeddings": True},
    "post-norm": {"decoder_normalize_before": False},
    "no final norm": {"no_decoder_final_norm": True},
    "embedding norm": {"layernorm_embedding": True, "no_scale_embedding": True},
    "one head": {"decoder_attention_heads": 1},
    "beyond the table of positions": {"max_target_positions": 30},
}
TOKENS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
PACKED = Packed.of(TOKENS.tolist())


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_features_equal_those_of_the_whole_prompt(changes: dict[str, object]) -> None:
    decoder = tiny_model(**changes).decoder
    whole = torch.cat([torch.tensor([CONTEXT, CONTEXT]), TOKENS], dim=1)
    expected = decoder.extract_features(whole, None)[0][:, len(CONTEXT) :]
    features = features_on_prefix(decoder, PACKED, run_prefix(decoder, CONTEXT))
    torch.testing.assert_close(features.view_as(expected), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_final_layer_norm_may_be_missing() -> None:
    model = tiny_model()
    model.decoder.layer_norm = None
    queries = make_queries("single")
    whole = look(model, queries, in_context=True, whole_prompt=True)
    shared = look(model, queries, in_context=True)
    torch.testing.assert_close(shared.option_logprobs, whole.option_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [1, 7, 100])
@torch.no_grad()
def test_pieces_of_any_size_give_the_same_prefix(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_model().decoder
    expected = run_prefix(decoder, CONTEXT)
    monkeypatch.setattr(prefix_module, "PIECE", piece)
    prefix = run_prefix(decoder, CONTEXT)
    assert prefix.length == len(CONTEXT)
    torch.testing.assert_close(prefix.keys, expected.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(prefix.values, expected.values, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_decoder_is_left_as_it_was() -> None:
    decoder = tiny_model().decoder
    before = decoder(TOKENS)[0]
    features_on_prefix(decoder, PACKED, run_prefix(decoder, CONTEXT))
    assert torch.equal(decoder(TOKENS)[0], before)
    assert "forward" not in vars(decoder.embed_positions)
    assert not any("forward" in vars(module) for module in attention_modules(decoder))


def test_attention_that_is_not_fairseqs_own_runs_the_whole_prompt() -> None:
    model = tiny_model()
    module = model.decoder.layers[1].self_attn
    module.__class__ = type("MomentumAttention", (type(module),), {})
    assert not supports_prefix(model.decoder)
    queries = make_queries("single")
    observer = Observer(as_model(model), make_prompts(queries), in_context=True)
    assert observer.prefix is None
    expected = look(tiny_model(), queries, in_context=True)
    torch.testing.assert_close(observer(queries).option_logprobs, expected.option_logprobs, rtol=1e-5, atol=1e-5)


def test_prefix_has_the_length_of_its_context() -> None:
    for context in (CONTEXT, CONTEXT[:-1], (0,)):
        observer = Observer(as_model(tiny_model()), make_prompts(context=context), in_context=True)
        assert observer.prefix.length == len(context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rule", [ORDINARY, Rule(window=3)])
def test_attention_by_formula_is_the_fused_one(dtype: torch.dtype, causal: bool, rule: Rule) -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    rough = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    fused = softmax_attention(query, key, value, causal=causal, rule=rule)
    formula = attention_by_formula(query, key, value, causal=causal, rule=rule)
    for mine, theirs in zip(formula, fused, strict=True):
        torch.testing.assert_close(mine, theirs, **rough)


def test_gradients_pass_through_both_parts() -> None:
    draw = torch.Generator().manual_seed(2)
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=draw, dtype=torch.double).requires_grad_().unbind()
    keys, values = torch.randn(2, 4, 6, 8, generator=draw, dtype=torch.double)
    both = [torch.cat([old.expand(2, -1, -1, -1), new], dim=2) for old, new in ((keys, key), (values, value))]
    mask = torch.ones(5, 11, dtype=torch.bool).tril(6)
    plain = torch.nn.functional.scaled_dot_product_attention(query, *both, attn_mask=mask, scale=1.0)
    weights = torch.randn(plain.shape, generator=draw, dtype=torch.double)
    rows = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]  # (B * T, H, D)
    seen = Seen(Packed.of([[0] * 5] * 2), keys, values)
    found = seen.softmax(ORDINARY, *rows).unflatten(0, (2, 5)).transpose(1, 2)
    torch.testing.assert_close(found, plain)
    expected = torch.autograd.grad((plain * weights).sum(), (query, key, value))
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), (query, key, value)), expected)


@pytest.mark.parametrize("kind", ["fairseq", "stablelm"])
@torch.no_grad()
def test_nothing_is_projected_twice(kind: str) -> None:
    decoder = small_model(kind).decoder
    prefix = run_prefix(decoder, (0, 5, 6))
    calls: list[torch.Size] = []
    for module in attention_modules(decoder):
        module.k_proj.register_forward_hook(lambda _, args, __: calls.append(args[0].shape))
    packed = Packed.of((TOKENS % 12).tolist())
    with AttentionProbe(decoder, torch.tensor([3, 6]), torch.tensor([0, 0])) as probe:
        features_on_prefix(decoder, packed, prefix)
    assert len(calls) == len(decoder.layers)
    assert probe.record().scores.shape[:2] == (2, len(decoder.layers))
    assert all(module.seam.look is None and module.seam.stand_in is None for module in attention_modules(decoder))
