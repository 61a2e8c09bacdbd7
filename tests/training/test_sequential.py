"""Sequential updates: every layer steps before the next one sees its input, against plain references."""

import dataclasses
from typing import Any

import pytest
import torch
from fairseq.optim import FP16Optimizer
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.functional import cross_entropy

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import PretrainedLM
from tests.criterions.tiny_model import criterion
from tests.training.small_models import KINDS, RATE, SAMPLE, optimizer_of, small_model, update, weights_of

TARGET = SAMPLE["target"]
SIZE = int(TARGET.ne(1).sum())


Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def calls_of(decoder: Any) -> Calls:
    """What every layer is called with."""
    calls: Calls = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        for layer in decoder.layers
    ]
    decoder.extract_features(SAMPLE["net_input"]["src_tokens"], None)
    for hook in hooks:
        hook.remove()
    return calls


def logits(decoder: Any, x: Tensor) -> Tensor:
    """(B, T, V) of x (T, B, d)"""
    return decoder.output_layer(decoder.layer_norm(x.transpose(0, 1)))


def loss_of(scores: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), TARGET.flatten(), ignore_index=1, reduction="sum") / SIZE


def by_hand(model: PretrainedLM, sequential: bool) -> dict[str, Tensor]:
    """One update of a model of ordinary weights, written down as the definition says it."""
    decoder = model.decoder
    calls = calls_of(decoder)
    x = calls[0][0][0].detach()  # (T, B, d)
    for layer, (args, kwargs) in zip(decoder.layers, calls, strict=True):
        learning = [p for p in layer.parameters() if p.requires_grad]
        output = layer(x, *args[1:], **kwargs)[0]
        steps = torch.autograd.grad(loss_of(logits(decoder, output)), learning)
        with torch.no_grad():
            for parameter, step in zip(learning, steps, strict=True):
                parameter -= RATE * step
            x = layer(x, *args[1:], **kwargs)[0] if sequential else output.detach()
    return weights_of(model)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, **tolerance)


@pytest.mark.parametrize("kind", ["fairseq", "stablelm"])
@pytest.mark.parametrize("sequential", [False, True])
def test_both_orders_are_what_their_definitions_say(kind: str, sequential: bool):
    model = small_model(kind)
    update(model, criterion(sequential=sequential))
    assert_same(weights_of(model), by_hand(small_model(kind), sequential))


def test_linearized_layers_see_the_first_order_change_of_the_layers_below():
    """delta_1 is the gradient at f(w0) + J delta_0, by finite differences of the ordinary model."""
    model = small_model("linearized")
    update(model, criterion(sequential=True))
    found = weights_of(model)
    plain = small_model("fairseq")
    update(plain, criterion(layers="0"))
    start = weights_of(small_model("fairseq"))
    lowest = {name: weights - start[name] for name, weights in weights_of(plain).items()}  # layer 0's alone
    for name, change in lowest.items():
        if ".layers.0." in name:
            assert_same({name: found[name]}, {name: change})

    def features(scale: float) -> Tensor:
        moved = small_model("fairseq")
        with torch.no_grad():
            for name, change in lowest.items():
                moved.get_parameter(name).add_(scale * change)
            return moved.decoder.extract_features(SAMPLE["net_input"]["src_tokens"], None)[0]

    base = small_model("fairseq")
    features_at_base = base.decoder.extract_features(SAMPLE["net_input"]["src_tokens"], None)[
        0
    ]  # (B, T, d), with a graph
    first_order = (features(1e-4) - features(-1e-4)) / 2e-4
    moved = (features_at_base.detach() + first_order).requires_grad_()
    [error] = torch.autograd.grad(loss_of(base.decoder.output_layer(moved)), moved)
    top = [name for name in found if ".layers.1." in name]
    steps = torch.autograd.grad(features_at_base, [base.get_parameter(name) for name in top], error)
    expected = {name: -RATE * step for name, step in zip(top, steps, strict=True)}
    torch.testing.assert_close({name: found[name] for name in top}, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_learns_the_same_to_the_bit_and_two_do_not(kind: str):
    for layers in (1, 2):
        one, other = small_model(kind, layers), small_model(kind, layers)
        update(one, criterion(), steps=2)
        update(other, criterion(sequential=True), steps=2)
        same = {name: torch.equal(a, weights_of(other)[name]) for name, a in weights_of(one).items()}
        assert all(same.values()) == (layers == 1), same


@pytest.mark.parametrize("kind", KINDS)
def test_lowest_layer_with_a_loss_learns_as_in_concurrent_updates(kind: str):
    one, other = small_model(kind, 3), small_model(kind, 3)
    update(one, criterion(layers="1-"))
    update(other, criterion(layers="1-", sequential=True))
    start, after = weights_of(small_model(kind, 3)), weights_of(other)
    for name, weights in weights_of(one).items():
        if ".layers.1." in name:
            assert torch.equal(after[name], weights), name
        if ".layers.0." in name:
            assert torch.equal(after[name], start[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_model_is_left_whole(kind: str):
    model, untouched = small_model(kind, 3), small_model(kind, 3)
    update(model, criterion(sequential=True), optimizer_of(model, lr=0.0))
    tokens = SAMPLE["net_input"]["src_tokens"]
    assert torch.equal(model(tokens)[0], untouched(tokens)[0])


def test_an_update_is_recorded_as_one_with_the_norms_of_every_layer():
    model = small_model("fairseq")
    record = update(model, criterion(sequential=True)).recorder.table()
    concurrent = update(small_model("fairseq"), criterion()).recorder.table()
    assert record["step"].unique().tolist() == [0]
    assert record[["layer", "parameter", "demonstration"]].equals(concurrent[["layer", "parameter", "demonstration"]])
    lowest = record["layer"] == 0
    assert record.loc[lowest, "norm"].tolist() == concurrent.loc[lowest, "norm"].tolist()
    assert (record.loc[~lowest & (record["parameter"] != "k_proj.bias"), "norm"] > 1e-6).all()
    assert record["loss_sum"].iloc[0] != concurrent["loss_sum"].iloc[0]


def test_layer_mean_divides_every_layers_step():
    model, halved = small_model("fairseq", 1), small_model("fairseq", 2)
    update(halved, criterion(sequential=True, layer_loss="mean", layers="0"))
    update(model, criterion(sequential=True, layers="0"))
    update(two := small_model("fairseq", 2), criterion(sequential=True, layer_loss="mean"))
    start = weights_of(small_model("fairseq", 2))
    name = "decoder.layers.0.self_attn.v_proj.weight"
    alone, shared = (weights_of(m)[name] - start[name] for m in (halved, two))
    torch.testing.assert_close(2 * shared, alone)


def test_what_would_step_layers_together_is_refused():
    with pytest.raises(UserError, match="--clip-norm: needs the gradients of all layers"):
        criterion(sequential=True, clip_norm=1.0)
    model = small_model("fairseq").half()
    common = {"fp16_init_scale": 4, "fp16_scale_window": 256, "fp16_scale_tolerance": 0.0, "threshold_loss_scale": None}
    sgd = {"_name": "sgd", "lr": [1.0], "momentum": 0.0, "weight_decay": 0.0}
    config = OmegaConf.create(
        {"optimizer": sgd, "common": common | {"min_loss_scale": 1e-4} | {"fp16_no_flatten_grads": True}}
    )
    half = FP16Optimizer.build_optimizer(config, [p for p in model.parameters() if p.requires_grad])
    with pytest.raises(UserError, match="use precision=fp32"):
        update(model, criterion(sequential=True), half)


def test_method_trains_the_demo_model_and_is_not_the_concurrent_one():
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=3, limit=1)
    trained = {}
    for method in ("lcgd", "lcgd_sequential"):
        with fi.fine_tuned(model, prompts, method, lr=0.3, record_queries=False) as tuned:
            trained[method] = tuned
    name = "decoder.layers.{}.self_attn.v_proj.weight"
    one, other = (trained[method].weights for method in trained)
    assert not torch.equal(one[name.format(1)], other[name.format(1)])
    assert trained["lcgd_sequential"].gradients["step"].nunique() == 3
    first = dataclasses.replace(prompts, finetuning=prompts.finetuning[:1])
    for method in trained:
        with fi.fine_tuned(model, first, method, lr=0.3, record_queries=False) as tuned:
            trained[method] = tuned
    torch.testing.assert_close(*(trained[method].weights[name.format(0)] for method in trained))
    with (
        pytest.raises(UserError, match="--clip-norm"),
        fi.fine_tuned(model, first, "lcgd_sequential", lr=1, clip_norm=1),
    ):
        pass
