"""A run on the small world of the command tests: the overrides it needs, and its result files."""

from pathlib import Path

from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.replication.replicate_command import run_configuration
from tests.world import World


def settings(world: World, out: Path, *more: str) -> list[str]:
    """Command-line settings of a quick run."""
    return [
        f"model={world.model}",
        "model.bpe=null",
        f"data={world.data}",
        f"dataset={world.spec}",
        "num_demonstrations=4",
        "seed=3",
        "permutation=0",
        "lr=0.1",
        "limit=6",
        f"out={out}",
        "quiet=true",
        *more,
    ]


def configuration(world: World, out: Path, *more: str) -> dict:
    return compose_configuration(friendly(settings(world, out, *more), sweep=False))


def run(world: World, out: Path, *more: str) -> Path:
    """Run in this process; returns the results folder."""
    run_configuration(configuration(world, out, *more))
    return out


def tables(out: Path) -> dict[str, bytes]:
    """Key -> bytes of every finished cell's table."""
    return {path.parent.name: path.read_bytes() for path in sorted((out / "cells").glob("*/results.parquet"))}
