"""`fairseq-icl replicate experiment=NAME ...`: rerun a paper; what is finished stays, what is missing is computed.

    fairseq-icl replicate experiment=deutch2024 model=1.3b data=DATA                       the whole paper
    fairseq-icl replicate experiment=deutch2024 data=DATA dataset=sst2,mr method=lcgd      a part of it
    fairseq-icl replicate experiment=audit data=DATA model=PATH/model.pt limit=100         another model, fewer examples
    fairseq-icl replicate experiment=deutch2024 data=hub model=hub:facebook/opt-125m       fetched, kept in the cache
    fairseq-icl replicate experiment=dai2023 data=DATA --dry-run                           the plan and what it costs
    fairseq-icl replicate experiment=dai2023 data=DATA workers=4                           four processes share the work
    fairseq-icl replicate experiment=dai2023 data=DATA launcher=slurm slurm.partition=gpu  an array of jobs on a cluster
    fairseq-icl replicate -m experiment=dai2023 data=DATA model=1.3b,2.7b                  a sweep, one job a value
    fairseq-icl replicate -m ... hydra/launcher=joblib hydra.launcher.n_jobs=2             its jobs side by side
    fairseq-icl replicate -m ... hydra/launcher=submitit_slurm                             its jobs on a cluster

The keys are those of fairseq_icl/config/replicate.yaml and the settings below; every one can be overridden. Stop it
whenever you like and give the same command again: it goes on where it was.
"""

import argparse
import importlib
import logging
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from fairseq_icl import tasks  # noqa: F401 - registers task and criterions, which training asks fairseq for
from fairseq_icl.commands.report import report
from fairseq_icl.errors import UserError
from fairseq_icl.fetching import HUB
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.configuration import (
    CONFIG_NAME,
    FOLDER,
    compose_configuration,
    explain,
    first_of_each,
    friendly,
    plain,
)
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.plan import data_folder, expand
from fairseq_icl.replication.report.run import check_cells
from fairseq_icl.replication.report.tables import check_tables
from fairseq_icl.replication.scheduling import Share, run
from fairseq_icl.replication.stand_in import find_model, with_each_layer
from fairseq_icl.replication.store import Store
from fairseq_icl.replication.workers import follow_parent, run_workers
from fairseq_icl.settings import SETTINGS

GROUPS = ("experiment", "model")
HUB_DATA = "hub"
"""data=hub: the datasets are fetched into the cache."""
_engines: dict[tuple[Any, ...], Engine] = {}


def main(argv: list[str]) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(
        prog="fairseq-icl replicate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = {group: ", ".join(sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))) for group in GROUPS}
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="; ".join(f"{k}: {v}" for k, v in choices.items())
    )
    parser.epilog = "settings:\n" + "\n".join(
        textwrap.fill(f"{name}: {known.help}", 118, initial_indent="  ", subsequent_indent="      ")
        for name, known in SETTINGS.items()
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="values with commas are a sweep, one job each")
    parser.add_argument("--dry-run", action="store_true", help="print the plan with an estimate of time and memory")
    parser.add_argument("--quiet", action="store_true", help="no progress, no tables")
    arguments = parser.parse_intermixed_args(argv)  # flags may stand between settings
    overrides = friendly(arguments.settings, sweep=arguments.multirun)
    # In front, so that a setting of the same name is still read, and refused if it is wrong.
    overrides = ["quiet=true"] * arguments.quiet + ["dry_run=true"] * arguments.dry_run + overrides
    config = compose_configuration(first_of_each(overrides))  # tells mistakes before any job starts
    follow_parent()
    if arguments.multirun:
        if config["workers"] > 1 or config["launcher"] != "local":
            raise UserError(
                "-m: a sweep has its own launchers (hydra/launcher=joblib); for workers= or launcher= give lists"
            )
        sweep(overrides)
    else:
        run_configuration(config, [*arguments.settings, *(["quiet=true"] * config["quiet"])])
    is_whole = config["share"] is None and (config["launcher"] == "local" or config["slurm"]["wait"])
    if is_whole and not config["dry_run"]:
        report(Path(config["out"]), quiet=config["quiet"])
    return 0


def sweep(overrides: list[str]) -> None:
    """All jobs of a sweep, by Hydra's sweeper and the launcher that the overrides choose."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions arrive here as they are, not as Hydra prints them
    sys.argv = ["fairseq-icl", "--multirun", *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(FOLDER), config_name=CONFIG_NAME)(run_job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


def run_job(config: DictConfig) -> None:
    """One job of a sweep, possibly in a process of its own."""
    run_configuration(plain(config))


def run_configuration(config: dict[str, Any], words: Sequence[str] = ()) -> None:
    """Plan a run and compute what is missing of it, or print the plan; processes it starts get the same `words`."""
    logging.getLogger("fairseq").setLevel(logging.WARNING)  # training tells of every step
    share = None if config["share"] is None else Share.of(config["share"])
    for module in config["plugins"]:
        _import(module)
    config = with_fetched(config)
    data = data_folder(config["data"])
    if not data.is_dir():
        raise UserError(f"data={data}: no such folder; give the folder with the datasets' files")
    check_tables(config["tables"])
    cells = expand(with_each_layer(config))
    if config["dry_run"]:
        print(_described(config, cells, data, words))
        return
    store = Store(config["out"])
    engine = _engine(config, data, store)
    plan = {engine.key(cell): cell for cell in cells}
    check_cells(store, plan)
    store.add_plan(plan_of(config, cells, engine))
    if share is not None:  # one of several processes: somebody else shows a bar
        run(engine, cells, lambda line: store.say(line) if line and not config["quiet"] else None, share)
        return
    done = sum(map(store.is_finished, plan))
    with tqdm(total=len(plan), initial=done, unit="cell", disable=config["quiet"]) as bar:

        def tell(done: float, lines: Sequence[str]) -> None:
            for line in lines:
                bar.write(line, file=sys.stderr)
            if done != bar.n:
                bar.update(done - bar.n)

        if config["launcher"] == "slurm":
            from fairseq_icl.replication.slurm import run_jobs

            run_jobs(config, words, store, plan, data, tell)
        elif config["workers"] > 1:
            run_workers(config["workers"], words, store, plan, tell)
        else:
            run(engine, cells, lambda line: None if config["quiet"] else tell(bar.n + 1, [line] if line else []))


def _described(config: dict[str, Any], cells: list[Cell], data: Path, words: Sequence[str]) -> str:
    """What --dry-run prints."""
    from fairseq_icl.replication.cost import describe, unfinished  # measures the machine: only when asked for

    todo = unfinished(config, cells, data)
    if config["launcher"] != "slurm" or not todo:
        return describe(config, cells, data)
    from fairseq_icl.replication.slurm import estimate_jobs, job_script, request

    cost = estimate_jobs(config, todo, data)
    return describe(config, cells, data, cost) + "\n\n" + job_script(config, request(config, todo, data, cost), words)


def with_fetched(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with model=hub:NAME and data=hub brought here and replaced by the folders they are in."""
    if config["model"]["path"].startswith(HUB):
        from fairseq_icl.fetching.models import cached_hub_model

        folder = cached_hub_model(config["model"]["path"], quiet=config["quiet"])
        config = {**config, "model": {**config["model"], "path": str(folder)}}
    if config["data"] == HUB_DATA:
        from fairseq_icl.fetching.data import data_cache, fetch_dataset

        names = [config["datasets"]] if isinstance(config["datasets"], str) else config["datasets"]
        for name in names:
            fetch_dataset(load_spec(name), data_cache(), quiet=config["quiet"])
        config = {**config, "data": str(data_cache())}
    return config


def plan_of(config: dict[str, Any], cells: list[Cell], engine: Engine) -> dict[str, Any]:
    """What the results folder remembers of a command."""
    names = ("model", "init", "dataset", "method", "variant", "seed", "permutation")
    entries = [{**{name: getattr(cell, name) for name in names}, "key": engine.key(cell)} for cell in cells]
    for entry, cell in zip(entries, cells, strict=True):
        if cell.settings.precision != "fp32":  # so that a report can tell unfinished cells apart as well
            entry["precision"] = cell.settings.precision
    model = {**config["model"], "path": str(engine.files.checkpoint.resolve())}
    return {"experiment": config["name"], "tables": list(config["tables"]), "model": model, "cells": entries}


def _engine(config: dict[str, Any], data: Path, store: Store) -> Engine:
    """The process's engine for this model, data and folder: jobs of a sweep in one process share the loaded model."""
    files = find_model(config["model"], store.folder)
    wanted = (files.checkpoint, files.dictionary, files.bpe, data, store.folder)
    if wanted not in _engines:
        _engines.clear()
        _engines[wanted] = Engine(files, data, store)
    return _engines[wanted]


def _import(module: str) -> None:
    """Import a module of the user's, which registers its methods and metrics."""
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"plugins={module}: cannot be imported ({error}); give a module on PYTHONPATH") from error
    finally:
        sys.path.remove(os.getcwd())
