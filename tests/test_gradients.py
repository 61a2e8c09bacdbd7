"""Gradient control: norms per layer, limits per layer, in every precision fairseq trains in."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer, build_optimizer
from omegaconf import DictConfig, OmegaConf
from torch import nn

from fairseq_icl.errors import UserError
from fairseq_icl.gradient_record import read_gradient_record
from fairseq_icl.gradients import GradientControl
from fairseq_icl.models.pretrained_lm import PretrainedLM
from tests.criterions.tiny_model import build_model, criterion, sample_of

SAMPLE = sample_of([[0, 5, 7, 4, 9, 11], [0, 8, 6, 10, 2, 5]])
LAYERS, SAMPLE_SIZE = 3, 10
KINDS = ["k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"]


def flags(clip: str = "none", value: str | None = None, record: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(layer_clip=clip, layer_clip_value=value, record_gradients=record and str(record))


def fairseq_config(**common: object) -> DictConfig:
    """The parts of fairseq's configuration that optimizers read: plain SGD, the loss scale of the published runs."""
    scale = {"fp16_init_scale": 4, "fp16_scale_window": 256, "fp16_scale_tolerance": 0.0}
    limits = {"threshold_loss_scale": None, "min_loss_scale": 1e-4}
    sgd = {"_name": "sgd", "lr": [1.0], "momentum": 0.0, "weight_decay": 0.0}
    return OmegaConf.create({"optimizer": sgd, "common": scale | limits | common})


def sgd(parameters: list[nn.Parameter]) -> FairseqOptimizer:
    return build_optimizer(fairseq_config().optimizer, parameters)


def half_flat(parameters: list[nn.Parameter]) -> FP16Optimizer:
    """fairseq's default for fp16: one flat fp32 copy a device (which it only builds on GPUs, hence by hand)."""
    flat = nn.Parameter(torch.cat([parameter.detach().float().flatten() for parameter in parameters]))
    flat.grad = torch.zeros_like(flat)
    return FP16Optimizer(fairseq_config(), parameters, sgd([flat]), {None: flat})


def half_not_flat(parameters: list[nn.Parameter]) -> FP16Optimizer:
    return FP16Optimizer.build_optimizer(fairseq_config(fp16_no_flatten_grads=True), parameters)


def half_memory_efficient(parameters: list[nn.Parameter]) -> MemoryEfficientFP16Optimizer:
    return MemoryEfficientFP16Optimizer(fairseq_config(), parameters, sgd(parameters), allow_unsupported=True)


OPTIMIZERS = {
    "fp32": sgd,
    "fp16": half_flat,
    "fp16-no-flatten-grads": half_not_flat,
    "memory-efficient-fp16": half_memory_efficient,
}


def trained(model: PretrainedLM) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def prepare(precision: str, clip_norm: float = 0.0) -> tuple[PretrainedLM, FairseqOptimizer, float]:
    """A model before its first update, as fairseq's trainer prepares it: (model, optimizer, gradient norm)."""
    model = build_model(dtype=torch.float32)
    model = model if precision == "fp32" else model.half()
    optimizer = OPTIMIZERS[precision](trained(model))
    optimizer.zero_grad()
    optimizer.backward(criterion()(model, SAMPLE)[0])
    optimizer.multiply_grads(1 / SAMPLE_SIZE)
    return model, optimizer, float(optimizer.clip_grad_norm(clip_norm))


def update_of(model: PretrainedLM, optimizer: FairseqOptimizer, control: GradientControl | None) -> list[torch.Tensor]:
    """What one step with learning rate 1 subtracts from the layers' parameters: a flat vector a layer."""
    before = [parameter.detach().float().clone() for parameter in trained(model)]
    if control is not None:
        control.before_step(optimizer, model, 0, ([7], 1.0, SAMPLE_SIZE))
    optimizer.step()
    changes = [old - new.detach().float() for old, new in zip(before, trained(model), strict=True)]
    per_layer = len(changes) // LAYERS
    return [torch.cat([c.flatten() for c in changes[i : i + per_layer]]) for i in range(0, len(changes), per_layer)]


def exact_norms() -> list[float]:
    return [update.norm().item() for update in update_of(*prepare("fp32")[:2], None)]


@pytest.mark.parametrize("precision", OPTIMIZERS)
def test_logged_norms_are_those_of_the_gradient_the_optimizer_uses(precision: str):
    model, optimizer, total = prepare(precision)
    control = GradientControl(flags(), model.decoder)
    with metrics.aggregate() as aggregator:
        control.before_step(optimizer, model, 0, ([7], 1.0, SAMPLE_SIZE))
    logged = [aggregator[f"gnorm_layer_{layer}"].avg for layer in range(LAYERS)]
    assert math.hypot(*logged) == pytest.approx(total, rel=1e-3 if "fp16" in precision else 1e-6)
    assert logged == pytest.approx(exact_norms(), rel=1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("precision", OPTIMIZERS)
def test_norm_clip_scales_only_layers_above_their_limit(precision: str):
    norms = exact_norms()
    limits = [norms[0] / 2, norms[1] * 10, norms[2] / 4]
    plain = update_of(*prepare(precision)[:2], None)
    model, optimizer, _ = prepare(precision)
    clipped = update_of(model, optimizer, GradientControl(flags("norm", ",".join(map(str, limits))), model.decoder))
    tolerance = 1e-5 if precision == "fp32" else 2e-2  # fp16 weights round the update
    assert clipped[0].norm().item() == pytest.approx(limits[0], rel=tolerance)
    assert clipped[2].norm().item() == pytest.approx(limits[2], rel=tolerance)
    assert torch.equal(clipped[1], plain[1])
    assert torch.nn.functional.cosine_similarity(clipped[0], plain[0], dim=0) > 1 - 1e-3


@pytest.mark.parametrize("precision", OPTIMIZERS)
def test_max_clip_limits_every_component(precision: str):
    plain = update_of(*prepare(precision)[:2], None)
    limit = plain[1].abs().quantile(0.9).item()
    model, optimizer, _ = prepare(precision)
    clipped = update_of(model, optimizer, GradientControl(flags("max", str(limit)), model.decoder))
    for one, other in zip(clipped, plain, strict=True):
        torch.testing.assert_close(one, other.clamp(-limit, limit), rtol=0, atol=1e-6 if precision == "fp32" else 2e-3)


@pytest.mark.parametrize("precision", OPTIMIZERS)
def test_fairseq_clip_norm_comes_first(precision: str):
    total = math.hypot(*exact_norms())
    model, optimizer, _ = prepare(precision, clip_norm=total / 2)
    control = GradientControl(flags(), model.decoder)
    with metrics.aggregate() as aggregator:
        control.before_step(optimizer, model, 0, ([7], 1.0, SAMPLE_SIZE))
    logged = [aggregator[f"gnorm_layer_{layer}"].avg for layer in range(LAYERS)]
    assert math.hypot(*logged) == pytest.approx(total / 2, rel=1e-2)


def run(path: Path | None, rows: list[int], clip: str = "none", value: str | None = None) -> list[torch.Tensor]:
    """A run of one update a row; returns the updates of the layers at the last one."""
    model = build_model(dtype=torch.float32)
    control, optimizer = GradientControl(flags(clip, value, path), model.decoder), sgd(trained(model))
    for step, row in enumerate(rows):
        optimizer.zero_grad()
        loss = criterion()(model, SAMPLE)[0]
        optimizer.backward(loss)
        optimizer.multiply_grads(0.01)
        before = [parameter.detach().clone() for parameter in trained(model)]
        control.before_step(optimizer, model, step, ([row], loss.item(), SAMPLE_SIZE))
        optimizer.step()
    changes = [old - new.detach() for old, new in zip(before, trained(model), strict=True)]
    return [torch.cat([change.flatten() for change in changes[i : i + 4]]) for i in range(0, len(changes), 4)]


def test_record_holds_a_norm_for_every_step_layer_and_parameter(tmp_path: Path):
    run(tmp_path / "new" / "record.parquet", [7, 3])
    record = read_gradient_record(tmp_path / "new" / "record.parquet")
    assert len(record) == 2 * LAYERS * 4
    assert record["step"].unique().tolist() == [0, 1]
    assert record.groupby("step")["demonstration"].unique().map(list).tolist() == [["7"], ["3"]]
    assert sorted(record["parameter"].unique()) == sorted(KINDS)
    assert record["layer"].unique().tolist() == [0, 1, 2]
    assert (record["sample_size"] == SAMPLE_SIZE).all()
    values = record[record["parameter"] != "k_proj.bias"]["norm"]
    assert (values > 1e-4).all()


def test_limits_from_a_record_of_the_same_run_change_nothing(tmp_path: Path):
    recorded = run(tmp_path / "record.parquet", [7, 3])
    again = run(None, [7, 3], "norm", f"from:{tmp_path / 'record.parquet'}")
    torch.testing.assert_close(again, recorded, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [[7, 4], [7, 3, 5]], ids=["other", "more"])
def test_record_of_other_demonstrations_is_refused(tmp_path: Path, rows: list[int]):
    run(tmp_path / "record.parquet", [7, 3])
    with pytest.raises(UserError, match=r"record\.parquet.*same demonstrations"):
        run(None, rows, "norm", f"from:{tmp_path / 'record.parquet'}")


@pytest.mark.parametrize(
    ("clip", "value", "message"),
    [
        ("none", "1", "no effect without"),
        ("norm", None, "needs --layer-clip-value"),
        ("norm", "1,2", "2 values for 3 layers"),
        ("norm", "1,2,x", "not a number"),
        ("norm", "0", "positive"),
        ("max", "-1", "positive"),
        ("max", "nan", "positive"),
        ("max", "from:file", "holds norms"),
        ("norm", "from:missing.parquet", "no such file"),
    ],
)
def test_bad_limit_is_told_in_one_line(clip: str, value: str | None, message: str):
    with pytest.raises(UserError, match=message) as error:
        GradientControl(flags(clip, value), build_model().decoder)
    assert "\n" not in str(error.value)


def test_gradient_that_is_not_finite_is_named():
    model, optimizer, _ = prepare("fp32")
    model.decoder.layers[1].self_attn.v_proj.weight.grad[0, 0] = math.nan
    control = GradientControl(flags(), model.decoder)
    with pytest.raises(UserError, match=r"layer 1 is NaN or infinite at demonstration 7 "):
        control.check_finite(optimizer, 1.0, [7])
    with pytest.raises(UserError, match=r"layer 1 "):
        control.before_step(optimizer, model, 0, ([7], 1.0, SAMPLE_SIZE))


def test_overflow_of_half_precision_is_left_to_fairseq(tmp_path: Path):
    model, optimizer, _ = prepare("fp16")
    trained(model)[0].grad[0] = math.inf
    GradientControl(flags(), model.decoder).check_finite(optimizer, 1.0, [7])
    model = build_model(dtype=torch.float32)
    amp = AMPOptimizer(fairseq_config(), trained(model), sgd(trained(model)))
    trained(model)[0].grad = torch.full_like(trained(model)[0], math.inf)
    control = GradientControl(flags(record=tmp_path / "record.parquet"), model.decoder)
    control.before_step(amp, model, 0, ([7], 1.0, SAMPLE_SIZE))
    assert not (tmp_path / "record.parquet").exists()
