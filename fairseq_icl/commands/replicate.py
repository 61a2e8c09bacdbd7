"""`fairseq-icl replicate experiment=NAME ...`: plan a run, compute what is missing, report (help: command_line.py)."""

import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_icl.commands.command_line import flags_of_replicate
from fairseq_icl.commands.report import report
from fairseq_icl.errors import UserError
from fairseq_icl.fetching import HUB
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.replication.cells import Cell, Keys
from fairseq_icl.replication.configuration import (
    GRID,
    LOCAL,
    ClusterSettings,
    compose_configuration,
    each_of,
    friendly,
    share_of,
)
from fairseq_icl.replication.engine import Job, import_plugin
from fairseq_icl.replication.estimate import describe
from fairseq_icl.replication.find_model import find_model
from fairseq_icl.replication.folders import ResultsFolder, StoreError
from fairseq_icl.replication.plan import borrowed_rates, expand
from fairseq_icl.replication.report.rates import next_steps
from fairseq_icl.replication.report.run import load_run
from fairseq_icl.replication.report.tables import check_tables
from fairseq_icl.replication.run import by_dask, engine_of, in_this_process, run, unfinished
from fairseq_icl.settings import SETTINGS


def main(argv: list[str]) -> int:
    """Entry of the command."""
    arguments = flags_of_replicate().parse_intermixed_args(argv)  # flags may stand between settings
    # In front, so that a setting of the same name is still read, and refused if it is wrong.
    flags = ["quiet=true"] * arguments.quiet + ["dry_run=true"] * arguments.dry_run
    configurations = [compose_configuration([*flags, *words]) for words in each_of(friendly(arguments.settings))]
    for config in configurations:  # mistakes in any of them are told before the first one runs
        run_configuration(config)
    for config in {config["out"]: config for config in configurations}.values():
        if config["share"] is None and not config["dry_run"]:
            report(Path(config["out"]), quiet=config["quiet"])
    return 0


def run_configuration(config: dict[str, Any]) -> None:
    """Plan a run and compute what is missing of it, or print the plan."""
    logging.getLogger("fairseq").setLevel(logging.WARNING)  # training tells of every step
    for module in config["plugins"]:
        import_plugin(module)
    config = with_fetched(config)
    data = Path(config["data"])
    if not data.is_dir():
        raise UserError(f"data={data}: no such folder; give the folder with the datasets' files")
    check_tables(config["tables"])
    cells = expand(config)
    if config["dry_run"]:
        print(describe(config, cells, data))
        return
    share = config["share"] or ""
    with ResultsFolder(config["out"]).owned(share):
        if config["search_rounds"] and not share:  # one part alone does not know what the others have found
            search(config, cells, data)
        else:
            compute(config, cells, data)


def compute(config: dict[str, Any], cells: Sequence[Cell], data: Path) -> None:
    """Compute what is missing of the cells; the results folder remembers that they were asked for."""
    job = job_of(config, data)
    engine = engine_of(job)
    keys = list(map(engine.keys.of, cells))
    engine.folder.check_cells(keys)
    engine.folder.add_plan(plan_of(config, cells, engine.keys))
    planned, workers, cluster = len({*keys}), config["workers"], ClusterSettings(**config["cluster"])
    with tqdm(total=planned, unit="cell", disable=config["quiet"] or bool(config["share"])) as bar:
        bar.update(planned - len(unfinished(cells, engine)))

        def say(line: str, done: int = 0) -> None:
            if not config["quiet"]:
                bar.write(line, file=sys.stderr)
            bar.update(done)

        for line in borrowed_rates(cells):
            say(line)
        here = workers == 1 and cluster.kind == LOCAL
        outcomes = in_this_process if here else partial(by_dask, workers=workers, cluster=cluster, say=say)
        share = share_of(config["share"]) if config["share"] else (1, 1)
        run(job, cells, partial(say, done=1), outcomes, share)


def search(config: dict[str, Any], cells: Sequence[Cell], data: Path) -> None:
    """Compute the cells, then what a search of learning rates still has to try, round by round (search_rounds)."""
    keys, tried = engine_of(job_of(config, data)).keys, dict.fromkeys(cells)
    sources = {cell.dataset: cell.source for cell in cells}
    more = list(cells)
    for _ in range(config["search_rounds"] + 1):
        try:
            compute(config, more, data)
        except UserError as error:
            found = load_run(config["out"]).configurations
            if isinstance(error, StoreError) or not any(keys.of(cell) in found for cell in tried):
                raise
            print(f"{error}; the search goes on without it", file=sys.stderr)  # numbers overflow at a rate too high
        steps = next_steps(load_run(config["out"]), set(map(keys.of, tried)))
        plans = [{**config, "datasets": [sources[of]], "method": [name], "vary": vary} for of, name, vary in steps]
        more = [cell for plan in plans for cell in expand(plan) if cell not in tried]
        if not more:
            return
        tried |= dict.fromkeys(more)


def job_of(config: dict[str, Any], data: Path) -> Job:
    """What every process of the run has to know; paths are whole, because a worker may start elsewhere."""
    out = Path(config["out"]).resolve()
    files = find_model(config["model"], out)
    model = {**config["model"], "path": str(files.checkpoint.resolve()), "random": False}
    if files.dictionary is not None:
        model["tokenizer"] = str(files.dictionary.resolve().parent)
    return Job(json.dumps(model), files.sha256, data.resolve(), out, tuple(config["plugins"]))


def with_fetched(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with model=hub:NAME and data=hub brought here and replaced by the folders they are in."""
    quiet = config["quiet"]
    if config["model"]["path"].startswith(HUB):
        from fairseq_icl.fetching.models import cached_hub_model

        path = str(cached_hub_model(config["model"]["path"], quiet=quiet))
        config = {**config, "model": {**config["model"], "path": path}}
    if config["data"] == "hub":
        from fairseq_icl.fetching.data import data_cache, fetch_dataset

        for name in [config["datasets"]] if isinstance(config["datasets"], str) else config["datasets"]:
            fetch_dataset(load_spec(name), data_cache(), quiet=quiet)
        config = {**config, "data": str(data_cache())}
    return config


def plan_of(config: dict[str, Any], cells: Sequence[Cell], keys: Keys) -> dict[str, Any]:
    """What the results folder remembers of a command."""
    entries = [
        {name: getattr(cell, name) for name in ("model", "dataset", "method", "variant")}
        | {name: getattr(cell.settings, name) for name in GRID}
        | {"key": keys.of(cell), "settings": cell.changed_settings()}
        | {"prints": {name: text[:12] for name, text in keys.prints(cell).items() if name in ("model", "data")}}
        for cell in cells
    ]
    return {
        "experiment": config["name"],
        "tables": list(config["tables"]),
        "model": {**config["model"], "path": str(keys.files.checkpoint.resolve())},
        "asked": {name: config[name] for name in SETTINGS if config[name] is not None},
        "average_over": list(config["average_over"]),
        "cells": entries,
    }
