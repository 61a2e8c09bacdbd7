"""Run the cells of a plan: observe, fine-tune, measure, store. Everything that cells share is done once.

The base model is loaded once a process; fine-tuning changes keys and values in place and is undone afterwards.
Observations that several unfinished cells need (ZSL and ICL by all methods of a run) are kept in the results folder
until the last of those cells is finished, so neither another process nor a resumed run makes them again.
"""

import copy
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from fairseq.models import BaseFairseqModel

from fairseq_icl.encoding import load_dictionary
from fairseq_icl.errors import UserError
from fairseq_icl.metrics.collect import Collector
from fairseq_icl.metrics.training_attention import TrainingTokens
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM, load_decoder
from fairseq_icl.observe import Observation
from fairseq_icl.prompts.build import PromptSet
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.replication import fingerprint
from fairseq_icl.replication.cells import Cell, key_of, observed
from fairseq_icl.replication.methods import get_method
from fairseq_icl.replication.model_files import ModelFiles
from fairseq_icl.replication.observing import load_bundle, observe_all, save_bundle
from fairseq_icl.replication.store import Store, StoreError
from fairseq_icl.replication.training import GRADIENTS, build_task, fine_tune, parse, train_arguments, undone_afterwards
from fairseq_icl.results import provenance, write_results
from fairseq_icl.tasks.demonstration_prompting import DemonstrationPromptingTask, freeze_all_but

STAGES = {"zsl": ("prompts", "model", "observe"), "icl": ("prompts", "model", "observe")}
STAGES["ft"] = (*STAGES["zsl"], "train")
Bundle = tuple[Observation, dict[str, Any]]


class Engine:
    """Computes cells with one model; keep one a process."""

    def __init__(self, files: ModelFiles, data: Path, store: Store):
        self.files, self.data, self.store = files, data, store
        self._model: tuple[tuple[Any, ...], PretrainedLM] | None = None
        self._prompts: tuple[str, PromptSet] | None = None
        self._provenance = provenance({})
        self._keys: dict[tuple[Cell, str], str] = {}

    def key(self, cell: Cell, setting: str = "") -> str:
        """Key of the cell, or of its observation of `setting`."""
        if (cell, setting) not in self._keys:
            self._keys[cell, setting] = self._make_key(cell, setting)
        return self._keys[cell, setting]

    def _make_key(self, cell: Cell, setting: str) -> str:
        described = observed(cell, setting) if setting else cell
        method = get_method(cell.method)
        stages = STAGES[setting] if setting else (*STAGES["ft"], "metrics")
        prints = {
            "model": fingerprint.file_hash(self.files.checkpoint),
            "dictionary": fingerprint.file_hash(self.files.dictionary),
            "data": fingerprint.data_hash(self.data, load_spec(cell.source or cell.dataset)),
            **{f"tokenizer.{name}": fingerprint.file_hash(path) for name, path in self.files.tokenizer.items()},
            **fingerprint.code_versions(stages),
        }
        if setting not in ("zsl", "icl"):
            prints["method"] = json.dumps(asdict(method))
        if not setting:
            prints["metrics"] = fingerprint.foreign_metrics()
        return key_of(described.configuration(), prints)

    def needs(self, cell: Cell) -> list[tuple[str, Cell]]:
        """(key, cell) of every observation the cell is computed from, ZSL and ICL first."""
        trained = [("ft", cell.changed(method=name)) for name in get_method(cell.method).trained]
        settings = [("zsl", cell), ("icl", cell), *trained]
        return [(self.key(other, setting), other) for setting, other in settings]

    def run(self, cells: Sequence[Cell], progress: Callable[[str], None] = lambda line: None) -> int:
        """Compute what is not there yet; returns how many cells this process computed, and tells `progress` of each.

        A cell that another process works on is left to it and looked at again in the end. A cell whose fine-tuning
        fails does not stop the others; the failures are reported together when all else is done.
        """
        self.store.sweep_unfinished()
        keyed = list({self.key(cell): cell for cell in cells}.items())
        computed, failures = 0, []
        for wait in (False, True):
            for key, cell in keyed:
                if self.store.is_finished(key) or any(failed == key for failed, _ in failures):
                    continue
                with self.store.working_on(key, wait=wait) as mine:
                    if not mine or self.store.is_finished(key):
                        continue
                    start = time.perf_counter()
                    try:
                        self._compute(key, cell, keyed)
                    except StoreError:
                        raise
                    except UserError as error:
                        failures.append((key, f"{cell.label}: {error}"))
                        progress(f"failed: {failures[-1][1]}")
                        continue
                    computed += 1
                    progress(f"{cell.label}: {time.perf_counter() - start:.1f} s")
        self._drop_observations(keyed)
        if failures and len(failures) == len(keyed):
            raise UserError(failures[0][1])
        if failures:
            raise UserError(f"{len(failures)} of {len(keyed)} cells failed, the others are stored; {failures[0][1]}")
        return computed

    def _compute(self, key: str, cell: Cell, keyed: Sequence[tuple[str, Cell]]) -> None:
        start = time.perf_counter()
        shared = self._still_needed(keyed, but=key)
        needs = self.needs(cell)
        settings = ["zsl", "icl", *["ft"] * (len(needs) - 2)]
        bundles = [
            self._bundle(need, other, setting, keep=need in shared)
            for (need, other), setting in zip(needs, settings, strict=True)
        ]
        table = self.measure(cell, bundles)
        finetuned = bundles[2][1] if len(bundles) == 3 else {}
        seconds = time.perf_counter() - start
        self.store.finish(key, lambda folder: self._write(folder, cell, table, finetuned, seconds))

    def _still_needed(self, keyed: Sequence[tuple[str, Cell]], but: str) -> set[str]:
        """Keys of the observations that unfinished cells other than `but` need."""
        unfinished = [cell for key, cell in keyed if key != but and not self.store.is_finished(key)]
        return {need for cell in unfinished for need, _ in self.needs(cell)}

    def _drop_observations(self, keyed: Sequence[tuple[str, Cell]]) -> None:
        """Forget the observations of this plan that nobody needs any more."""
        wanted = self._still_needed(keyed, but="")
        for need in {need for _, cell in keyed for need, _ in self.needs(cell)} - wanted:
            self.store.drop_observation(need)

    def _bundle(self, key: str, cell: Cell, setting: str, *, keep: bool) -> Bundle:
        """The observation under `key`: from its file, else made now (by one process at a time) and kept if asked."""
        path = self.store.observation_path(key)
        with self.store.working_on(key, wait=True):
            if path.is_file():
                return load_bundle(path)
            observation, rest = self.observe(cell, setting)
            if keep:
                self.store.save_observation(key, lambda unfinished: save_bundle(unfinished, observation, **rest))
            return observation, rest

    def observe(self, cell: Cell, setting: str) -> Bundle:
        """Observe one setting now: ZSL or ICL of the base model, or fine-tune and observe that (ft)."""
        if setting == "ft":
            return self._fine_tune_and_observe(cell)
        prompts = self.prompts_of(cell)
        context = prompts.context if setting == "icl" else None
        model = self.base_model(cell)
        return observe_all(model, prompts.queries, cell.settings.reading.position, context), {}

    def _fine_tune_and_observe(self, cell: Cell) -> Bundle:
        with self.fine_tuned(cell) as (model, recorded):
            return observe_all(model, self.prompts_of(cell).queries, cell.settings.reading.position), recorded

    @contextmanager
    def fine_tuned(
        self, cell: Cell, prompts: PromptSet | None = None
    ) -> Iterator[tuple[BaseFairseqModel, dict[str, Any]]]:
        """The model fine-tuned on the cell's demonstrations (or those of `prompts`), and what was recorded meanwhile.

        The model is the base model itself: afterwards it has its old weights again.
        """
        with tempfile.TemporaryDirectory() as folder:
            cell = self._with_recorded_clip(cell, Path(folder))
            config = parse(train_arguments(cell, self.files, self.data, Path(folder)))
            task = build_task(config)
            task.prompts = prompts or self.prompts_of(cell, task)
            base = self.base_model(cell)
            freeze_all_but(base, task.cfg.train_parameters, biases=task.reading.biases == "trained")
            model = _linearized(base) if task.cfg.linearize else base
            with undone_afterwards(model):
                queries = fine_tune(config, task, model)
                gradients = torch.frombuffer(bytearray((Path(folder) / GRADIENTS).read_bytes()), dtype=torch.uint8)
                yield model, {"gradients": gradients, "queries": queries}

    def _with_recorded_clip(self, cell: Cell, folder: Path) -> Cell:
        """`layer_clip_value: METHOD` -> the gradient norms that METHOD has on the same demonstrations."""
        value = cell.settings.layer_clip_value
        if cell.settings.layer_clip == "none" or value is None or value[0] in "0123456789." or ":" in value:
            return cell
        plain = cell.changed(method=value, layer_clip="none", layer_clip_value=None)
        _, rest = self._bundle(self.key(plain, "ft"), plain, "ft", keep=True)
        path = folder / "limits.parquet"
        path.write_bytes(rest["gradients"].numpy().tobytes())
        return cell.changed(layer_clip_value=f"from:{path}")

    def measure(self, cell: Cell, bundles: Sequence[Bundle]) -> pd.DataFrame:
        """The tidy table of the cell."""
        zsl, icl, *trained = (observation for observation, _ in bundles)
        reading = cell.settings.reading
        positions = torch.arange(len(zsl))
        if len(trained) == 2:
            collector = Collector(["alpha"], reading)
            collector.add(positions, zsl, icl, trained[0], other_ft=trained[1])
        else:
            prompts = self.prompts_of(cell)
            tokens = training_tokens(prompts, bundles[2][1]["queries"]) if trained else None
            collector = Collector(reading=reading, training=tokens)
            collector.add(positions, zsl, icl, *trained)
        return collector.table(cell.dataset, cell.seed, cell.permutation, cell.method, cell.init)

    def _write(self, folder: Path, cell: Cell, table: pd.DataFrame, finetuned: dict[str, Any], seconds: float) -> None:
        described: dict[str, Any] = {"cell": cell.configuration()}
        if get_method(cell.method).trains:
            words = train_arguments(cell, self.files, self.data)
            described["command"] = shlex.join(["fairseq-train", "--user-dir", "fairseq_icl", *words])
        described["model"] = {
            "path": str(self.files.checkpoint),
            "sha256": fingerprint.file_hash(self.files.checkpoint),
        }
        made_by = self._provenance | {"config": described, "checkpoints": {"base": described["model"]["sha256"]}}
        write_results(folder / "results.parquet", table, made_by)
        if finetuned:
            (folder / GRADIENTS).write_bytes(finetuned["gradients"].numpy().tobytes())
        (folder / "cell.json").write_text(json.dumps(described, indent=1), encoding="utf-8")
        (folder / "time.json").write_text(json.dumps({"seconds": round(seconds, 3)}), encoding="utf-8")

    def prompts_of(self, cell: Cell, task: DemonstrationPromptingTask | None = None) -> PromptSet:
        """The prompts of the cell, kept until another cell needs others."""
        wanted = repr((cell.dataset, cell.seed, cell.permutation, prompt_settings(cell)))
        if self._prompts is None or self._prompts[0] != wanted:
            if task is None:
                trainable = cell if get_method(cell.method).trains else cell.changed(method="gd", learning_rate=1.0)
                # With the flags of a training run (nothing is written): fairseq converts each set of flags once.
                task = build_task(parse(train_arguments(trainable, self.files, self.data, Path())))
            self._prompts = (wanted, task.prompts)
        return self._prompts[1]

    def forget(self) -> None:
        """Drop the model and the prompts that are kept for the next cell."""
        self._model = self._prompts = None

    def base_model(self, cell: Cell) -> PretrainedLM:
        """The model before fine-tuning; loaded anew only if the init (or a random init's seed) changes."""
        is_random = cell.init != "pretrained"
        wanted = (cell.init, cell.seed if is_random else None, cell.settings.reading.final_norm if is_random else None)
        if self._model is None or self._model[0] != wanted:
            self._model = None  # two large models would not fit side by side
            decoder = load_decoder(
                self.files.checkpoint,
                load_dictionary(self.files.dictionary),
                init=cell.init,
                final_norm=cell.settings.reading.final_norm,
                seed=cell.seed,
            )
            model = PretrainedLM(decoder)
            self._model = (wanted, model.to("cuda" if torch.cuda.is_available() else "cpu"))
        return self._model[1]


def training_tokens(prompts: PromptSet, queries: dict[int, torch.Tensor]) -> TrainingTokens | None:
    """The demonstration tokens that fine-tuning and the prompt share, with their recorded query vectors."""
    rows = [row for row in dict.fromkeys(sequence.row for sequence in prompts.finetuning) if row in queries]
    if not set(rows) & set(prompts.context_rows):
        return None
    lengths = [queries[row].size(1) for row in rows]
    joined = torch.cat([queries[row] for row in rows], dim=1)  # (layers, tokens, width)
    return TrainingTokens.align(joined, rows, lengths, prompts.context_rows, prompts.context_spans)


def prompt_settings(cell: Cell) -> tuple[Any, ...]:
    """The settings that prompts are built from."""
    settings, reading = cell.settings, cell.settings.reading
    switches = (settings.switch_labels, settings.switch_fraction, settings.switch_seed)
    orders = (reading.permutation_zero, reading.finetuning_order, reading.finetuning_demonstrations, reading.loss_on)
    return (settings.num_demonstrations, settings.limit, *switches, *orders)


def _linearized(base: PretrainedLM) -> LinearizedLM:
    """The first-order expansion around `base`, sharing its weights: modules are copied, parameters are not."""
    shared = {id(tensor): tensor for tensor in [*base.decoder.parameters(), *base.decoder.buffers()]}
    return LinearizedLM(copy.deepcopy(base.decoder, shared), base.trained_names)
