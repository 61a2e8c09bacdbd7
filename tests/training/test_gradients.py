"""Gradient control and record: norms and limits per layer in every precision fairseq trains in; a file always whole."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fairseq.logging import metrics
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer, build_optimizer
from omegaconf import DictConfig, OmegaConf
from torch import nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.results import GRADIENT_COLUMNS, gradient_record, read_gradient_record
from fairseq_icl.results.gradient_record import GradientRecorder, Update
from fairseq_icl.training.gradients import GradientControl, layer_limits
from tests.criterions.tiny_model import build_model, criterion, sample_of

SAMPLE = sample_of([[0, 5, 7, 4, 9, 11], [0, 8, 6, 10, 2, 5]])
LAYERS, SAMPLE_SIZE = 3, 10
KINDS = ["k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"]


def control_of(
    model: PretrainedLM, clip: str = "none", value: str | None = None, record: Path | None = None
) -> GradientControl:
    """As the task makes it of --layer-clip, --layer-clip-value and --record-gradients."""
    decoder = model.decoder
    recorder = GradientRecorder(decoder, record) if record else None
    return GradientControl(decoder, clip, layer_limits(clip, value, decoder), recorder)


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
    optimizer = prepared(model, precision)
    return model, optimizer, float(optimizer.clip_grad_norm(clip_norm))


def prepared(model: PretrainedLM, precision: str = "fp32") -> FairseqOptimizer:
    """An optimizer that holds the mean gradient of the sample."""
    optimizer = OPTIMIZERS[precision](trained(model))
    optimizer.zero_grad()
    optimizer.backward(criterion()(model, SAMPLE)[0])
    optimizer.multiply_grads(1 / SAMPLE_SIZE)
    return optimizer


def update_of(model: PretrainedLM, optimizer: FairseqOptimizer, control: GradientControl | None) -> list[torch.Tensor]:
    """What one step with learning rate 1 subtracts from the layers' parameters: a flat vector a layer."""
    before = [parameter.detach().float().clone() for parameter in trained(model)]
    if control is not None:
        control.before_step(optimizer, 0, ([7], 1.0, SAMPLE_SIZE))
    optimizer.step()
    if control is not None:
        control.after_update()
    changes = [old - new.detach().float() for old, new in zip(before, trained(model), strict=True)]
    per_layer = len(changes) // LAYERS
    return [torch.cat([c.flatten() for c in changes[i : i + per_layer]]) for i in range(0, len(changes), per_layer)]


def exact_norms() -> list[float]:
    return [update.norm().item() for update in update_of(*prepare("fp32")[:2], None)]


@pytest.mark.parametrize("precision", OPTIMIZERS)
def test_logged_norms_are_those_of_the_gradient_the_optimizer_uses(precision: str):
    model, optimizer, total = prepare(precision)
    control = control_of(model)
    with metrics.aggregate() as aggregator:
        control.before_step(optimizer, 0, ([7], 1.0, SAMPLE_SIZE))
    logged = [aggregator[f"gnorm_layer_{layer}"].avg for layer in range(LAYERS)]
    assert math.hypot(*logged) == pytest.approx(total, rel=1e-3 if "fp16" in precision else 1e-6)
    assert logged == pytest.approx(exact_norms(), rel=1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("precision", OPTIMIZERS)
def test_norm_clip_scales_only_layers_above_their_limit(precision: str):
    norms = exact_norms()
    limits = [norms[0] / 2, norms[1] * 10, norms[2] / 4]
    plain = update_of(*prepare(precision)[:2], None)
    model, optimizer, _ = prepare(precision)
    clipped = update_of(model, optimizer, control_of(model, "norm", ",".join(map(str, limits))))
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
    clipped = update_of(model, optimizer, control_of(model, "max", str(limit)))
    for one, other in zip(clipped, plain, strict=True):
        torch.testing.assert_close(one, other.clamp(-limit, limit), rtol=0, atol=1e-6 if precision == "fp32" else 2e-3)


@pytest.mark.parametrize("precision", OPTIMIZERS)
def test_fairseq_clip_norm_comes_first(precision: str):
    total = math.hypot(*exact_norms())
    model, optimizer, _ = prepare(precision, clip_norm=total / 2)
    control = control_of(model)
    with metrics.aggregate() as aggregator:
        control.before_step(optimizer, 0, ([7], 1.0, SAMPLE_SIZE))
    logged = [aggregator[f"gnorm_layer_{layer}"].avg for layer in range(LAYERS)]
    assert math.hypot(*logged) == pytest.approx(total / 2, rel=1e-2)


def run(path: Path | None, rows: list[int], clip: str = "none", value: str | None = None) -> list[torch.Tensor]:
    """A run of one update a row; returns the updates of the layers at the last one."""
    model = build_model(dtype=torch.float32)
    control, optimizer = control_of(model, clip, value, path), sgd(trained(model))
    for step, row in enumerate(rows):
        optimizer.zero_grad()
        loss = criterion()(model, SAMPLE)[0]
        optimizer.backward(loss)
        optimizer.multiply_grads(0.01)
        before = [parameter.detach().clone() for parameter in trained(model)]
        control.before_step(optimizer, step, ([row], loss.item(), SAMPLE_SIZE))
        optimizer.step()
        control.after_update()
    changes = [old - new.detach() for old, new in zip(before, trained(model), strict=True)]
    return [torch.cat([change.flatten() for change in changes[i : i + 4]]) for i in range(0, len(changes), 4)]


def test_record_holds_a_norm_for_every_step_layer_and_parameter(tmp_path: Path):
    run(tmp_path / "new" / "record.parquet", [7, 3])
    record, _ = read_gradient_record(tmp_path / "new" / "record.parquet")
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
        ("norm", None, "layer_clip=norm: needs layer_clip_value"),
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
        control_of(build_model(), clip, value)
    assert "\n" not in str(error.value)


def test_a_record_in_memory_stands_for_the_name_of_a_method():
    model = build_model(dtype=torch.float32)
    control = GradientControl(model.decoder, recorder=GradientRecorder(model.decoder))
    update_of(model, prepared(model), control)
    limits = layer_limits("norm", "gd", model.decoder, control.recorder.table())
    assert limits.loc[0, "demonstration"] == "7"
    assert limits.loc[0, "norms"] == pytest.approx(exact_norms(), rel=1e-5)
    with pytest.raises(UserError, match="a record holds norms; use layer_clip=norm"):
        layer_limits("max", "gd", model.decoder, control.recorder.table())


def test_gradient_that_is_not_finite_is_named():
    model, optimizer, _ = prepare("fp32")
    model.decoder.layers[1].self_attn.v_proj.weight.grad[0, 0] = math.nan
    control = control_of(model)
    with pytest.raises(UserError, match=r"layer 1 is NaN or infinite at demonstration 7 "):
        control.check_finite(optimizer, 1.0, [7])
    with pytest.raises(UserError, match=r"layer 1 "):
        control.before_step(optimizer, 0, ([7], 1.0, SAMPLE_SIZE))


def test_overflow_of_half_precision_is_left_to_fairseq(tmp_path: Path):
    model, optimizer, _ = prepare("fp16")
    trained(model)[0].grad[0] = math.inf
    control_of(model).check_finite(optimizer, 1.0, [7])
    model = build_model(dtype=torch.float32)
    amp = AMPOptimizer(fairseq_config(), trained(model), sgd(trained(model)))
    trained(model)[0].grad = torch.full_like(trained(model)[0], math.inf)
    control = control_of(model, record=tmp_path / "record.parquet")
    control.before_step(amp, 0, ([7], 1.0, SAMPLE_SIZE))
    control.after_update()
    assert not (tmp_path / "record.parquet").exists()


def weights_only(model: PretrainedLM, layers: int = LAYERS) -> PretrainedLM:
    """Only weights of keys and values learn, in the lowest layers."""
    for layer, module in enumerate(model.decoder.layers):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(layer < layers and name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"))
    return model


def recorder(path: Path, layers: int = LAYERS) -> GradientRecorder:
    return GradientRecorder(weights_only(build_model(), layers).decoder, path)


def norms(step: int) -> list[float]:
    return [3.0 + step, 4.0 + step] * 3


def write(path: Path, steps: range) -> Path:
    record = recorder(path)
    for step in steps:
        record.add(Update(step, str(step * 10), norms(step), 2.5, 8, norms(step), norms(step)))
    record.flush()
    return path


def steps(path: Path) -> pd.Series:
    return read_gradient_record(path)[0]["step"]


def limits_from(path: Path, model: PretrainedLM) -> pd.DataFrame:
    return layer_limits("norm", f"from:{path}", model.decoder)


def test_layer_norms_are_given_by_step_with_their_demonstration(tmp_path: Path):
    limits = limits_from(write(tmp_path / "r.parquet", range(2)), weights_only(build_model()))
    assert limits.loc[1, "demonstration"] == "10"
    np.testing.assert_allclose(limits.loc[0, "norms"], [5.0] * 3)


def test_small_record_is_on_disk_after_every_step_and_leaves_nothing_else(tmp_path: Path):
    record = recorder(tmp_path / "r.parquet")
    for step in range(3):
        record.add(Update(step, "0", norms(step), 2.5, 8, norms(step), norms(step)))
        assert steps(tmp_path / "r.parquet").max() == step
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]


def test_large_record_is_written_now_and_then_and_by_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gradient_record, "ROWS_WRITTEN_EVERY_STEP", 0)
    record = recorder(tmp_path / "r.parquet")
    for step in range(101):
        record.add(Update(step, "0", norms(step), 2.5, 8, norms(step), norms(step)))
    assert 90 <= steps(tmp_path / "r.parquet").max() < 100
    record.flush()
    assert steps(tmp_path / "r.parquet").max() == 100


def test_interrupted_run_continues_its_record(tmp_path: Path):
    whole, parts = write(tmp_path / "whole.parquet", range(5)), tmp_path / "parts.parquet"
    write(parts, range(4))  # was ahead of the checkpoint it goes on from
    write(parts, range(3, 5))
    pd.testing.assert_frame_equal(read_gradient_record(parts)[0], read_gradient_record(whole)[0])


def test_new_run_replaces_an_old_record(tmp_path: Path):
    write(tmp_path / "r.parquet", range(5))
    write(tmp_path / "r.parquet", range(2))
    assert steps(tmp_path / "r.parquet").max() == 1


def test_record_of_other_parameters_is_not_continued(tmp_path: Path):
    write(tmp_path / "r.parquet", range(3))
    other = recorder(tmp_path / "r.parquet", layers=1)
    with pytest.raises(UserError, match="another run"):
        other.add(Update(3, "0", [1.0, 2.0], 2.5, 8, [1.0, 2.0], [1.0, 2.0]))


def test_record_of_another_model_is_refused(tmp_path: Path):
    path = write(tmp_path / "r.parquet", range(1))
    shorter = weights_only(build_model())
    shorter.decoder.layers = shorter.decoder.layers[:2]
    with pytest.raises(UserError, match="3 layers, this one has 2"):
        limits_from(path, shorter)
    other = weights_only(build_model())
    with torch.no_grad():
        other.decoder.layers[1].fc1.weight += 0.1
    with pytest.raises(UserError, match=r"another model \(layers\.1\.fc1\.weight differs\)"):
        limits_from(path, other)


def test_training_does_not_make_it_another_model(tmp_path: Path):
    path, model = write(tmp_path / "r.parquet", range(1)), weights_only(build_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 if parameter.requires_grad else 0.0)
    limits_from(path, model.half())


def test_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--record-gradients .*cannot be written"):
        write(tmp_path / "file" / "r.parquet", range(1))


def test_recorder_without_a_path_writes_nothing_and_has_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    record = GradientRecorder(weights_only(build_model()).decoder)
    assert list(record.table().columns) == list(GRADIENT_COLUMNS)
    assert len(record.table()) == 0
    for step in range(3):
        record.add(Update(step, "4", norms(step), 2.5, 8, norms(step), norms(step)))
    record.flush()
    assert list(tmp_path.iterdir()) == []
    path = write(tmp_path / "r.parquet", range(3))
    expected = read_gradient_record(path)[0].assign(demonstration="4")
    pd.testing.assert_frame_equal(record.table(), expected)
