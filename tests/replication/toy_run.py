"""A run on the small world of the command tests: the overrides it needs, and its result files."""

from pathlib import Path

from fairseq_icl.commands.replicate import run_configuration
from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.results import read_results
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
    return compose_configuration(friendly(settings(world, out, *more)))


def run(world: World, out: Path, *more: str) -> Path:
    """Run in this process; returns the results folder."""
    run_configuration(configuration(world, out, *more))
    return out


def tables(out: Path) -> dict[str, str]:
    """Key -> the table of every finished cell, to the last digit."""
    paths = sorted((out / "cells").glob("*/results.parquet"))
    return {path.parent.name: read_results(path)[0].to_csv(index=False) for path in paths}
