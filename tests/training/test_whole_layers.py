"""Gradient norms of whole layers: against autograd on a model of which everything learns, and without a trace left."""

import numpy as np
import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.results import whole_layer_matrix
from fairseq_icl.results.gradient_record import GradientRecorder
from fairseq_icl.training.gradients import GradientControl
from fairseq_icl.training.norms import WholeLayers, _product_square
from tests.criterions.tiny_model import criterion
from tests.training.small_models import SAMPLE, optimizer_of, small_model, update, weights_of


def watched(model: PretrainedLM) -> GradientControl:
    whole = WholeLayers(model.decoder)
    return GradientControl(model.decoder, recorder=GradientRecorder(model.decoder), whole_layers=whole)


def norms_if_everything_learned(model: PretrainedLM) -> list[float]:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    criterion()(model, SAMPLE)[0].backward()
    gradients = [[p.grad.flatten() for p in layer.parameters()] for layer in model.decoder.layers]
    return [float(torch.cat(parts).norm()) for parts in gradients]


@pytest.mark.parametrize("learning_part", ["k_proj,self_attn.v_proj", "fc2", "final_layer_norm"])
@pytest.mark.parametrize("kind", ["fairseq", "stablelm"])
def test_norms_are_those_of_a_model_of_which_everything_learns(kind: str, learning_part: str):
    model = small_model(kind, 3)
    learning_part = learning_part if kind == "fairseq" else learning_part.replace("fc2", "down_proj")
    model.freeze_all_but(learning_part, biases=True)
    learning, control, optimizer = model.trained_names, watched(model), optimizer_of(model)
    assert control.begins_update()
    with control.watching(optimizer, first=True):
        loss, _, _ = criterion()(model, SAMPLE)
        optimizer.backward(loss)
    assert not control.begins_update()
    assert control.whole_layers is not None
    found = control.whole_layers.norms
    assert model.trained_names == learning
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    np.testing.assert_allclose(found, norms_if_everything_learned(small_model(kind, 3)), rtol=1e-6)


@pytest.mark.parametrize("rows", [3, 200])
def test_square_of_a_product_is_that_of_the_matrix_even_where_tokens_cancel(rows: int):
    torch.manual_seed(0)
    inputs, gradient = torch.randn(rows, 40), torch.randn(rows, 24)
    inputs, gradient = torch.cat([inputs, inputs + 1e-3]), torch.cat([gradient, -gradient])
    exact = float((gradient.double().t() @ inputs.double()).square().sum())
    assert exact < 1e-4 * float(inputs.square().sum() * gradient.square().sum()) / rows
    assert _product_square(gradient, inputs) == pytest.approx(exact, rel=1e-6 if rows == 3 else 1e-3)


def test_layers_learn_the_same_whether_looked_at_or_not():
    plain, seen = small_model("fairseq"), small_model("fairseq")
    update(plain, criterion(), steps=2)
    control, optimizer = watched(seen), optimizer_of(seen)
    for _ in range(2):
        with control.watching(optimizer, first=True):
            update(seen, criterion(), optimizer, control)
    torch.testing.assert_close(weights_of(seen), weights_of(plain), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["gd", "lcgd", "lcgd_sequential"])
def test_record_of_a_fine_tuning_has_them_for_every_step(demo_prompts: tuple[fi.Model, fi.Prompts], method: str):
    model, prompts = demo_prompts
    with fi.fine_tuned(model, prompts, method, lr=0.1, gradient_norms="all") as tuned:
        record, weights = tuned.gradients, tuned.weights
    with fi.fine_tuned(model, prompts, method, lr=0.1) as tuned:
        assert tuned.gradients is not None
        assert whole_layer_matrix(tuned.gradients) is None
        assert all(torch.equal(tuned.weights[name], weights[name]) for name in weights)
    assert record is not None
    whole = whole_layer_matrix(record)
    assert whole is not None
    assert whole.shape == (3, len(model.lm.decoder.layers))
    summed = record.assign(square=(record["norm"] * record["sample_size"]) ** 2)
    trained = np.sqrt(summed.groupby(["step", "layer"])["square"].sum().unstack().to_numpy())
    assert (whole > 1.05 * trained).all()


@pytest.fixture(scope="module")
def demo_prompts() -> tuple[fi.Model, fi.Prompts]:
    model = fi.load_model("demo")
    return model, fi.build_prompts(model, "demo_sentiment", k=3, limit=1)


def test_a_linearized_model_has_none(demo_prompts: tuple[fi.Model, fi.Prompts]):
    model, prompts = demo_prompts
    with fi.fine_tuned(model, prompts, "linearized", lr=0.1, gradient_norms="all") as tuned:
        assert tuned.gradients is not None
        assert whole_layer_matrix(tuned.gradients) is None


def test_several_batches_an_update_are_refused():
    small = small_model("fairseq")
    with (
        pytest.raises(UserError, match="leave --update-freq at 1"),
        watched(small).watching(optimizer_of(small), first=False),
    ):
        pass
