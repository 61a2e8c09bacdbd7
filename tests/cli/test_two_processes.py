"""fairseq-train in two processes on CPUs gives what one process gives with the same data."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import torch

from fairseq_icl.models.checkpoints import read_checkpoint
from fairseq_icl.results import read_gradient_record
from tests.commands import succeeded
from tests.world import World


def train_in_two(world: World, folder: Path, *flags: object) -> None:
    """Two processes that meet by a file; fairseq starts processes by itself only on GPUs."""

    def one(rank: int) -> None:
        meeting = ("--distributed-init-method", f"file://{folder}.meeting", "--distributed-no-spawn")
        group = ("--distributed-world-size", 2, "--distributed-rank", rank, "--distributed-backend", "gloo")
        parallel = (*meeting, *group, "--ddp-backend", "legacy_ddp")
        succeeded(world.train(folder, *parallel, *flags, criterion="layer_causal_ce"))

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, range(2)))


def test_two_processes_have_the_gradients_of_one(world: World, tmp_path: Path):
    records = {name: tmp_path / f"{name}.parquet" for name in ("one", "two")}
    train_in_two(world, tmp_path / "two", "--record-gradients", records["two"])
    accumulated = ("--update-freq", 2, "--record-gradients", records["one"])
    succeeded(world.train(tmp_path / "one", *accumulated, criterion="layer_causal_ce"))

    one, two = (read_gradient_record(path)[0] for path in records.values())
    assert one["demonstration"].str.count(",").eq(1).all()  # two demonstrations an update
    pd.testing.assert_frame_equal(two, one, rtol=1e-5, atol=1e-7)
    weights = [read_checkpoint(tmp_path / name / "checkpoint_last.pt")["model"] for name in records]
    for name in weights[0]:
        torch.testing.assert_close(weights[1][name], weights[0][name])
