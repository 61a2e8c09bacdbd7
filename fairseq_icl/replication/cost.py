"""What a plan costs: how often each stage is run, times what it takes; and how much memory the largest one needs.

What cells share is counted once, as the engine does it. Times are those of the real stages on this machine, on models
of the run's shape but few layers: a stage's time is linear in the number of layers, and in the number of validation
examples or demonstrations beyond a fixed part; so two shallow models and two small parts of the data, each run through
the engine itself, give the time at full depth and size.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fairseq_icl.models.files import ModelFiles, save_random_model
from fairseq_icl.observing import Observation, observe
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.stand_in import find_model, shape_of
from fairseq_icl.replication.store import Store
from fairseq_icl.results import text_table
from fairseq_icl.training import fine_tuned
from fairseq_icl.training.methods import get_method

PROCESS_BYTES = 600 * 2**20
"""A process with fairseq and torch imported, before any model is loaded."""
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
    """zsl, icl, train, ft, curve, measure, prompts or model."""
    dataset: str = ""
    method: str = ""
    kind: tuple[Any, ...] = ()
    """What else makes a difference: k, steps per token, precision."""


def describe(config: dict[str, Any], cells: Sequence[Cell], data: Path) -> str:
    """The plan in words, with estimates of time and memory."""
    out = Path(config["out"])
    files = find_model(config["model"], out, make=False)
    shape = shape_of(config["model"], files)
    todo = _unfinished(cells, files, data, out)
    lines = [f"{config['name']} on {files.name} ({shape['layers']} layers of width {shape['width']}) into {out}", ""]
    lines += [_counted(cells, todo), ""]
    if not todo:
        return "\n".join([*lines, "everything is finished already"])
    cost = estimate(config, todo, data)
    lines += [f"estimated time: {duration(cost.seconds)} on this machine, measured just now"]
    lines += [f"  {name:<18} {duration(part)}" for name, part in cost.parts]
    lines += [f"estimated memory: {cost.bytes / 2**30:.1f} GiB"]
    if config["workers"] > 1:
        lines[-1] += f" for each of {config['workers']} workers, who share the work"
    return "\n".join(lines)


@dataclass(frozen=True)
class Cost:
    """What some cells cost in one process."""

    seconds: float
    parts: list[tuple[str, float]]
    """Name of the work -> its seconds."""
    bytes: float
    """Most memory at once."""


def estimate(config: dict[str, Any], todo: Sequence[Cell], data: Path) -> Cost:
    """Time and memory of the cells, measured on this machine."""
    files = find_model(config["model"], Path(config["out"]), make=False)
    shape = shape_of(config["model"], files)
    stages = stages_of(todo)
    seconds, prompts = measure_stages(stages, files, data, shape, quiet=config["quiet"])
    total = sum(seconds[stage] * count for stage, (count, _) in stages.items())
    return Cost(total, _by_name(stages, seconds), peak_bytes(shape, prompts, todo))


def stages_of(cells: Sequence[Cell]) -> dict[Stage, tuple[int, Cell]]:
    """Stage -> (how often it is run, a cell to measure it by); what cells share is counted once."""
    seen: dict[tuple[str, Any], Stage] = {}
    examples: dict[Stage, Cell] = {}
    for cell in cells:
        for name, work, stage in _work_of(cell):
            seen.setdefault((name, work), stage)
            examples.setdefault(stage, cell)
    counts = Counter(seen.values())
    return {stage: (counts[stage], examples[stage]) for stage in counts}


def _work_of(cell: Cell) -> list[tuple[str, Any, Stage]]:
    """(name, identity of the work, stage) of everything a cell asks for."""
    k, precision = cell.settings.num_demonstrations, cell.settings.precision
    is_random = cell.init != "pretrained"
    work = [
        ("model", cell.model_key(), Stage("model", kind=(is_random,))),
        ("prompts", cell.prompts_key(), Stage("prompts", cell.dataset)),
        ("zsl", cell.observed("zsl"), Stage("zsl", cell.dataset, kind=(precision,))),
        ("icl", cell.observed("icl"), Stage("icl", cell.dataset, kind=(k, precision))),
        ("measure", cell, Stage("measure", cell.dataset, cell.method)),
    ]
    for method in get_method(cell.method).trained:
        tuned = cell.changed(method=method).observed("ft")
        work.append(("train", tuned, Stage("train", cell.dataset, method, (k, cell.settings.step_per, precision))))
        work.append(("ft", tuned, Stage("ft", cell.dataset, method, (precision,))))
    if cell.settings.curve_examples and get_method(cell.method).trains:
        kind = (k, cell.settings.curve_examples, precision)
        work.append(("curve", cell, Stage("curve", cell.dataset, cell.method, kind)))
    return work


def _by_name(stages: dict[Stage, tuple[int, Cell]], seconds: dict[Stage, float]) -> list[tuple[str, float]]:
    names = {
        "model": "loading models",
        "prompts": "building prompts",
        "zsl": "observing ZSL",
        "icl": "observing ICL",
        "train": "fine-tuning",
        "ft": "observing FT",
        "curve": "observing dynamics",
        "measure": "computing metrics",
    }
    parts: dict[str, float] = {}
    for stage, (count, _) in stages.items():
        name = names[stage.name]
        parts[name] = parts.get(name, 0.0) + seconds[stage] * count
    return [(name, parts[name]) for name in names.values() if name in parts]


def peak_bytes(shape: dict[str, int], prompts: Sequence[Prompts], cells: Sequence[Cell]) -> float:
    """Most memory at once: loading; or weights, what learns three times, the largest pass, and what is observed."""
    layers, width, heads = shape["layers"], shape["width"], shape["heads"]
    weights = shape["vocabulary"] * width + layers * (4 * width**2 + 2 * width * shape["ffn"])
    learning = layers * 2 * width**2  # a copy to go back to, and gradients
    longest = max((len(s.tokens) for p in prompts for s in p.finetuning), default=0)
    training = longest * (2 * shape["vocabulary"] + layers * (12 * width + 3 * shape["ffn"]))
    context = max(len(p.context) for p in prompts)
    prefix = layers * context * 2 * width + context * 4 * shape["ffn"]
    queries = max(len(p.queries) for p in prompts)
    query = max(len(q.inputs[0]) for p in prompts for q in p.queries) + 1
    settings = 4 if any(get_method(cell.method).compares for cell in cells) else 3
    observed_numbers = queries * layers * (settings * (2 * width + heads * query) + context)
    loading = 6 * weights  # in fp32, and the file in half precision mapped beside them
    size = 4 if any(cell.settings.precision == "fp32" for cell in cells) else 2  # bytes of a number in the model
    masters = 0 if size == 4 else 4 * 2 * learning  # fp32 copies of what learns, and of its gradient
    computing = size * (weights + 2 * learning + max(training, prefix)) + masters
    return PROCESS_BYTES + max(loading, computing + 4 * observed_numbers)


def _unfinished(cells: Sequence[Cell], files: ModelFiles, data: Path, out: Path) -> list[Cell]:
    """The cells that the results folder does not have yet."""
    if not (out / "store.json").is_file() or not files.checkpoint.exists():
        return list(cells)
    store = Store(out, create=False)
    engine = Engine(files, data, store)
    return [cell for cell in cells if not store.is_finished(engine.key(cell))]


def _counted(cells: Sequence[Cell], todo: Sequence[Cell]) -> str:
    """Cells by init, dataset and method, and how many of them are still to do."""
    planned = Counter((cell.init, cell.dataset, cell.method) for cell in cells)
    left = Counter((cell.init, cell.dataset, cell.method) for cell in todo)
    rows: list[tuple[Any, ...]] = [("init", "dataset", "method", "cells", "to do")]
    rows += [(*place, count, left[place]) for place, count in planned.items()]
    rows += [("", "", "all", len(cells), len(todo))]
    return text_table(rows, names=3)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.{0 if seconds >= 1200 else 1}f} min"
    return f"{seconds / 3600:.1f} h"


def measure_stages(
    stages: dict[Stage, tuple[int, Cell]], files: ModelFiles, data: Path, shape: dict[str, int], *, quiet: bool = True
) -> tuple[dict[Stage, float], list[Prompts]]:
    """Seconds of one run of each stage at full size, and the prompts that were looked at."""
    seconds: dict[Stage, float] = {}
    prompts: list[Prompts] = []
    with tempfile.TemporaryDirectory() as name, tqdm(total=len(stages), desc="measuring", disable=quiet) as bar:
        shallow = [ShallowModel(Path(name), layers, files, data, shape) for layers in SHALLOW]
        for stage, (_, cell) in stages.items():
            bar.set_postfix_str(" ".join(filter(None, (stage.name, stage.dataset, stage.method))))
            cell = cell.changed(method=stage.method) if stage.name in ("train", "ft") else cell
            # Limits on gradients cost nothing, and those recorded with all demonstrations do not fit a part of them.
            cell = cell.changed(layer_clip="none", layer_clip_value=None)
            whole = shallow[0].engine.prompts_of(cell)
            prompts.append(whole)
            sizes: tuple[int, ...]
            if stage.name in ("model", "prompts"):
                sizes, full = (1,), 1  # whole in any case
            elif stage.name == "curve":  # a point sees the first queries twice, in context and fine-tuned
                passes = min(cell.settings.curve_examples, len(whole.queries)) * (len(whole.finetuning) - 1)
                sizes = FEW if len(whole.queries) > FEW[1] else (1, max(2, len(whole.queries)))
                full = passes
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
        save_random_model(checkpoint, files.load_dictionary(), {**shape, "layers": layers})
        self.engine = Engine(replace(files, checkpoint=checkpoint), data, Store(folder / f"run{layers}"))
        self._seen: dict[tuple[str, Cell], tuple[Observation, float]] = {}

    def seconds(self, stage: Stage, cell: Cell, size: int) -> float:
        """Seconds of the stage with `size` demonstrations (train) or queries; what comes before it is done already."""
        if stage.name in ("prompts", "model"):
            work: Callable[[Cell], Any] = self.engine.prompts_of if stage.name == "prompts" else self.engine.base_model

            def from_files() -> Any:
                self.engine.forget()
                return work(cell)

            return _timed(from_files)[1]
        self.engine.base_model(cell)
        if stage.name == "train":
            part = _part(self.engine.prompts_of(cell), size)
            return _timed(lambda: self._fine_tune(cell, part))[1]
        limited = cell.changed(limit=size)
        if stage.name == "curve":
            return sum(self._observe(limited, name)[1] for name in ("icl", "ft"))
        if stage.name != "measure":
            return self._observe(limited, stage.name)[1]
        seen = [self._observe(limited, name)[0] for name in ("zsl", "icl")]
        seen += [self._observe(limited.changed(method=name), "ft")[0] for name in get_method(cell.method).trained]
        return _timed(lambda: self.engine.compare(limited, seen))[1]

    def _fine_tune(self, cell: Cell, prompts: Prompts) -> None:
        with fine_tuned(self.engine.base_model(cell), prompts, cell.method):
            pass

    def _observe(self, cell: Cell, setting: str) -> tuple[Observation, float]:
        """(what was observed, seconds without fine-tuning), measured once."""
        key = (setting, cell.observed(setting))
        if key not in self._seen and setting == "ft":
            self._seen[key] = self._observe_fine_tuned(cell)
        elif key not in self._seen:
            (observation, _), seconds = _timed(lambda: self.engine.observe(cell, setting))
            self._seen[key] = observation, seconds
        return self._seen[key]

    def _observe_fine_tuned(self, cell: Cell) -> tuple[Observation, float]:
        prompts = self.engine.prompts_of(cell)
        with fine_tuned(self.engine.base_model(cell), _part(prompts, 1), cell.method) as tuned:
            observation, seconds = _timed(lambda: observe(tuned, prompts))
        (seen,) = (observation.training_queries or {}).values()  # (layers, tokens, width) of the one demonstration
        # Metrics take as long on invented query vectors of all demonstrations as on real ones.
        layers, _, width = seen.shape
        queries = {s.row: torch.randn(layers, len(s.tokens), width) for s in prompts.finetuning}
        return replace(observation, training_queries=queries), seconds


def _part(prompts: Prompts, count: int) -> Prompts:
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
