"""Results files: nothing is lost in them, the same run writes the same bytes, and a half-written file is never seen."""

import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from fairseq_icl import results
from fairseq_icl.errors import UserError
from fairseq_icl.results.collector import Collector
from fairseq_icl.results.table import _git_state
from tests.metrics.observations import random_observation

MADE_BY = {"config": {"dataset": "sst2", "lr": 0.1}, "git": None}


def table(seed: int = 2) -> pd.DataFrame:
    collector = Collector(["sim_aou", "accuracy_zsl"])
    collector.add(range(6), *(random_observation(seed + i) for i in range(3)))
    return collector.table(dataset="sst2", seed=seed, permutation=1, method="gd", init="pretrained")


@pytest.mark.parametrize("name", ["results.parquet", "results.csv"])
def test_what_was_written_is_read(tmp_path: Path, name: str):
    results.write_results(tmp_path / name, table(), MADE_BY)
    found, made_by = results.read_results(tmp_path / name)
    pd.testing.assert_frame_equal(found, table().astype(results.COLUMNS))
    assert made_by == MADE_BY


@pytest.mark.parametrize("name", ["results.parquet", "results.csv"])
def test_the_same_run_writes_the_same_bytes(tmp_path: Path, name: str):
    for folder in ("a", "b"):
        results.write_results(tmp_path / folder / name, table(), results.provenance(MADE_BY["config"]))
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_parquet_is_readable_by_anyone_and_carries_its_provenance(tmp_path: Path):
    results.write_results(tmp_path / "results.parquet", table(), MADE_BY)
    assert json.loads(pq.read_schema(tmp_path / "results.parquet").metadata[b"fairseq_icl"]) == MADE_BY
    assert list(pd.read_parquet(tmp_path / "results.parquet").columns) == list(results.COLUMNS)


def test_csv_is_readable_by_anyone(tmp_path: Path):
    results.write_results(tmp_path / "results.csv", table(), MADE_BY)
    plain = pd.read_csv(tmp_path / "results.csv", comment="#")
    assert list(plain.columns) == list(results.COLUMNS)
    assert len(plain) == len(table())


def test_undefined_values_are_not_written(tmp_path: Path):
    undefined = table()
    undefined.loc[0, "value"] = np.nan
    with pytest.raises(ValueError, match="undefined"):
        results.write_results(tmp_path / "results.parquet", undefined, {})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path):
    target = tmp_path / "results.parquet"
    target.mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(UserError, match=r"results\.parquet: cannot be written"):
        results.write_results(target, table(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["results.parquet"]


def test_a_place_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        results.write_results(tmp_path / "file" / "results.parquet", table(), {})


@pytest.mark.parametrize("name", ["results.parquet", "results.csv"])
@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"PAR1 and nothing more", b"\xff\xfe\n\x00"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: (not a results file|damaged, or not a file of results)"):
        results.read_results(tmp_path / name)


def test_parquet_of_something_else_is_refused(tmp_path: Path):
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "results.parquet")
    with pytest.raises(UserError, match="not a results file of fairseq_icl"):
        results.read_results(tmp_path / "results.parquet")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="no such results file"):
        results.read_results(tmp_path / "results.parquet")


def test_provenance_names_versions_and_the_hash_of_the_checkpoint(tmp_path: Path):
    (tmp_path / "model.pt").write_bytes(b"weights")
    made_by = results.provenance({"lr": 0.1}, {"base": tmp_path / "model.pt"})
    assert made_by["config"] == {"lr": 0.1}
    assert made_by["checkpoints"] == {"base": hashlib.sha256(b"weights").hexdigest()}
    assert {"fairseq_icl", "python", "torch", "numpy"} <= made_by["versions"].keys()


def test_the_commit_of_a_repository_that_only_contains_the_installation_is_not_ours(tmp_path: Path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "__init__.py").write_text("")
    assert _git_state(tmp_path) is None
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "__init__.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    state = _git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["modified"] is False
    (tmp_path / "__init__.py").write_text("changed")
    assert _git_state(tmp_path)["modified"] is True


def test_means_are_the_rows_without_an_example():
    both = pd.concat([table(2), table(5)])
    overall = results.means(both)
    assert overall["layer"].isna().all()
    assert overall["example"].isna().all()
    by_layer = results.means(both, layers=True)
    assert by_layer["layer"].notna().all()
    assert by_layer["example"].isna().all()
    values = overall[overall["metric"] == "sim_aou"]["value"]
    assert values.tolist() == pytest.approx(
        by_layer[by_layer["metric"] == "sim_aou"].groupby("seed")["value"].mean().tolist()
    )
