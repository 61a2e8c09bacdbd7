"""The rotary decoder: the seam that the instruments use, positions, derivatives, and what it refuses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fairseq_icl.errors import UserError
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.rotary_lm import RotaryConfig, RotaryDecoder, Rotation
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.prefix import features_on_prefix, run_prefix, supports_prefix
from fairseq_icl.training.layer_causal import layer_states

LLAMA = RotaryConfig(
    embed_dim=12,
    ffn_embed_dim=20,
    layers=2,
    attention_heads=4,
    key_value_heads=2,
    head_dim=6,
    rotation=Rotation(6, 100.0),
    max_positions=32,
    query_key_norm=True,
)
NEOX = RotaryConfig(
    embed_dim=12,
    ffn_embed_dim=20,
    layers=2,
    attention_heads=3,
    key_value_heads=3,
    head_dim=4,
    rotation=Rotation(2),
    max_positions=32,
    norm="layer",
    activation="gelu",
    gated=False,
    qkv_bias=True,
    out_bias=True,
    ffn_bias=True,
    parallel_residual=True,
)


def decoder(config: RotaryConfig = LLAMA) -> RotaryDecoder:
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(str(number))
    torch.manual_seed(3)
    made = RotaryDecoder(config, dictionary).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(4, 24, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["llama", "neox"])
def test_forward_is_causal_softmax_attention_on_the_seam(config: RotaryConfig) -> None:
    attention = decoder(config).attention[0]
    x = torch.randn(7, 2, 12, dtype=torch.double)
    query, key, value = attention.queries_keys_values(x, 0)
    assert query.shape == key.shape == value.shape == (2, config.attention_heads, 7, config.head_dim)
    scores = (query @ key.transpose(2, 3)).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    expected = attention.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)).transpose(0, 1)
    output, weights = attention(query=x, key=x, value=x)
    assert weights is None
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_scores_depend_on_distances_alone() -> None:
    attention = decoder().attention[0]
    x = torch.randn(5, 1, 12, dtype=torch.double)
    (query, key, _), (later_query, later_key, _) = (attention.queries_keys_values(x, start) for start in (0, 9))
    assert (query - later_query).abs().max() > 0.1
    # The table of angles is fp32.
    torch.testing.assert_close(query @ key.mT, later_query @ later_key.mT, rtol=0, atol=1e-5)


def test_one_key_value_head_serves_a_group_of_query_heads() -> None:
    _, key, value = decoder().attention[0].queries_keys_values(torch.randn(3, 1, 12, dtype=torch.double), 0)
    for shared in (key, value):
        assert torch.equal(shared[:, 0], shared[:, 1])
        assert torch.equal(shared[:, 2], shared[:, 3])
        assert not torch.equal(shared[:, 0], shared[:, 2])


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["llama", "neox"])
def test_a_shared_prefix_equals_the_whole_sequence(config: RotaryConfig) -> None:
    model, batch, cut = decoder(config), tokens(1, 9), 4
    assert supports_prefix(model)
    with torch.no_grad():
        whole = model.extract_features(batch)[0]
        packed = Packed.of(batch[:, cut:].tolist())
        rest = features_on_prefix(model, packed, run_prefix(model, batch[0, :cut].tolist()))
    torch.testing.assert_close(rest.transpose(0, 1), whole[:, cut:], rtol=0, atol=1e-12)


def test_filling_on_the_right_changes_nothing_and_on_the_left_is_refused() -> None:
    model, batch = decoder(), tokens()
    filled = F.pad(batch, (0, 3), value=model.padding_idx)
    torch.testing.assert_close(model(filled)[0][:, :7], model(batch)[0], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="on the right"):
        model(F.pad(batch, (3, 0), value=model.padding_idx))


def test_a_prompt_longer_than_the_window_is_refused_and_a_shorter_one_is_not() -> None:
    model = decoder(RotaryConfig(**vars(LLAMA) | {"window": 8}))
    assert model.max_positions() == 8
    torch.testing.assert_close(model(tokens(2, 8))[0], decoder()(tokens(2, 8))[0])
    with pytest.raises(UserError, match="sliding_window=8"):
        model(tokens(2, 9))


def test_it_is_a_fairseq_language_model() -> None:
    model = FairseqLanguageModel(decoder())
    logits, extra = model(tokens())
    assert logits.shape == (2, 7, 24)
    assert len(extra["inner_states"]) == 3
    assert model.max_positions() == 32
    assert model(tokens(), features_only=True)[0].shape == (2, 7, 12)
    total = model.get_normalized_probs((logits, extra), log_probs=True).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_initialisation_comes_from_the_generator_and_leaves_norms_at_one() -> None:
    dictionary = decoder().dictionary
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(RotaryDecoder(NEOX, dictionary).state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert bool((made[0]["layers.0.self_attn_layer_norm.weight"] == 1).all())
    assert not made[0]["layers.0.fc1.bias"].any()
    assert 0.01 < made[0]["layers.0.fc1.weight"].std() < 0.03


def test_angles_survive_half_precision_and_inference_mode() -> None:
    model = decoder()
    with torch.inference_mode():
        model(tokens())
    model(tokens())[0].sum().backward()  # an inference tensor kept from before would fail here
    halved = copy.deepcopy(model).half().double()
    assert torch.equal(halved.attention[0].table._angles, model.attention[0].table._angles)


def test_layer_causal_hooks_see_states_and_cut_the_graph() -> None:
    model = decoder()
    with layer_states(model, range(2), "layer") as states:
        model.extract_features(tokens())
    assert [state.shape for state in states.values()] == [(7, 2, 12)] * 2
    states[1].sum().backward()
    assert model.attention[0].k_proj.weight.grad is None
    assert model.attention[1].k_proj.weight.grad is not None


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["llama", "neox"])
def test_forward_derivative_in_k_and_v_is_the_slope(config: RotaryConfig) -> None:
    model, batch = decoder(config), tokens()
    names = [name for name, _ in model.named_parameters() if "k_proj" in name or "v_proj" in name]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    steps = {name: torch.randn_like(weights[name]) for name in names}

    def logits(size: float) -> Tensor:
        moved = {name: weights[name] + size * step for name, step in steps.items()}
        return torch.func.functional_call(model, weights | moved, (batch,))[0]

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(weights[name], step) for name, step in steps.items()}
        tangent = forward_ad.unpack_dual(torch.func.functional_call(model, weights | duals, (batch,))[0]).tangent
    slope = (logits(1e-5) - logits(-1e-5)).detach() / 2e-5
    torch.testing.assert_close(tangent, slope, rtol=1e-6, atol=1e-6)


def test_the_linearized_model_runs_on_it() -> None:
    plain = decoder()
    names = [f"decoder.{name}" for name, _ in plain.named_parameters() if "k_proj" in name or "v_proj" in name]
    model = LinearizedLM(copy.deepcopy(plain), names)
    torch.testing.assert_close(model(tokens())[0], plain(tokens())[0], rtol=0, atol=1e-12)
    step = 1e-4 * torch.randn_like(plain.attention[0].v_proj.weight)
    with torch.no_grad():
        model.decoder.layers[0].self_attn.v_proj.weight.add_(step)
        plain.attention[0].v_proj.weight.add_(step)
    moved = model(tokens())[0]
    torch.testing.assert_close(moved, plain(tokens())[0], rtol=0, atol=1e-5)
    moved.sum().backward()
    assert model.decoder.layers[1].self_attn.k_proj.weight.grad is not None


def test_all_sequences_of_a_batch_meet_a_frozen_weight_in_one_product() -> None:
    model = decoder()
    seen: list[bool] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    model(tokens())
    assert seen == [True] * len(model.layers)  # otherwise torch multiplies sequence by sequence
