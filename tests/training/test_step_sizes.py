"""Relative sizes of steps: what is recorded is what happened, and equal steps are equal."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.results import heatmap_matrix, step_size_matrix
from fairseq_icl.results.gradient_record import GradientRecorder
from fairseq_icl.settings import Settings, equal_step_size
from fairseq_icl.training.gradients import GradientControl
from tests.criterions.tiny_model import criterion
from tests.training.small_models import KINDS, optimizer_of, small_model, update, weights_of

OPTIMIZERS = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "adam": {
        "_name": "adam",
        "adam_betas": "(0.9, 0.999)",
        "adam_eps": 1e-8,
        "tpu": False,
        "use_old_adam": False,
        "fp16_adam_stats": False,
    },
}


def control_of(model: PretrainedLM, size: float | None = None) -> GradientControl:
    return GradientControl(model.decoder, recorder=GradientRecorder(model.decoder), step_size=size)


def recorded(control: GradientControl) -> pd.DataFrame:
    assert control.recorder is not None
    return control.recorder.table()


def in_layer(weights: dict[str, Tensor], layer: int) -> Tensor:
    return torch.cat([tensor.flatten() for name, tensor in weights.items() if f".layers.{layer}." in name])


def whole(model: PretrainedLM) -> dict[str, Tensor]:
    """The weights themselves, also of a linearized model."""
    base = {name: getattr(model.get_submodule(name.rpartition(".")[0]), f"{name.rpartition('.')[2]}_base", 0)
            for name in model.trained_names}  # fmt: skip
    return {name: tensor + base[name] for name, tensor in weights_of(model).items()}


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_record_says_how_far_every_layer_moved(kind: str, optimizer: str, sequential: bool):
    model = small_model(kind, 3)
    control, steps = control_of(model), optimizer_of(model, **OPTIMIZERS[optimizer])
    expected = []
    for _ in range(2):
        before = whole(model)
        update(model, criterion(sequential=sequential), steps, control)
        changes = {name: tensor - before[name] for name, tensor in whole(model).items()}
        expected.append([float(in_layer(changes, layer).norm() / in_layer(before, layer).norm()) for layer in range(3)])
    record = recorded(control)
    record["step"] = np.repeat([0, 1], len(record) // 2)  # each was the first update of a loop of its own
    np.testing.assert_allclose(step_size_matrix(record), expected, rtol=1e-6)
    assert (step_size_matrix(record) > 1e-4).all()


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_steps_are_equal_and_keep_their_direction(kind: str, sequential: bool):
    plain, equal = small_model(kind), small_model(kind)
    start = whole(plain)
    update(plain, criterion(sequential=sequential, layers="0"))
    control = control_of(equal, size=0.01)
    update(equal, criterion(sequential=sequential), control=control, steps=3)
    np.testing.assert_allclose(step_size_matrix(recorded(control)), np.full((3, 2), 0.01), rtol=1e-6)
    once = small_model(kind)
    update(once, criterion(sequential=sequential), control=control_of(once, size=0.01))
    changes = [{name: tensor - start[name] for name, tensor in whole(model).items()} for model in (plain, once)]
    for layer in range(2):
        size = float(in_layer(changes[1], layer).norm() / in_layer(start, layer).norm())
        assert size == pytest.approx(0.01, rel=1e-6)
    cosine = torch.nn.functional.cosine_similarity(in_layer(changes[0], 0), in_layer(changes[1], 0), dim=0)
    assert float(cosine) == pytest.approx(1)


def test_equal_steps_do_not_depend_on_the_learning_rate_or_the_loss():
    one, other = small_model("fairseq"), small_model("fairseq")
    update(one, criterion(), control=control_of(one, size=0.01))
    update(other, criterion(layer_loss="mean"), optimizer_of(other, lr=7.0), control_of(other, size=0.01))
    torch.testing.assert_close(weights_of(one), weights_of(other))


def test_a_layer_without_a_gradient_does_not_move():
    model = small_model("fairseq")
    control = control_of(model, size=0.01)
    update(model, criterion(layers="1"), control=control)
    np.testing.assert_allclose(step_size_matrix(recorded(control)), [[0.0, 0.01]], rtol=1e-6)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "sgd"])
def test_equal_steps_of_other_optimizers_are_refused(optimizer: str):
    model = small_model("fairseq")
    with pytest.raises(UserError, match="layer_step=equal: needs plain gradient descent"):
        update(model, criterion(), optimizer_of(model, **OPTIMIZERS[optimizer]), control_of(model, size=0.01))


def test_equal_steps_need_a_size_and_a_rate():
    with pytest.raises(UserError, match="layer_step=equal: needs layer_step_size="):
        equal_step_size(Settings(layer_step="equal"))
    with pytest.raises(UserError, match="layer_step_size: needs layer_step=equal"):
        equal_step_size(Settings(layer_step_size=0.1))
    model = small_model("fairseq")
    with pytest.raises(UserError, match="no step can be made of lr=0"):
        update(model, criterion(), optimizer_of(model, lr=0.0), control_of(model, size=0.01))


def test_record_made_before_steps_were_recorded_has_none():
    model = small_model("fairseq")
    record = recorded(update(model, criterion()))
    old = record.assign(update=np.nan, weight=np.nan)
    assert step_size_matrix(old) is None
    np.testing.assert_array_equal(heatmap_matrix(old), heatmap_matrix(record))


@pytest.mark.parametrize("method", ["gd", "lcgd", "linearized"])
def test_fine_tuning_the_demo_model_in_equal_steps(method: str):
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=3, limit=1)
    options = {"layer_step": "equal", "layer_step_size": 0.003, "record_queries": False}
    with fi.fine_tuned(model, prompts, method, lr=0.3, **options) as tuned:
        sizes = step_size_matrix(tuned.gradients)
    np.testing.assert_allclose(sizes, np.full((3, len(model.lm.decoder.layers)), 0.003), rtol=1e-5)
