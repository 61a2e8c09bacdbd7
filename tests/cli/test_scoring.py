"""fairseq-validate with icl_similarity, and fairseq-icl score, as a user types them."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fairseq_icl.observing.saved import load_observations
from fairseq_icl.results import means, read_results
from tests.commands import Result, assert_one_clear_line, run, succeeded
from tests.world import World

NUM_QUERIES, NUM_LAYERS = 15, 3


@pytest.fixture(scope="module")
def finetuned(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gd")
    succeeded(world.train(folder, "--record-queries"))
    return folder / "checkpoint_last.pt"


def test_training_that_goes_on_keeps_the_queries_recorded_before(world: World, finetuned: Path, tmp_path: Path) -> None:
    succeeded(world.train(tmp_path, "--record-queries", "--max-update", 2))
    succeeded(world.train(tmp_path, "--record-queries"))
    whole, resumed = (
        torch.load(folder / "checkpoint_last.pt", weights_only=False)["task_state"]["training_queries"]
        for folder in (finetuned.parent, tmp_path)
    )
    assert len(whole) == 6
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.fixture(scope="module")
def scored(world: World, finetuned: Path) -> tuple[Result, Path]:
    folder = finetuned.parent
    files = ["--results", folder / "scores.parquet", "--save-activations", folder / "seen.safetensors"]
    return succeeded(world.validate(finetuned, *files)), folder


def values(path: Path) -> pd.Series:
    return read_results(path)[0].set_index(["metric", "layer", "example"])["value"].sort_index()


def test_table_summary_and_log_agree(scored: tuple[Result, Path]) -> None:
    result, folder = scored
    table, _ = read_results(folder / "scores.parquet")
    overall = means(table).set_index("metric")["value"]
    assert {"accuracy_zsl", "accuracy_icl", "accuracy_ft", "sim_aou", "sim_am_delta", "kendall_tokens"} <= set(
        overall.index
    )
    assert f"{NUM_QUERIES} examples" in result.stdout
    for name in ("accuracy_icl", "sim_aou", "sim_am_delta"):
        assert any(line.split()[:2] == [name, f"{overall[name]:.4f}"] for line in result.stdout.splitlines()), name
        assert f"| {name} {round(overall[name], 5):g} |" in result.stdout
    per_example = table[(table["metric"] == "sim_aou") & table["example"].notna()]
    assert len(per_example) == NUM_QUERIES * NUM_LAYERS


def test_table_says_what_made_it(scored: tuple[Result, Path], world: World) -> None:
    table, made = read_results(scored[1] / "scores.parquet")
    assert set(made["checkpoints"]) == {"base", "finetuned"}
    assert made["config"]["settings"]["position"] == "option0"
    assert made["config"]["task"]["num_demonstrations"] == 6
    assert {split: record["count"] for split, record in made["config"]["rows"].items()} == {"train": 20, "valid": 15}
    assert (table["method"].unique().tolist(), table["dataset"].unique().tolist()) == (["gd"], ["toy"])


def test_activations_are_those_behind_the_table(scored: tuple[Result, Path]) -> None:
    example, seen = load_observations(scored[1] / "seen.safetensors")
    assert example.tolist() == list(range(NUM_QUERIES))
    assert set(seen) == {"zsl", "icl", "ft"}
    table = values(scored[1] / "scores.parquet")
    for setting, observation in seen.items():
        stored = table[f"prediction_{setting}"].to_numpy()
        np.testing.assert_array_equal(observation.prediction, stored)


def test_batches_and_processes_change_nothing(
    scored: tuple[Result, Path], world: World, finetuned: Path, tmp_path: Path
) -> None:
    """Two processes by fairseq's own flags, small batches: the same table, written and printed once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--results", tmp_path / "two.parquet", "--batch-size", "2", "--distributed-world-size", "2"]
    flags += ["--distributed-backend", "gloo", "--distributed-no-spawn"]
    flags += ["--distributed-init-method", f"tcp://127.0.0.1:{port}"]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda rank: world.validate(finetuned, *flags, "--distributed-rank", rank), (0, 1)))
    printed = ["95 % interval" in succeeded(result).stdout for result in results]
    assert printed == [True, False]
    one, two = values(scored[1] / "scores.parquet"), values(tmp_path / "two.parquet")
    assert one.index.equals(two.index)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)


def test_score_fills_in_the_plugin(scored: tuple[Result, Path], world: World, finetuned: Path, tmp_path: Path) -> None:
    flags = ["--path", finetuned, "--results", tmp_path / "score.csv", "--dataset", world.spec]
    flags += ["--num-demonstrations", 6, "--seed", 3, "--cpu"]
    succeeded(run("fairseq-icl", "score", world.data, *flags))
    pd.testing.assert_series_equal(values(tmp_path / "score.csv"), values(scored[1] / "scores.parquet"), rtol=1e-9)


def test_base_checkpoint_is_scored_without_fine_tuning(world: World, tmp_path: Path) -> None:
    succeeded(world.validate(world.model, "--results", tmp_path / "base.parquet", "--position", "query"))
    table, made = read_results(tmp_path / "base.parquet")
    measured = set(table["metric"])
    assert {"accuracy_zsl", "accuracy_icl", "sim_am_before"} <= measured
    assert not {"accuracy_ft", "sim_aou", "rpa"} & measured
    assert table["method"].unique().tolist() == ["none"]
    assert made["config"]["settings"]["position"] == "query"


def test_second_checkpoint_and_weight_space_on_request(world: World, finetuned: Path, tmp_path: Path) -> None:
    succeeded(world.train(tmp_path, criterion="layer_causal_ce"))
    flags = ["--metrics", "alpha,sim_weights", "--other-finetuned", tmp_path / "checkpoint_last.pt"]
    succeeded(world.validate(finetuned, *flags, "--results", tmp_path / "two.parquet"))
    overall = means(read_results(tmp_path / "two.parquet")[0]).set_index("metric")["value"]
    assert -1 <= overall["sim_weights"] <= 1
    assert 0 < overall["alpha"] < 1


def test_training_with_it_is_refused(world: World, tmp_path: Path) -> None:
    result = world.train(tmp_path, criterion="icl_similarity")
    assert_one_clear_line(result, "icl_similarity only measures", "train with cross_entropy or layer_causal_ce")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--results", "scores.txt"], ["--results scores.txt", ".parquet or .csv"]),
        (["--save-activations", "seen.pt"], ["--save-activations seen.pt", ".safetensors"]),
        (["--metrics", "sim_oau"], ["sim_oau", "sim_aou"]),
    ],
)
def test_wrong_flags_are_told_before_the_work(world: World, flags: list[str], parts: list[str]) -> None:
    assert_one_clear_line(world.validate(world.model, *flags), *parts)
