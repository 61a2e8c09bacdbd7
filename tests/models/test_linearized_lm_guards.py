"""How a linearized model behaves around its mathematics: memory, checkpoints, exceptions, and what it refuses."""

import pytest
import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.models.linearized_lm import LINEARIZED_MARK, LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from tests.models.tiny_linearized import TOKENS, build, build_decoder, keys_and_values, random_deltas, set_deltas


def test_base_state_leads_back_to_the_pretrained_model_to_the_bit():
    moved = build(torch.float32)
    set_deltas(moved, random_deltas(moved, 10))
    model = build(torch.float32)
    assert not model.base_state
    model.load_state_dict(moved.state_dict())
    assert model.base_state
    expected = PretrainedLM(build_decoder())(TOKENS)[0]
    assert torch.equal(model.evaluate(lambda: model(TOKENS)[0], model.base_state), expected)
    assert torch.equal(model.evaluate(lambda: model.decoder(TOKENS)[0], model.base_state), expected)
    assert torch.equal(model(TOKENS)[0], moved(TOKENS)[0])


def test_forgetting_leads_back_to_the_pretrained_model_for_good():
    model = build(torch.float32)
    set_deltas(model, random_deltas(model, 10))
    model.load_state_dict({LINEARIZED_MARK: torch.ones(1)})
    assert not any(model.get_parameter(name).any() for name in model.trained_names)
    assert torch.equal(model(TOKENS)[0], PretrainedLM(build_decoder())(TOKENS)[0])


@pytest.mark.parametrize("fails_in_pass", [1, 2])
def test_an_exception_in_either_pass_leaves_the_model_as_it_was(fails_in_pass):
    model = build()
    deltas = random_deltas(model, 11)
    parameters = dict(set_deltas(model, deltas).named_parameters())
    expected = model(TOKENS)[0]
    runs = []

    def fail():
        runs.append(1)
        if len(runs) == fails_in_pass:
            raise KeyError("stop")
        return model.decoder(TOKENS)[0]

    with pytest.raises(KeyError, match="stop"):
        model.evaluate(fail)
    after = dict(model.named_parameters())
    assert all(after[name] is parameters[name] for name in parameters)
    assert all(torch.equal(after[name], deltas[name]) for name in deltas)
    assert torch.equal(model(TOKENS)[0], expected)


def test_inference_mode_keeps_the_tangents():
    model = build()
    set_deltas(model, random_deltas(model, 12))
    expected = model(TOKENS)[0]
    with torch.inference_mode():
        assert torch.equal(model(TOKENS.clone())[0], expected)


def test_only_the_deltas_learn_and_the_base_is_held_once():
    decoder = build_decoder()
    base = {name: parameter.data_ptr() for name, parameter in decoder.named_parameters()}
    model = LinearizedLM(decoder, keys_and_values(decoder))
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == model.trained_names
    for name, pointer in base.items():
        owner, _, attribute = name.rpartition(".")
        kept = f"{attribute}_base" if f"decoder.{name}" in model.trained_names else attribute
        assert getattr(decoder.get_submodule(owner), kept).data_ptr() == pointer
    set_deltas(model, random_deltas(model, 13))
    weights = []
    model.evaluate(lambda: weights.append(decoder.layers[0].self_attn.k_proj.weight))
    assert [weight.data_ptr() for weight in weights] == [base["layers.0.self_attn.k_proj.weight"]] * 2


def test_checkpoint_holds_deltas_with_a_mark_and_restores():
    model = build(torch.float32)
    set_deltas(model, random_deltas(model, 14))
    state = model.state_dict()
    assert set(state) == {*model.trained_names, LINEARIZED_MARK}
    restored = build(torch.float32)
    restored.load_state_dict(state)
    assert restored.base_state
    assert torch.equal(restored(TOKENS)[0], model(TOKENS)[0])


def test_checkpoints_of_the_ordinary_model_and_of_other_parameters_are_refused():
    model = build(torch.float32)
    ordinary = {name: tensor for name, tensor in model.state_dict().items() if name != LINEARIZED_MARK}
    with pytest.raises(UserError, match="without --linearize"):
        model.load_state_dict(ordinary)
    few = LinearizedLM(build_decoder(), model.trained_names[:1])
    with pytest.raises(UserError, match="--train-parameters"):
        few.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda delta: delta[:1], "has the shape"),
        (lambda delta: delta * torch.nan, "NaN or infinite"),
        (lambda delta: delta.long(), "no tensor of weights"),
    ],
)
def test_damaged_deltas_are_named(change, message):
    model = build(torch.float32)
    state = set_deltas(model, random_deltas(model, 14)).state_dict()
    name = model.trained_names[3]
    with pytest.raises(UserError, match=f"{name} .*{message}|{name} is {message}"):
        build(torch.float32).load_state_dict(state | {name: change(state[name])})


def test_moves_to_another_precision_with_its_base():
    model = build(torch.float32)
    set_deltas(model, random_deltas(model, 15))
    expected = model(TOKENS)[0]
    actual = model.double()(TOKENS)[0]
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual.float(), expected, rtol=1e-4, atol=1e-5)


def test_unknown_parameter_is_named():
    with pytest.raises(UserError, match=r"no parameter 'decoder\.nonsense'"):
        LinearizedLM(build_decoder(), ["decoder.nonsense"])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"decoder_layerdrop": 0.5}, "LayerDrop"),
        ({"quant_noise_pq": 0.1}, "quantization"),
    ],
)
def test_randomness_in_training_is_refused_and_in_evaluation_allowed(options, kind):
    model = build(torch.float32, **options)
    set_deltas(model, random_deltas(model, 16))
    with pytest.raises(UserError, match=kind):
        model.train()(TOKENS)
    assert model.eval()(TOKENS)[0].isfinite().all()


def test_activation_checkpointing_is_undone():
    model = build(torch.float32, checkpoint_activations=True)
    plain = build(torch.float32)
    for each in (model, plain):
        set_deltas(each, random_deltas(each, 17))
        each(TOKENS)[0].square().sum().backward()
    name = model.trained_names[0]
    assert torch.equal(model.get_parameter(name).grad, plain.get_parameter(name).grad)


class NoForwardDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def test_missing_forward_derivative_names_the_parameters():
    model = build()
    set_deltas(model, random_deltas(model, 18))
    with pytest.raises(UserError, match=r"respect to decoder\.layers\.\*\.self_attn\.k_proj\.bias"):
        model.evaluate(lambda: NoForwardDerivative.apply(model.decoder(TOKENS)[0]))
    assert model(TOKENS)[0].isfinite().all()


@pytest.mark.parametrize(("dtype", "remedy"), [(torch.float16, "precision=bf16 or fp32"), (torch.float32, "--lr")])
def test_overflow_of_the_first_order_term_is_an_error(dtype, remedy):
    model = build(dtype)
    largest = torch.finfo(dtype).max
    set_deltas(model, {name: torch.full_like(delta, largest) for name, delta in random_deltas(model, 19).items()})
    with pytest.raises(UserError, match=remedy):
        model(TOKENS)


def test_running_the_decoder_outside_evaluate_is_an_error():
    model = build()
    for call in (
        lambda: model.decoder(TOKENS),
        lambda: model.decoder.extract_features(TOKENS, None),
        lambda: model.decoder.layers[0].self_attn.k_proj(torch.ones(16, dtype=torch.float64)),
    ):
        with pytest.raises(RuntimeError, match="evaluate"):
            call()
    with pytest.raises(RuntimeError, match="incremental state"):
        model(TOKENS, incremental_state={})
