"""Compute a task of the graph: build prompts, observe, fine-tune, compare, store.

An engine is one process's: it keeps the model that it used last. Which process computes which task when is run.py's.
"""

import gc
import importlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fairseq_icl.errors import UserError
from fairseq_icl.files import give_back_memory, reason_of, remove, sha256_of, write_atomically
from fairseq_icl.models import Model, facts_of, load_from
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import observe
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.replication.artefacts import Observed
from fairseq_icl.replication.cells import Cell, Keys, data_hash, foreign_metrics
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.graph import Task, limits_of, observations_of, watches
from fairseq_icl.results import provenance
from fairseq_icl.results.collector import compare
from fairseq_icl.results.examples import most_disagreeing
from fairseq_icl.settings import OF_TRAINING, Settings
from fairseq_icl.training.dynamics import Curve
from fairseq_icl.training.fine_tuning import Watch, fine_tuned
from fairseq_icl.training.gradients import choose_what_learns
from fairseq_icl.training.methods import get_method, training_command, training_options


@dataclass(frozen=True)
class Job:
    """What a process needs to know to compute any task of a run."""

    model: str  # what `model` is in the configuration, as JSON
    sha256: str
    """Of the model's files: hashed once a run, not by every process."""
    data: Path
    out: Path
    plugins: tuple[str, ...] = ()  # modules that register methods and metrics


@dataclass
class Engine:
    """Computes tasks with one model's files and one folder of data; keep one per process."""

    keys: Keys
    folder: ResultsFolder
    shared_model: str | None = None  # file of the model of the task at hand, where workers share it
    _model: tuple[Settings, Model] | None = None
    """The model that was used last, and the settings that tell it from others."""

    def perform(self, task: Task, found: Mapping[str, Any]) -> Any:
        """Do the task; `found` has the results of what it needs, by key. What is stored is not returned."""
        if task.kind == "prompts":
            return self.prompts(task.cell)
        if task.kind == "model":
            return self.share_model(task)
        prompts = found[self.keys.of(task.cell, "prompts")]
        self.shared_model = found.get(self.keys.of(task.cell, "model"))
        if task.kind == "cell":
            self.compute(task.cell, prompts)
        elif self.folder.observation(task.key) is None:
            seen, gradients = self.observe(task, prompts)
            self.folder.keep_observation(task.key, seen, self._with_decoder(task.cell, gradients))
        return None

    def prompts(self, cell: Cell) -> Prompts:
        """The prompts of the cell."""
        data = self.keys.data
        prompts = build_prompts(cell.spec, data, lambda: self.keys.files.writing, cell.settings)
        if data_hash(data, cell.spec, sha256_of) != data_hash(data, cell.spec):
            raise UserError(f"{data}: the files of {cell.dataset} changed during the run; start it again")
        return prompts

    def compute(self, cell: Cell, prompts: Prompts) -> None:
        """Compute and store a cell: ICL against its method, or two methods against each other."""
        start = time.perf_counter()
        prompts = replace(prompts, settings=cell.settings)  # those of its neighbours, who may record or compare others
        needs = observations_of(cell, self.keys)
        stored = needs[: 2 if watches(cell) else None]
        seen = [self.folder.observation(need.key) or self.observe(need, prompts) for need in stored]
        curve = None
        if watches(cell):
            watched = Curve(prompts, seen[0][0], seen[1][0], cell.settings.curve_examples)
            seen.append(self.observe(needs[2], prompts, watched.after_demonstration))
            curve = watched.finish(seen[2][0])
        zsl, icl, *trained = (observation for observation, _ in seen)
        kept: dict[str, Any] = {"curve": curve}
        if len(trained) == 1:
            kept["gradients"] = self._with_decoder(cell, seen[2][1])
            kept["examples"] = most_disagreeing(prompts, zsl, icl, trained[0], self.keys.files.spell)
        both: dict[str, Any] = {"other_ft": trained[1], "metrics": ["alpha"]} if len(trained) == 2 else {}
        table = compare(prompts, zsl, icl, *trained[:1], **both).assign(method=cell.method)
        description, made_by = self._described(cell, prompts)
        kept["seconds"] = time.perf_counter() - start
        self.folder.finish(self.keys.of(cell), lambda folder: folder.write(description, table, made_by, **kept))

    def observe(self, task: Task, prompts: Prompts, watch: Watch | None = None) -> Observed:
        """Observe a condition now: ZSL or ICL of the base model, or fine-tune, watched, and observe that (ft)."""
        gc.collect()  # fairseq's trainer is in a cycle, and with it what was trained last
        give_back_memory()
        cell = task.cell
        model, prompts = self.base_model(cell), replace(prompts, settings=cell.settings)
        if task.kind != "ft":
            return observe(model, prompts, in_context=task.kind == "icl"), None
        settings = {name: getattr(cell.settings, name) for name in OF_TRAINING}
        limit = limits_of(cell, self.keys)
        limits = None if limit is None else (self.folder.observation(limit.key) or self.observe(limit, prompts))[1]
        with fine_tuned(model, prompts, cell.method, limits=limits, after_demonstration=watch, **settings) as tuned:
            return observe(tuned, prompts), tuned.gradients

    def _with_decoder(self, cell: Cell, gradients: pd.DataFrame | None) -> tuple[pd.DataFrame, Any] | None:
        """A gradient record with the decoder that its file describes."""
        return None if gradients is None else (gradients, self.base_model(cell).lm.decoder)

    def _described(self, cell: Cell, prompts: Prompts) -> tuple[dict[str, Any], dict[str, Any]]:
        """What cell.json says, and the provenance inside its table."""
        files, data = self.keys.files, str(self.keys.data)
        description: dict[str, Any] = {"cell": cell.configuration(), "context_rows": list(prompts.context_rows)}
        description["rows"] = {split: asdict(record) for split, record in prompts.rows.items()}
        if (method := get_method(cell.method)).trains:
            options = training_options(method, cell.settings, files, data, cell.source or cell.dataset)
            two_stages = method.first or options.get("layers") == "similar"
            description["command"] = None if two_stages else training_command(options)
            description["learns"] = choose_what_learns(self.base_model(cell).lm, cell.settings)
            description["lr_made_for"] = cell.lender or cell.model
        elif method.edit is not None:
            description["learns"] = "no weight: states are edited"
        description["model"] = {"path": str(files.checkpoint), "sha256": files.sha256}
        description["metrics"] = foreign_metrics()
        made_by = provenance({}, precision=cell.settings.precision, device=cell.settings.device)
        description |= {name: made_by[name] for name in ("machine", "versions")}
        return description, made_by | {"checkpoints": {"base": files.sha256}, "config": description}

    def base_model(self, cell: Cell) -> Model:
        """The model before fine-tuning; loaded anew only if the init (or a random init's seed) changes.

        Tensors of one that all workers map are views of a private mapping. Its file is a pickled module, which could
        run code: only one that this user wrote is read.
        """
        key = cell.model_key()
        if self._model is None or self._model[0] != key:
            self._model = None  # two large models would not fit side by side
            path = Path(self.shared_model or "")
            if path.is_file() and path.stat().st_uid == os.geteuid():
                lm: PretrainedLM = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
                self._model = (key, Model(lm, self.keys.files, *facts_of(cell.settings)))
            else:
                self._model = (key, load_from(self.keys.files, cell.settings))
        return self._model[1]

    def share_model(self, task: Task) -> str:
        """Write the model, as it stands before fine-tuning, to a file that all workers map; "" if they cannot.

        Its pages are in memory once for all processes of a machine. The mapping is private: nothing that a worker does
        to its weights reaches the file. A GPU has a copy of its own, and so has everybody where the disk is too full.
        """
        path = self.folder.shared_model(task.key)
        if task.cell.settings.device != "cpu" or path.is_file():
            return str(path) if path.is_file() else ""
        lm = load_from(self.keys.files, task.cell.settings).lm
        needed = sum(parameter.nbytes for parameter in lm.parameters()) + 2**28  # which is left to the results
        try:
            if (free := shutil.disk_usage(path.parent).free) < needed:
                raise UserError(f"{path.parent}: {needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} free")
            write_atomically(path, partial(torch.save, lm))
        except (UserError, OSError) as error:
            remove(path)
            self.folder.say(f"{reason_of(error)}; so every worker loads a model of its own and needs the memory for it")
            return ""
        return str(path)


def import_plugin(module: str) -> None:
    """Import a module of the user's, which registers methods and metrics; one in the current folder is found."""
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"plugins={module}: cannot be imported ({error}); give a module on PYTHONPATH") from error
    finally:
        sys.path.remove(os.getcwd())
