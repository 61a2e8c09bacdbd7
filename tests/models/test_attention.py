"""Linear and momentum attention: what they compute, that nothing else changes, and what they refuse."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from torch import Tensor

import fairseq_icl as fi
from fairseq_icl import tasks  # noqa: F401 - changes fairseq's command line
from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import ORDINARY, AttentionLM, AttentionLMConfig, Rule, set_rule, trained_rule
from fairseq_icl.models.files import load_dictionary
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM, load_decoder
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.prefix import features_on_prefix, run_prefix, supports_prefix
from fairseq_icl.observing.probe import queries_keys_values
from fairseq_icl.settings import OBSERVED, Settings
from tests.models.tiny_transformers import tiny_decoder
from tests.observing.tiny import CONTEXT, tiny_model
from tests.world import World, make_world, save_model

RULES = [Rule(linear=True), Rule(momentum=0.6), Rule(linear=True, momentum=0.3)]
TOKENS = torch.tensor([[0, 5, 9, 6, 11, 4, 8], [0, 7, 7, 5, 10, 6, 9]])


def ruled(family: str, rule: Rule) -> torch.nn.Module:
    """A tiny fp64 decoder of fairseq's or of a rotary kind under a rule."""
    decoder = tiny_model().decoder.double() if family == "fairseq" else tiny_decoder("stablelm").double()
    set_rule(decoder, rule)
    return decoder


def by_definition(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """The formula token by token: (H, T, D) each."""
    rows = []
    for t in range(query.size(1)):
        scores = (query[:, t, None] * key[:, : t + 1]).sum(-1)  # (H, t + 1)
        weights = scores if rule.linear else scores.softmax(-1)
        decay = torch.tensor([rule.momentum ** (t - i) for i in range(t)] + [0.0], dtype=query.dtype)
        rows.append(((weights + (decay if rule.momentum else 0))[..., None] * value[:, : t + 1]).sum(1))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["fairseq", "stablelm"])
def test_attention_is_what_the_formula_says(family: str, rule: Rule):
    decoder, seen = ruled(family, rule).eval(), []
    module = decoder.layers[1].self_attn
    module.register_forward_hook(lambda _, args, kwargs, out: seen.append((args, kwargs, out[0])), with_kwargs=True)
    with torch.no_grad():
        decoder(TOKENS)
        args, kwargs, found = seen[0]
        query, key, value = (part[1] for part in queries_keys_values(module, kwargs.get("query", *args[:1])))
        expected = module.out_proj(by_definition(query, key, value, rule).transpose(0, 1).flatten(1))
    torch.testing.assert_close(found[:, 1], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["fairseq", "stablelm"])
def test_shared_prefix_gives_what_the_whole_sequence_gives(family: str, rule: Rule, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fairseq_icl.observing.prefix.PIECE", 3)  # the context runs in several pieces
    decoder = ruled(family, rule).eval()
    context, queries = [token % 20 + 4 for token in CONTEXT[:10]], TOKENS[:, 1:]
    assert supports_prefix(decoder)
    with torch.no_grad():
        whole = decoder.extract_features(torch.cat([torch.tensor([context] * 2), queries], 1), None)[0][:, 10:]
        prefix = run_prefix(decoder, context)
        packed = Packed.of(queries.tolist())
        shared = features_on_prefix(decoder, packed, prefix).view_as(whole)
        torch.testing.assert_close(shared, whole, rtol=1e-9, atol=1e-11)
        if rule.momentum:  # the moving average is part of the prefix
            lost = type(prefix)(prefix.length, prefix.keys, prefix.values, (None,) * len(prefix.keys))
            assert (features_on_prefix(decoder, packed, lost).view_as(whole) - whole).abs().max() > 1e-3


def test_an_ordinary_rule_leaves_fairseqs_own_attention():
    decoder = tiny_model().decoder
    before = [layer.self_attn for layer in decoder.layers]
    set_rule(decoder, Rule())
    assert [layer.self_attn for layer in decoder.layers] == before


@pytest.mark.parametrize("rule", RULES)
def test_the_expansion_of_a_ruled_model_is_the_derivative(rule: Rule):
    model = PretrainedLM(tiny_model(activation_fn="relu").decoder.double())  # fairseq's gelu computes in fp32
    set_rule(model.decoder, rule)
    model.freeze_all_but("self_attn.k_proj,self_attn.v_proj", biases=True)
    names = model.trained_names
    expanded = LinearizedLM.around(model)
    step = {name: torch.randn_like(model.get_parameter(name)) for name in names}

    def output() -> Tensor:
        return model.decoder(TOKENS)[0]

    weights = {sign: {n: model.get_parameter(n) + sign * 1e-6 * step[n] for n in names} for sign in (1, -1)}
    slope = (model.evaluate(output, weights[1]) - model.evaluate(output, weights[-1])) / 2e-6
    linear = expanded.evaluate(lambda: expanded.decoder(TOKENS)[0], step) - output()
    torch.testing.assert_close(linear, slope, rtol=1e-4, atol=1e-5)


def task() -> SimpleNamespace:
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(str(number))
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def config(**changes: object) -> AttentionLMConfig:
    sizes = dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), 16)
    shape = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_embed_dim": 32, "tokens_per_sample": 32}
    return AttentionLMConfig(**sizes | shape | {"max_target_positions": 32, "dropout": 0.0} | changes)


def test_momentum_starts_from_the_same_weights_and_gives_other_outputs():
    models = []
    for changes in ({}, {"attention": "momentum", "attention_momentum": 0.5}):
        torch.manual_seed(1)
        models.append(AttentionLM.build_model(config(**changes), task()).eval())
    first, second = (model.state_dict() for model in models)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.allclose(models[0](TOKENS)[0], models[1](TOKENS)[0])


@pytest.mark.parametrize(
    ("kind", "eta", "part"),
    [
        ("momentum", 0.0, "together"),
        ("softmax", 0.5, "together"),
        ("momentum", 1.0, "below 1"),
        ("momentum", -0.1, "at least 0"),
        ("momentum", float("nan"), "at least 0"),
        ("momentum", "0.5", "at least 0"),
        ("cosine", 0.0, "choose from softmax, momentum"),
    ],
)
def test_choices_that_make_no_sense_are_one_line(kind: str, eta: object, part: str):
    with pytest.raises(UserError, match=part):
        trained_rule({"attention": kind, "attention_momentum": eta}, "model.pt")


def test_sgds_momentum_in_an_old_checkpoint_is_none_of_attention():
    assert trained_rule(vars(Namespace(momentum=0.9, arch="transformer_lm"))) == ORDINARY


def test_sgd_whose_flag_has_the_same_name_is_refused_in_one_line():
    words = ["data", "--task", "language_modeling", "--arch", "attention_lm", "--optimizer", "sgd", "--lr", "0.1"]
    with pytest.raises(UserError, match=r"--momentum.*choose another --optimizer"):
        options.parse_args_and_arch(options.get_training_parser(), words)


def test_padding_on_the_left_and_generation_are_refused():
    decoder = ruled("fairseq", Rule(momentum=0.5))
    with pytest.raises(UserError, match="on the right"):
        decoder(torch.tensor([[1, 1, 5, 6], [0, 5, 6, 7]]))
    with pytest.raises(UserError, match="incremental state"):
        decoder(TOKENS, incremental_state={})
    padded = decoder(torch.tensor([[0, 5, 6, 1, 1]]))[0][:, :3]
    torch.testing.assert_close(padded, decoder(torch.tensor([[0, 5, 6]]))[0])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world") / "w")


@pytest.mark.parametrize("style", ["args", "cfg"])
def test_a_checkpoint_brings_its_momentum_along(world: World, tmp_path: Path, style: str):
    dictionary = load_dictionary(world.dictionary)
    save_model(tmp_path / "plain.pt", dictionary, style=style)
    save_model(tmp_path / "momentum.pt", dictionary, style=style, attention="momentum", attention_momentum=0.5)
    decoders = [load_decoder(tmp_path / f"{name}.pt", dictionary).eval() for name in ("plain", "momentum")]
    assert decoders[1].layers[0].self_attn.rule == Rule(momentum=0.5)
    set_rule(decoders[0], Rule(momentum=0.5))
    assert torch.equal(decoders[0](TOKENS)[0], decoders[1](TOKENS)[0])
    untrained = load_decoder(tmp_path / "momentum.pt", dictionary, init="untrained")
    assert untrained.layers[0].self_attn.rule == Rule(momentum=0.5)


def test_every_observation_depends_on_the_attention():
    for stages in OBSERVED.values():
        assert Settings(attention="linear").relevant_to(stages).attention == "linear"


def test_the_python_functions_take_the_switch_where_the_model_is_loaded():
    model = fi.load_model("demo", attention="linear", device="cpu")
    prompts = fi.build_prompts(model, "demo_sentiment", k=4, limit=6)
    assert prompts.settings.attention == "linear"
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, "gd", lr=0.001) as tuned:
        table = fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts))
    assert {"sim_aou", "sim_am_delta"} <= set(table.metric)
    real = fi.load_model("demo", device="cpu")
    assert not torch.allclose(fi.observe(real, prompts, in_context=True).option_logprobs, icl.option_logprobs)
    with pytest.raises(UserError, match="attention= to load_model"):
        fi.build_prompts(model, "demo_sentiment", attention="linear")
    with pytest.raises(UserError, match="choose from softmax, linear"):
        fi.load_model("demo", attention="cosine")
