"""The linearized model is f(w0) + J delta: against the definition, finite differences and a full Jacobian."""

import copy

import pytest
import torch

from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from tests.models.tiny_linearized import (
    TOKENS,
    build,
    build_decoder,
    keys_and_values,
    random_deltas,
    set_deltas,
    stock_logits,
)


@pytest.mark.parametrize("training", [True, False])
def test_zero_delta_is_the_pretrained_model_to_the_bit(training):
    expected = PretrainedLM(build_decoder()).train(training)(TOKENS)[0]
    assert torch.equal(build(torch.float32).train(training)(TOKENS)[0], expected)


def test_value_pass_is_the_pretrained_model_to_the_bit_for_any_delta():
    model = build(torch.float32)
    passes = []
    set_deltas(model, random_deltas(model, 1))
    model.evaluate(lambda: passes.append(model(TOKENS)[0]) or passes[-1])
    assert torch.equal(passes[1], PretrainedLM(build_decoder())(TOKENS)[0])


def test_linear_in_delta():
    model = build()
    first, second = random_deltas(model, 1), random_deltas(model, 2)
    base, one, other, both = (
        set_deltas(model, deltas)(TOKENS)[0]
        for deltas in (
            {name: torch.zeros_like(delta) for name, delta in first.items()},
            first,
            second,
            {name: 2 * first[name] - 3 * second[name] for name in first},
        )
    )
    torch.testing.assert_close(both - base, 2 * (one - base) - 3 * (other - base), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("learned_pos", [True, False])
def test_matches_central_finite_differences(learned_pos):
    options = {"decoder_learned_pos": learned_pos}
    model = build(**options)
    deltas = random_deltas(model, 3)
    base = stock_logits(deltas, 0.0, **options)
    step = 1e-5
    slope = (stock_logits(deltas, step, **options) - stock_logits(deltas, -step, **options)) / (2 * step)
    torch.testing.assert_close(set_deltas(model, deltas)(TOKENS)[0], base + slope, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("trained", ["kv", "all"])
def test_gradient_equals_autograd_through_the_full_jacobian(trained):
    decoder = build_decoder(decoder_embed_dim=8, decoder_input_dim=8, decoder_output_dim=8).double()
    names = {"kv": keys_and_values(decoder), "all": [f"decoder.{name}" for name, _ in decoder.named_parameters()]}[
        trained
    ]
    stock = PretrainedLM(copy.deepcopy(decoder))
    model = LinearizedLM(decoder, names)
    deltas = {name: delta.requires_grad_() for name, delta in random_deltas(model, 4).items()}
    set_deltas(model, deltas)
    target = torch.randint(0, 16, TOKENS.shape, generator=torch.Generator().manual_seed(0))

    def logits_at(*weights):
        return torch.func.functional_call(stock, dict(zip(names, weights, strict=True)), (TOKENS,))[0]

    base = tuple(stock.get_parameter(name).detach() for name in names)
    jacobian = torch.autograd.functional.jacobian(logits_at, base)  # one (batch, tokens, vocabulary, *shape) each
    naive = logits_at(*base)
    for name, part in zip(names, jacobian, strict=True):
        naive = naive + torch.tensordot(part, deltas[name], dims=deltas[name].dim())
    torch.nn.functional.cross_entropy(naive.flatten(0, 1), target.flatten()).backward()
    logits = model(TOKENS)[0]
    torch.testing.assert_close(logits, naive, rtol=1e-9, atol=1e-10)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    for name in names:
        torch.testing.assert_close(model.get_parameter(name).grad, deltas[name].grad, rtol=1e-8, atol=1e-10)


def test_training_on_squared_error_reaches_the_closed_form():
    """|f_lin(delta) - y|^2 / 2 by gradient descent from zero: after n steps J delta = (1 - (1 - lr K)^n) (y - f)."""
    model = build()
    names = model.trained_names
    read = lambda: model(TOKENS)[0][:, -1, :3].flatten()  # noqa: E731
    base = read()
    rows = [
        torch.autograd.grad(output, [model.get_parameter(name) for name in names], retain_graph=True) for output in base
    ]
    jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])  # (6, parameters)
    kernel = jacobian @ jacobian.T
    wanted = base.detach() + torch.linspace(-1, 1, 6, dtype=torch.float64)
    rate = 0.5 / torch.linalg.eigvalsh(kernel).max().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(20):
        optimizer.zero_grad()
        (0.5 * (read() - wanted).square().sum()).backward()
        optimizer.step()
    left = torch.linalg.matrix_power(torch.eye(6, dtype=torch.float64) - rate * kernel, 20) @ (wanted - base)
    torch.testing.assert_close(read(), wanted - left, rtol=1e-8, atol=1e-9)


def test_evaluate_adds_tangents_in_any_nesting_and_leaves_the_rest_alone():
    model = build()
    deltas = random_deltas(model, 5)
    set_deltas(model, deltas)

    def look():
        features, extra = model.decoder.extract_features(TOKENS, None)
        return {"layers": extra["inner_states"], "pair": (features, TOKENS), "none": None, "name": "x"}

    seen = model.evaluate(look)
    assert seen["none"] is None
    assert seen["name"] == "x"
    assert torch.equal(seen["pair"][1], TOKENS)
    step = 1e-5
    ends = []
    for sign in (step, -step):
        stock = PretrainedLM(build_decoder().double())
        with torch.no_grad():
            for name, delta in deltas.items():
                stock.get_parameter(name).add_(sign * delta)
            ends.append(stock.decoder.extract_features(TOKENS, None))
    base = model.evaluate(look, {name: torch.zeros_like(delta) for name, delta in deltas.items()})
    for number, layer in enumerate(seen["layers"]):
        slope = (ends[0][1]["inner_states"][number] - ends[1][1]["inner_states"][number]) / (2 * step)
        torch.testing.assert_close(layer, base["layers"][number] + slope, rtol=1e-7, atol=1e-7)
    slope = (ends[0][0] - ends[1][0]) / (2 * step)
    torch.testing.assert_close(seen["pair"][0], base["pair"][0] + slope, rtol=1e-7, atol=1e-7)


def test_modules_read_inside_evaluate_have_base_value_and_delta_tangent():
    model = build()
    deltas = random_deltas(model, 6)
    set_deltas(model, deltas)
    projection = model.decoder.layers[1].self_attn.k_proj
    weight, keys = model.evaluate(lambda: (projection.weight * 1, projection(torch.ones(16, dtype=torch.float64))))
    full = projection.weight_base + deltas["decoder.layers.1.self_attn.k_proj.weight"]
    torch.testing.assert_close(weight, full)
    torch.testing.assert_close(keys, full.sum(1) + projection.bias_base + projection.bias)


def test_python_path_and_fused_path_of_attention_agree():
    model = build(torch.float32)
    set_deltas(model, random_deltas(model, 7))
    fused = model(TOKENS)[0]
    for layer in model.decoder.layers:
        layer.self_attn.skip_embed_dim_check = True
    torch.testing.assert_close(model(TOKENS)[0], fused, rtol=1e-5, atol=1e-5)


def test_padding_on_the_right_changes_nothing():
    model = build()
    set_deltas(model, random_deltas(model, 8))
    padded = torch.cat([TOKENS, torch.ones(2, 3, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(padded)[0][:, :6], model(TOKENS)[0])


def test_tied_embedding_is_one_delta():
    decoder = build_decoder().double()
    model = LinearizedLM(decoder, ["decoder.embed_tokens.weight"])
    assert [name for name, _ in model.named_parameters() if "embed_tokens" in name] == ["decoder.embed_tokens.weight"]
    deltas = random_deltas(model, 9)
    step = 1e-5
    slope = (stock_logits(deltas, step) - stock_logits(deltas, -step)) / (2 * step)
    expected = stock_logits(deltas, 0.0) + slope
    torch.testing.assert_close(set_deltas(model, deltas)(TOKENS)[0], expected, rtol=1e-7, atol=1e-7)


def test_around_shares_the_weights_of_the_model_and_leaves_what_it_computes():
    plain = PretrainedLM(build_decoder().double())
    plain.freeze_all_but("k_proj,v_proj", biases=True)
    before = plain(TOKENS)[0]
    pointers = {parameter.data_ptr() for parameter in plain.parameters()}
    model = LinearizedLM.around(plain)
    assert model.trained_names == keys_and_values(plain.decoder)
    shared = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()] if tensor.numel()}
    assert pointers <= shared
    set_deltas(model, random_deltas(model, 20))
    reference = build()
    set_deltas(reference, random_deltas(reference, 20))
    assert torch.equal(model(TOKENS)[0], reference(TOKENS)[0])
    assert torch.equal(plain(TOKENS)[0], before)


def test_given_deltas_stand_in_for_the_models_own():
    model = build()
    own, given = random_deltas(model, 21), random_deltas(model, 22)
    set_deltas(model, own)
    seen = model.evaluate(lambda: model.decoder(TOKENS)[0], given)
    assert all(torch.equal(model.get_parameter(name), own[name]) for name in own)
    assert torch.equal(seen, set_deltas(model, given)(TOKENS)[0])
