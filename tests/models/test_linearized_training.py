"""The linearized model under fairseq's criterions: stock cross entropy, and one loss a layer."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions import FairseqCriterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from fairseq_icl.criterions.layer_causal_ce import LayerCausalCrossEntropy
from fairseq_icl.models.pretrained_lm import PretrainedLM
from tests.models.tiny_linearized import TOKENS, build, build_decoder, random_deltas, set_deltas

SAMPLE = {
    "net_input": {"src_tokens": TOKENS[:, :-1], "src_lengths": torch.tensor([5, 5])},
    "target": TOKENS[:, 1:].contiguous(),
    "ntokens": 10,
    "nsentences": 2,
}


@pytest.fixture(params=[CrossEntropyCriterion, LayerCausalCrossEntropy])
def criterion(request) -> FairseqCriterion:
    task = SimpleNamespace(target_dictionary=build_decoder().dictionary)
    return request.param(task, sentence_avg=False)


def test_first_gradient_is_that_of_the_ordinary_model_to_the_bit(criterion):
    model, ordinary = build(torch.float32), PretrainedLM(build_decoder())
    for each in (model, ordinary):
        criterion(each, SAMPLE)[0].backward()
    for name in model.trained_names:
        assert torch.equal(model.get_parameter(name).grad, ordinary.get_parameter(name).grad)


def test_gradient_of_a_moved_model_is_the_slope_of_its_loss(criterion):
    """Along the top layer's deltas, which move the top layer's loss and no other."""
    model = build()
    deltas = random_deltas(model, 1)
    top = [name for name in deltas if ".layers.1." in name]

    def loss_at(length: float) -> torch.Tensor:
        set_deltas(model, {name: (length if name in top else 1) * delta for name, delta in deltas.items()})
        return criterion(model, SAMPLE)[0]

    loss_at(1.0).backward()
    along = sum((model.get_parameter(name).grad * deltas[name]).sum() for name in top)
    step = 0.01  # fairseq takes the log-softmax in float32
    slope = (loss_at(1 + step) - loss_at(1 - step)) / (2 * step)
    assert along.item() == pytest.approx(slope.item(), rel=2e-3)


def test_layer_losses_see_the_tangents_of_the_layers_below():
    criterion = LayerCausalCrossEntropy(SimpleNamespace(target_dictionary=build_decoder().dictionary))
    model = build()
    before = criterion(model, SAMPLE)[2]
    below = {name: delta for name, delta in random_deltas(model, 2).items() if ".layers.0." in name}
    after = criterion(set_deltas(model, below), SAMPLE)[2]
    assert abs(after["loss_layer_1"] - before["loss_layer_1"]) > 1e-3
