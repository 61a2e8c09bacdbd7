"""The derivative through the attention weights, stopped: values learn as if attention were a constant mixture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from torch import Tensor

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing.probe import attention_modules, queries_keys_values
from fairseq_icl.settings import Settings
from fairseq_icl.training.gradients import choose_what_learns
from fairseq_icl.training.softmax_gradient import stop_softmax_gradient
from tests.criterions.tiny_model import criterion, gradients, task
from tests.models.tiny_linearized import random_deltas, set_deltas
from tests.training.small_models import SAMPLE, small_model

STOPPED = Settings(softmax_gradient="stopped")
TOKENS = SAMPLE["net_input"]["src_tokens"]


def vanilla() -> CrossEntropyCriterion:
    return CrossEntropyCriterion(task(), False)


def mixing(module: Any) -> Callable[..., tuple[Tensor, None]]:
    """Attention written down with its weights as a constant."""

    def forward(query: Tensor, **_: Any) -> tuple[Tensor, None]:
        queries, keys, values = queries_keys_values(module, query)  # (B, H, T, D)
        future = torch.full((query.size(0),) * 2, -torch.inf, dtype=query.dtype).triu(1)
        weights = (queries @ keys.transpose(2, 3) + future).softmax(-1).detach()
        return module.out_proj((weights @ values).permute(2, 0, 1, 3).flatten(2)), None

    return forward


def mixed(_: Any, query: Tensor, key: Tensor, value: Tensor, __: None) -> Tensor:
    """The same where a model of transformers hands over its queries, keys and values."""
    future = torch.full((query.size(2),) * 2, -torch.inf, dtype=query.dtype).triu(1)
    return (query @ key.transpose(2, 3) + future).softmax(-1).detach() @ value


def model_with(kind: str, stop: bool, **options: Any) -> PretrainedLM:
    model = small_model(kind, **options)
    if kind != "linearized":
        choose_what_learns(model, STOPPED if stop else Settings())
    if stop:
        stop_softmax_gradient(model.decoder)
    return model


@pytest.mark.parametrize("loss", [vanilla, criterion], ids=["gd", "lcgd"])
@pytest.mark.parametrize("options", [{"kind": "fairseq"}, {"kind": "stablelm"}, {"kind": "gpt_neox"}])
def test_values_learn_as_with_constant_attention_weights(options: dict[str, Any], loss: Callable[[], Any]):
    expected_of = small_model(**options)
    choose_what_learns(expected_of, STOPPED)
    for module in attention_modules(expected_of.decoder):
        if hasattr(module, "seam"):
            module.seam.stand_in = mixed
        else:
            module.forward = mixing(module)
    expected = gradients(expected_of, loss()(expected_of, SAMPLE)[0])
    model = model_with(stop=True, **options)
    found = gradients(model, loss()(model, SAMPLE)[0])
    assert found
    assert all(".v_proj." in name for name in found)
    # fairseq's own cross entropy takes logarithms in fp32 even here
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["fairseq", "stablelm"])
def test_outputs_do_not_change_and_lower_values_learn_something_else(kind: str):
    stopped, kept = model_with(kind, stop=True), model_with(kind, stop=False)
    # Not to the bit: torch multiplies in another shape where no gradient is wanted.
    torch.testing.assert_close(stopped(TOKENS)[0], kept(TOKENS)[0], rtol=1e-12, atol=1e-12)
    one, other = (gradients(model, vanilla()(model, SAMPLE)[0]) for model in (stopped, kept))
    assert any(".k_proj." in name for name in other)
    name = "decoder.layers.{}.self_attn.v_proj.weight"
    torch.testing.assert_close(one[name.format(1)], other[name.format(1)])  # nothing lies between it and the loss
    assert not torch.allclose(one[name.format(0)], other[name.format(0)])


def test_linearized_model_moves_by_its_true_derivative_and_learns_at_its_start_as_the_ordinary_one():
    stopped, kept = (model_with("linearized", stop=stop) for stop in (True, False))
    for model in (stopped, kept):
        set_deltas(model, random_deltas(model, seed=1))
    # Not to the bit: torch multiplies in another shape where no gradient is wanted.
    torch.testing.assert_close(stopped(TOKENS)[0], kept(TOKENS)[0], rtol=1e-12, atol=1e-12)
    for model in (stopped, kept):
        set_deltas(model, {name: torch.zeros_like(model.get_parameter(name)) for name in model.trained_names})
    found = gradients(stopped, criterion()(stopped, SAMPLE)[0])
    ordinary = model_with("fairseq", stop=True)
    expected = gradients(ordinary, criterion()(ordinary, SAMPLE)[0])
    torch.testing.assert_close({name: found[name] for name in expected}, expected)


def test_only_keys_to_learn_is_refused():
    keys = Settings(softmax_gradient="stopped", train_parameters="self_attn.k_proj")
    with pytest.raises(UserError, match="softmax_gradient=stopped: leaves nothing to learn"):
        choose_what_learns(small_model("fairseq"), keys)


@pytest.mark.parametrize("method", ["gd", "lcgd", "lcgd_sequential", "linearized"])
def test_methods_train_values_alone_and_leave_the_model_as_it_was(method: str):
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=2, limit=1)
    with fi.fine_tuned(model, prompts, method, lr=0.3, softmax_gradient="stopped", record_queries=False) as tuned:
        assert set(tuned.gradients["parameter"]) == {"v_proj.weight", "v_proj.bias"}
        assert (tuned.gradients["norm"] > 0).all()
    with fi.fine_tuned(model, prompts, method, lr=0.3, record_queries=False) as tuned:
        keys = tuned.gradients[tuned.gradients["parameter"] == "k_proj.weight"]
        assert (keys["norm"] > 0).all()
