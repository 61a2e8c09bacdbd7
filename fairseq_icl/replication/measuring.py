"""How long the stages of a run take on this machine: the real stages, on models of the run's shape but few layers.

A stage's time is linear in the number of layers, and in the number of validation examples or demonstrations beyond a
fixed part; so two shallow models and two small parts of the data, each run through the engine itself, give the time at
full depth and size.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fairseq_icl.encoding import load_dictionary
from fairseq_icl.prompts.build import PromptSet
from fairseq_icl.replication.cells import Cell, observed
from fairseq_icl.replication.engine import Bundle, Engine
from fairseq_icl.replication.methods import get_method
from fairseq_icl.replication.model_files import ModelFiles, save_random_model
from fairseq_icl.replication.observing import observe_all
from fairseq_icl.replication.store import Store

SHALLOW = (1, 3)
"""Layers of the two models that are measured."""
FEW = (8, 32)
"""Validation examples in the two measurements, unless the run has no more than the second."""
PARTS = (2, 10)
"""Demonstrations in the two measurements of fine-tuning, unless the run has no more than the second."""
LONG = 2.0
"""Seconds after which a measurement is not repeated."""


@dataclass(frozen=True)
class Stage:
    """One kind of work: all cells in it cost about the same."""

    name: str
    """zsl, icl, train, ft, measure, prompts or model."""
    dataset: str = ""
    method: str = ""
    kind: tuple[Any, ...] = ()
    """What else makes a difference: k, steps per token."""


def measure_stages(
    stages: dict[Stage, tuple[int, Cell]], files: ModelFiles, data: Path, shape: dict[str, int], *, quiet: bool = True
) -> tuple[dict[Stage, float], list[PromptSet]]:
    """Seconds of one run of each stage at full size, and the prompts that were looked at."""
    seconds: dict[Stage, float] = {}
    prompts: list[PromptSet] = []
    with tempfile.TemporaryDirectory() as name, tqdm(total=len(stages), desc="measuring", disable=quiet) as bar:
        shallow = [ShallowModel(Path(name), layers, files, data, shape) for layers in SHALLOW]
        for stage, (_, cell) in stages.items():
            bar.set_postfix_str(" ".join(filter(None, (stage.name, stage.dataset, stage.method))))
            cell = cell.changed(method=stage.method) if stage.name in ("train", "ft") else cell
            # Limits on gradients cost nothing, and those recorded with all demonstrations do not fit a part of them.
            cell = cell.changed(layer_clip="none", layer_clip_value=None)
            whole = shallow[0].engine.prompts_of(cell)
            prompts.append(whole)
            if stage.name in ("model", "prompts"):
                sizes, full = (1,), 1  # whole in any case
            elif stage.name == "train":
                sizes, full = _few(PARTS, len(whole.finetuning)), len(whole.finetuning)
            else:
                sizes, full = _few(FEW, len(whole.queries)), len(whole.queries)
            by_size = [
                _line(SHALLOW, [model.seconds(stage, cell, size) for model in shallow], shape["layers"])
                for size in sizes
            ]
            seconds[stage] = _line(sizes, by_size, full)
            bar.update()
    return seconds, prompts


def _few(sizes: tuple[int, int], full: int) -> tuple[int, ...]:
    """The two sizes to measure, or the full one if that is no larger."""
    return sizes if full > sizes[1] else (full,)


class ShallowModel:
    """An engine on a random model of the run's shape with few layers, and how long its stages take."""

    def __init__(self, folder: Path, layers: int, files: ModelFiles, data: Path, shape: dict[str, int]):
        checkpoint = folder / f"{layers}.pt"
        save_random_model(checkpoint, load_dictionary(files.dictionary), {**shape, "layers": layers})
        self.engine = Engine(replace(files, checkpoint=checkpoint), data, Store(folder / f"run{layers}"))
        self._seen: dict[tuple[str, Cell], tuple[Bundle, float]] = {}

    def seconds(self, stage: Stage, cell: Cell, size: int) -> float:
        """Seconds of the stage with `size` demonstrations (train) or queries; what comes before it is done already."""
        if stage.name in ("prompts", "model"):
            work = self.engine.prompts_of if stage.name == "prompts" else self.engine.base_model
            return _timed(lambda: (self.engine.forget(), work(cell)))[1]  # each trial from the files
        self.engine.base_model(cell)
        if stage.name == "train":
            part = _part(self.engine.prompts_of(cell), size)
            return _timed(lambda: self._fine_tune(cell, part))[1]
        limited = cell.changed(limit=size)
        if stage.name != "measure":
            return self._observe(limited, stage.name)[1]
        bundles = [self._observe(limited, name)[0] for name in ("zsl", "icl")]
        bundles += [
            self._observe(limited.changed(method=method), "ft")[0] for method in get_method(cell.method).trained
        ]
        return _timed(lambda: self.engine.measure(limited, bundles))[1]

    def _fine_tune(self, cell: Cell, prompts: PromptSet) -> None:
        with self.engine.fine_tuned(cell, prompts):
            pass

    def _observe(self, cell: Cell, setting: str) -> tuple[Bundle, float]:
        """(what was observed, seconds without fine-tuning), measured once."""
        key = (setting, observed(cell, setting))
        if key not in self._seen and setting == "ft":
            self._seen[key] = self._observe_fine_tuned(cell)
        elif key not in self._seen:
            self._seen[key] = _timed(lambda: self.engine.observe(cell, setting))
        return self._seen[key]

    def _observe_fine_tuned(self, cell: Cell) -> tuple[Bundle, float]:
        prompts = self.engine.prompts_of(cell)
        with self.engine.fine_tuned(cell, _part(prompts, 1)) as (model, recorded):
            position = cell.settings.reading.position
            observation, seconds = _timed(lambda: observe_all(model, prompts.queries, position))
        (seen,) = recorded["queries"].values()  # (layers, tokens, width) of the one demonstration
        # Metrics take as long on invented query vectors of all demonstrations as on real ones.
        layers, _, width = seen.shape
        recorded["queries"] = {s.row: torch.randn(layers, len(s.tokens), width) for s in prompts.finetuning}
        return (observation, recorded), seconds


def _part(prompts: PromptSet, count: int) -> PromptSet:
    """The prompts with `count` demonstrations to fine-tune on, from the shortest to the longest in equal steps."""
    by_length = sorted(prompts.finetuning, key=lambda sequence: len(sequence.tokens))
    places = [int((place + 0.5) * len(by_length) / count) for place in range(count)]
    return replace(prompts, finetuning=tuple(by_length[place] for place in places))


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """(result, seconds): the faster of two trials if they are short, since other programs disturb them most."""
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
        if best > LONG:
            break
    return result, best


def _line(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """The value at `place` of the straight line through the measured ones (a constant if there is one)."""
    if len(places) == 1:
        return values[0]
    slope = max(0.0, (values[1] - values[0]) / (places[1] - places[0]))
    return values[0] + slope * (place - places[0])
