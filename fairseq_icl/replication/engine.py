"""Compute a cell: observe, fine-tune, compare, store. Everything that cells share is done once.

The base model is loaded once per process, or once for all workers of a machine (sharing.py). Observations that several
unfinished cells need (ZSL and ICL by all methods of a run) are kept in the results folder until the last of those cells
is finished, so neither another process nor a resumed run makes them again. Which process computes which cell when is
scheduling.py's.
"""

import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fairseq_icl.errors import UserError
from fairseq_icl.files import give_back_memory, sha256_of
from fairseq_icl.models import Model
from fairseq_icl.models.files import ModelFiles
from fairseq_icl.observing import Observation, observe
from fairseq_icl.observing.saved import load_observations, save_observations
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.replication.cells import Cell, data_hash, key_of
from fairseq_icl.replication.locks import Held
from fairseq_icl.replication.sharing import base_model
from fairseq_icl.replication.store import Store
from fairseq_icl.results import provenance, read_gradient_record, write_curve, write_results
from fairseq_icl.results.collector import compare
from fairseq_icl.results.examples import most_disagreeing
from fairseq_icl.settings import OF_TRAINING
from fairseq_icl.training import Watch, fine_tuned
from fairseq_icl.training.dynamics import Curve
from fairseq_icl.training.gradient_record import write_gradient_record
from fairseq_icl.training.methods import get_method, method_names, training_command, training_options

GRADIENTS, CURVE, EXAMPLES = "gradients.parquet", "curve.parquet", "examples.json"
OBSERVATION = "observation.safetensors"
Observed = tuple[Observation, pd.DataFrame | None]
"""What was seen and, of a fine-tuned model, the record of its gradients."""


class Engine:
    """Computes cells with one model; keep one per process."""

    def __init__(self, files: ModelFiles, data: Path, store: Store):
        self.files, self.data, self.store = files, data, store
        self._model: tuple[Any, Model] | None = None
        self._prompts: tuple[Any, Prompts] | None = None
        self._keys: dict[tuple[Cell, str], str] = {}

    def key(self, cell: Cell, setting: str = "") -> str:
        """Key of the cell, or of its observation of `setting`."""
        if (cell, setting) not in self._keys:
            self._keys[cell, setting] = key_of(cell, self.files, self.data, setting)
        return self._keys[cell, setting]

    def needs(self, cell: Cell) -> list[tuple[str, Cell, str]]:
        """(key, cell, setting) of every observation the cell is computed from, ZSL and ICL first."""
        trained = [(cell.changed(method=name), "ft") for name in get_method(cell.method).trained]
        return [
            (self.key(other, setting), other, setting) for other, setting in ((cell, "zsl"), (cell, "icl"), *trained)
        ]

    def compute(self, cell: Cell, plan: dict[str, Cell]) -> None:
        """Compute and store a cell; `plan` has, by key, all cells that may share its observations.

        Held, if another process makes one of those right now.
        """
        start = time.perf_counter()
        key = self.key(cell)
        shared = self._still_needed({other: cell for other, cell in plan.items() if other != key})
        needs = self.needs(cell)
        seen = [self._observed(*need, keep=need[0] in shared) for need in needs[:2]]
        curve = None
        if cell.settings.curve_examples and len(needs) == 3:
            curve, tuned = self._curve(cell, seen[0][0], seen[1][0])
            seen.append(tuned)
        else:
            seen += [self._observed(*need, keep=need[0] in shared) for need in needs[2:]]
        table = self.compare(cell, [observation for observation, _ in seen])
        gradients = seen[2][1] if len(seen) == 3 else None
        looked_at = self.examples(cell, [observation for observation, _ in seen]) if len(seen) == 3 else None

        def write(folder: Path) -> None:
            self._write(folder, cell, table, gradients, time.perf_counter() - start)
            if curve is not None:
                write_curve(folder / CURVE, curve)
            if looked_at is not None:
                (folder / EXAMPLES).write_text(json.dumps(looked_at, separators=(",", ":")), encoding="utf-8")

        self.store.finish(key, write)

    def _curve(self, cell: Cell, zsl: Observation, icl: Observation) -> tuple[pd.DataFrame, Observed]:
        """The dynamics of the cell, and its fine-tuned model observed."""
        curve = Curve(self.prompts_of(cell), zsl, icl, cell.settings.curve_examples)
        tuned = self.observe(cell, "ft", curve.after_demonstration)
        return curve.finish(tuned[0]), tuned

    def examples(self, cell: Cell, observations: Sequence[Observation]) -> dict[str, Any]:
        """The few examples of the cell that people may look at."""
        zsl, icl, ft = observations
        return most_disagreeing(self.prompts_of(cell), zsl, icl, ft, self.files.spell)

    def compare(self, cell: Cell, observations: Sequence[Observation]) -> pd.DataFrame:
        """The tidy table of the cell: ICL against its method, or two methods against each other."""
        zsl, icl, *trained = observations
        both: dict[str, Any] = {"other_ft": trained[1], "metrics": ["alpha"]} if len(trained) == 2 else {}
        return compare(self.prompts_of(cell), zsl, icl, *trained[:1], **both).assign(method=cell.method)

    def _still_needed(self, keyed: dict[str, Cell]) -> set[str]:
        """Keys of the observations that the unfinished ones of these cells need."""
        unfinished = [cell for key, cell in keyed.items() if not self.store.is_finished(key)]
        return {need for cell in unfinished for need, _, _ in self.needs(cell)}

    def drop_observations(self, keyed: dict[str, Cell]) -> None:
        """Forget the observations of this plan that nobody needs any more."""
        wanted = self._still_needed(keyed)
        for need in {need for cell in keyed.values() for need, _, _ in self.needs(cell)} - wanted:
            self.store.drop_observation(need)

    def _observed(self, key: str, cell: Cell, setting: str, *, keep: bool) -> Observed:
        """The observation under `key`: from its files, else made now (by one process at a time) and kept if asked."""
        with self.store.working_on(key) as mine:
            if not mine:
                raise Held(key)
            folder = self.store.observation_folder(key)
            if os.path.lexists(folder):
                try:
                    self.store.check_observation(key)
                    return read_observed(folder)
                except UserError as error:
                    self.store.say(f"{error}: it is made again")
                    self.store.drop_observation(key)
            observation, gradients = self.observe(cell, setting)
            if keep:
                self.store.save_observation(key, lambda folder: self._write_observed(folder, observation, gradients))
            return observation, gradients

    def observe(self, cell: Cell, setting: str, after_demonstration: Watch | None = None) -> Observed:
        """Observe one setting now: ZSL or ICL of the base model, or fine-tune, watched, and observe that (ft)."""
        gc.collect()  # fairseq's trainer is in a cycle, and with it what was trained last
        give_back_memory()
        model, prompts = self.base_model(cell), self.prompts_of(cell)
        if setting != "ft":
            return observe(model, prompts, in_context=setting == "icl"), None
        settings = {name: getattr(cell.settings, name) for name in OF_TRAINING}
        watched: dict[str, Any] = {"limits": self._limits(cell), "after_demonstration": after_demonstration}
        with fine_tuned(model, prompts, cell.method, **watched, **settings) as tuned:
            return observe(tuned, prompts), tuned.gradients

    def _limits(self, cell: Cell) -> pd.DataFrame | None:
        """`layer_clip_value: METHOD` -> the gradients that METHOD has on the same demonstrations."""
        value = cell.settings.layer_clip_value
        if cell.settings.layer_clip == "none" or value not in method_names():
            return None
        other = cell.changed(method=value, layer_clip="none", layer_clip_value=None)
        return self._observed(self.key(other, "ft"), other, "ft", keep=True)[1]

    def _write_observed(self, folder: Path, observation: Observation, gradients: pd.DataFrame | None) -> None:
        save_observations(folder / OBSERVATION, {"seen": observation})
        if gradients is not None and self._model is not None:
            write_gradient_record(folder / GRADIENTS, gradients, self._model[1].lm.decoder)

    def _write(
        self, folder: Path, cell: Cell, table: pd.DataFrame, gradients: pd.DataFrame | None, seconds: float
    ) -> None:
        described: dict[str, Any] = {"cell": cell.configuration()}
        prompts = self.prompts_of(cell)
        described["context_rows"] = list(prompts.context_rows)
        described["rows"] = {split: record.as_dict() for split, record in prompts.rows.items()}
        if get_method(cell.method).trains:
            described["command"] = self.command(cell)
        described["model"] = {"path": str(self.files.checkpoint), "sha256": self.files.sha256}
        made_by = provenance({}, precision=cell.settings.precision) | {
            "config": described,
            "checkpoints": {"base": self.files.sha256},
        }
        described["machine"] = made_by["machine"]
        write_results(folder / "results.parquet", table, made_by)
        if gradients is not None:
            write_gradient_record(folder / GRADIENTS, gradients, self.base_model(cell).lm.decoder)
        (folder / "cell.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
        (folder / "time.json").write_text(json.dumps({"seconds": round(seconds, 3)}), encoding="utf-8")

    def command(self, cell: Cell) -> str:
        """The `fairseq-train` command that fine-tunes as the cell does."""
        method, source = get_method(cell.method), cell.source or cell.dataset
        return training_command(training_options(method, cell.settings, self.files, str(self.data), source))

    def prompts_of(self, cell: Cell) -> Prompts:
        """The prompts of the cell, kept until another cell needs others."""
        wanted = cell.prompts_key()
        if self._prompts is None or self._prompts[0] != wanted:
            prompts = build_prompts(cell.spec, self.data, self.files.writing, cell.settings)
            if data_hash(self.data, cell.spec, sha256_of) != data_hash(self.data, cell.spec):
                raise UserError(f"{self.data}: the files of {cell.dataset} changed during the run; start it again")
            self._prompts = (wanted, prompts)
        # Cells of the same prompts may differ in what is recorded or compared.
        return replace(self._prompts[1], settings=cell.settings)

    def base_model(self, cell: Cell) -> Model:
        """The model before fine-tuning; loaded anew only if the init (or a random init's seed) changes."""
        wanted = cell.model_key()
        if self._model is None or self._model[0] != wanted:
            self._model = None  # two large models would not fit side by side
            self._model = (wanted, base_model(self.files, cell, self.store.say))
        return self._model[1]

    def forget(self) -> None:
        """Drop the model and the prompts that are kept for the next cell."""
        self._model = self._prompts = None


def read_observed(folder: Path) -> Observed:
    """What `_write_observed` wrote."""
    _, seen = load_observations(folder / OBSERVATION)
    gradients = read_gradient_record(folder / GRADIENTS)[0] if (folder / GRADIENTS).is_file() else None
    if "seen" not in seen:
        raise UserError(f"{folder / OBSERVATION}: not an observation of a run")
    return seen["seen"], gradients
