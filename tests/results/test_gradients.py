"""The gradient record as a file and as the papers' heatmap."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.results import (
    GRADIENT_COLUMNS,
    heatmap_matrix,
    read_gradient_record,
    step_size_matrix,
    whole_layer_matrix,
)
from fairseq_icl.results.gradient_record import describe, write_gradient_record
from tests.criterions.tiny_model import build_model


def record(steps: int = 2) -> pd.DataFrame:
    """Norms 3 + step and 4 + step of two parameters of three layers."""
    rows = [
        (step, str(step * 10), layer, name, norm + step, 2.5, 8, 0.01 * norm, norm, 90.0 + layer)
        for step in range(steps)
        for layer in range(3)
        for name, norm in (("k_proj.weight", 3.0), ("v_proj.weight", 4.0))
    ]
    return pd.DataFrame(rows, columns=GRADIENT_COLUMNS)


def test_heatmap_is_the_norm_of_each_layers_whole_gradient():
    np.testing.assert_allclose(heatmap_matrix(record()), [[5.0] * 3, [np.hypot(4, 5)] * 3])
    shuffled = record().sample(frac=1, random_state=1)
    np.testing.assert_allclose(heatmap_matrix(shuffled), heatmap_matrix(record()))


def test_what_was_written_is_read_with_the_description_of_its_model(tmp_path: Path):
    decoder = build_model().decoder
    write_gradient_record(tmp_path / "new" / "r.parquet", record(), decoder)
    table, model = read_gradient_record(tmp_path / "new" / "r.parquet")
    pd.testing.assert_frame_equal(table, record(), check_dtype=False)
    assert model == describe(decoder)
    assert model["layers"] == 3


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"r\.parquet: no such file; make it with --record-gradients"):
        read_gradient_record(tmp_path / "r.parquet")


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


def test_step_sizes_are_those_of_whole_layers_and_old_files_are_read(tmp_path: Path):
    np.testing.assert_allclose(step_size_matrix(record()), np.full((2, 3), 0.01))
    np.testing.assert_array_equal(whole_layer_matrix(record()), [[90, 91, 92]] * 2)
    old = record().drop(columns=["update", "weight", "whole_layer"])
    write_gradient_record(tmp_path / "r.parquet", old, build_model().decoder)
    table, _ = read_gradient_record(tmp_path / "r.parquet")
    assert list(table.columns) == list(GRADIENT_COLUMNS)
    assert step_size_matrix(table) is None
    np.testing.assert_array_equal(heatmap_matrix(table), heatmap_matrix(record()))
