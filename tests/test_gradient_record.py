"""The gradient record: whole whenever it is read, continued after an interruption, refused for another model."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fairseq_icl import gradient_record
from fairseq_icl.errors import UserError
from fairseq_icl.gradient_record import GradientRecorder, heatmap_matrix, read_gradient_record, read_layer_norms
from tests.criterions.tiny_model import build_model

LAYERS, PARAMETERS = [0, 0, 1, 1, 2, 2], ["k_proj.weight", "v_proj.weight"] * 3


def recorder(path: Path) -> GradientRecorder:
    return GradientRecorder(path, build_model().decoder, LAYERS, PARAMETERS)


def norms(step: int) -> list[float]:
    return [3.0 + step, 4.0 + step] * 3


def write(path: Path, steps: range) -> Path:
    record = recorder(path)
    for step in steps:
        record.add(step, str(step * 10), norms(step), 2.5, 8)
    record.flush()
    return path


def test_heatmap_is_the_norm_of_each_layers_whole_gradient(tmp_path: Path):
    matrix = heatmap_matrix(read_gradient_record(write(tmp_path / "r.parquet", range(2))))
    np.testing.assert_allclose(matrix, [[5.0] * 3, [np.hypot(4, 5)] * 3])


def test_layer_norms_are_given_by_step_with_their_demonstration(tmp_path: Path):
    limits = read_layer_norms(write(tmp_path / "r.parquet", range(2)), build_model().decoder)
    assert limits.loc[1, "demonstration"] == "10"
    np.testing.assert_allclose(limits.loc[0, "norms"], [5.0] * 3)


def test_small_record_is_on_disk_after_every_step_and_leaves_nothing_else(tmp_path: Path):
    record = recorder(tmp_path / "r.parquet")
    for step in range(3):
        record.add(step, "0", norms(step), 2.5, 8)
        assert read_gradient_record(tmp_path / "r.parquet")["step"].max() == step
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]


def test_large_record_is_written_now_and_then_and_by_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gradient_record, "ROWS_WRITTEN_EVERY_STEP", 0)
    record = recorder(tmp_path / "r.parquet")
    for step in range(101):
        record.add(step, "0", norms(step), 2.5, 8)
    assert 90 <= read_gradient_record(tmp_path / "r.parquet")["step"].max() < 100
    record.flush()
    assert read_gradient_record(tmp_path / "r.parquet")["step"].max() == 100


def test_interrupted_run_continues_its_record(tmp_path: Path):
    whole, parts = write(tmp_path / "whole.parquet", range(5)), tmp_path / "parts.parquet"
    write(parts, range(4))  # was ahead of the checkpoint it goes on from
    write(parts, range(3, 5))
    pd.testing.assert_frame_equal(read_gradient_record(parts), read_gradient_record(whole))


def test_new_run_replaces_an_old_record(tmp_path: Path):
    write(tmp_path / "r.parquet", range(5))
    write(tmp_path / "r.parquet", range(2))
    assert read_gradient_record(tmp_path / "r.parquet")["step"].max() == 1


def test_record_of_other_parameters_is_not_continued(tmp_path: Path):
    write(tmp_path / "r.parquet", range(3))
    other = GradientRecorder(tmp_path / "r.parquet", build_model().decoder, LAYERS[:2], PARAMETERS[:2])
    with pytest.raises(UserError, match="another run"):
        other.add(3, "0", [1.0, 2.0], 2.5, 8)


def test_record_of_another_model_is_refused(tmp_path: Path):
    path = write(tmp_path / "r.parquet", range(1))
    shorter = build_model().decoder
    shorter.layers = shorter.layers[:2]
    with pytest.raises(UserError, match="3 layers, this one has 2"):
        read_layer_norms(path, shorter)
    other = build_model()
    with torch.no_grad():
        other.decoder.layers[1].fc1.weight += 0.1
    with pytest.raises(UserError, match=r"another model \(layers\.1\.fc1\.weight differs\)"):
        read_layer_norms(path, other.decoder)


def test_training_does_not_make_it_another_model(tmp_path: Path):
    path, model = write(tmp_path / "r.parquet", range(1)), build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 if parameter.requires_grad else 0.0)
    read_layer_norms(path, model.half().decoder)


@pytest.mark.parametrize("content", [b"", b"step,norm\n", None], ids=["empty", "text", "other-table"])
def test_file_that_is_no_record_is_told_in_one_line(tmp_path: Path, content: bytes | None):
    path = tmp_path / "r.parquet"
    if content is None:
        pd.DataFrame({"step": [1]}).to_parquet(path)
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"r\.parquet: not a") as error:
        read_gradient_record(path)
    assert "\n" not in str(error.value)


def test_place_that_cannot_be_written_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "file" / "r.parquet", range(1))
