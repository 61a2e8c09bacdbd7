"""A pass on a shared prefix gives what the whole prompt gives, for every kind of fairseq decoder."""

import pytest
import torch

from fairseq_icl.observing import Observer
from fairseq_icl.observing import prefix as prefix_module
from fairseq_icl.observing.prefix import features_on_prefix, run_prefix, supports_prefix
from fairseq_icl.observing.probe import attention_modules
from tests.observing.tiny import CONTEXT, as_model, look, make_prompts, make_queries, tiny_model

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


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_features_equal_those_of_the_whole_prompt(changes: dict[str, object]) -> None:
    decoder = tiny_model(**changes).decoder
    whole = torch.cat([torch.tensor([CONTEXT, CONTEXT]), TOKENS], dim=1)
    expected = decoder.extract_features(whole, None)[0][:, len(CONTEXT) :]
    features, _ = features_on_prefix(decoder, TOKENS, run_prefix(decoder, CONTEXT))
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)


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
    features_on_prefix(decoder, TOKENS, run_prefix(decoder, CONTEXT))
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
