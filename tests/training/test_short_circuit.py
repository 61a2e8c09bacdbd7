"""Fine-tuning of a model that is cut after one layer."""

import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.errors import UserError


@pytest.fixture(scope="module")
def model():
    return fi.load_model("demo")


@pytest.fixture(scope="module")
def prompts(model):
    return fi.build_prompts(model, "demo_sentiment", k=3, limit=4)


def weights_of(model, prompts, method: str, **settings: object) -> dict[str, torch.Tensor]:
    with fi.fine_tuned(model, prompts, method, lr=0.3, record_queries=False, **settings) as tuned:
        return dict(tuned.weights)


def test_a_cut_at_the_last_layer_trains_the_whole_model_to_the_bit(model, prompts):
    whole, cut = weights_of(model, prompts, "gd"), weights_of(model, prompts, "short_circuit", layers="5")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    by_default = weights_of(model, prompts, "short_circuit")
    assert all(torch.equal(whole[name], by_default[name]) for name in whole)


def test_a_cut_model_learns_as_a_model_of_that_depth_does(model, prompts):
    cut = weights_of(model, prompts, "short_circuit", layers="2")
    decoder = model.lm.decoder
    whole = decoder.layers
    decoder.layers = whole[:3]
    try:
        shorter = weights_of(model, prompts, "gd")
    finally:
        decoder.layers = whole
    for name, tensor in cut.items():
        before = model.lm.get_parameter(name)
        if name in shorter:
            torch.testing.assert_close(tensor, shorter[name], rtol=1e-4, atol=1e-6)
            assert name.endswith("k_proj.bias") or not torch.equal(tensor, before)
        else:
            assert torch.equal(tensor, before)
    assert {name.split(".")[2] for name in shorter} == {"0", "1", "2"}


def test_it_is_scored_cut_and_whole_in_one_pass(model, prompts):
    with fi.fine_tuned(model, prompts, "short_circuit", lr=0.3, layers="2") as tuned:
        seen = fi.observe(tuned, prompts)
    decoder = model.lm.decoder
    whole = decoder.layers
    decoder.layers = whole[:3]
    try:
        with fi.fine_tuned(model, prompts, "gd", lr=0.3) as shorter:
            cut = fi.observe(shorter, prompts)
    finally:
        decoder.layers = whole
    found = seen.depth_scores[:, 2].log_softmax(-1)
    torch.testing.assert_close(found, cut.option_logprobs.log_softmax(-1), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found, seen.option_logprobs.log_softmax(-1), atol=1e-2)


@pytest.mark.parametrize(
    ("layers", "told"), [("1-2", "after one layer"), ("6", "layers 0-5"), ("2-", "after one layer")]
)
def test_a_cut_is_after_one_layer_of_the_model(model, prompts, layers, told):
    with pytest.raises(UserError, match=told):
        weights_of(model, prompts, "short_circuit", layers=layers)
