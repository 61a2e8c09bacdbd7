"""What a plan costs: measured on this machine with the real stages on models of the same shape but few layers.

A stage's time is linear in the number of layers, and in the number of validation examples beyond a fixed part; so two
shallow models and two small limits, each run through the engine itself, give the time at full depth and full limit.
What cells share is counted once, as the engine does it.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairseq_icl.encoding import load_dictionary
from fairseq_icl.prompts.build import PromptSet
from fairseq_icl.replication.cells import Cell, observed
from fairseq_icl.replication.engine import Engine, prompt_settings
from fairseq_icl.replication.methods import get_method
from fairseq_icl.replication.model_files import ModelFiles, find_model, save_random_model, shape_of
from fairseq_icl.replication.store import Store

SHALLOW = (1, 3)
"""Layers of the two models that are measured."""
FEW = (8, 32)
"""Validation examples in the two measurements, unless the run has no more than the second."""
LONG = 2.0
"""Seconds after which a measurement is not repeated."""
PROCESS_BYTES = 600 * 2**20
"""A process with fairseq and torch imported, before any model is loaded."""


@dataclass(frozen=True)
class Stage:
    """One kind of work: all cells in it cost about the same."""

    name: str
    """zsl, icl, ft, measure, prompts or model."""
    dataset: str = ""
    method: str = ""
    kind: tuple[Any, ...] = ()
    """What else makes a difference: k, steps per token."""


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
    stages = stages_of(todo)
    seconds, prompts = measure_stages(stages, files, data, shape)
    total = sum(seconds[stage] * count for stage, (count, _) in stages.items())
    lines += [f"estimated time: {duration(total)} on this machine, measured just now"]
    lines += [f"  {name:<18} {duration(part)}" for name, part in _by_name(stages, seconds)]
    lines += [f"estimated memory: {peak_bytes(shape, prompts, todo) / 2**30:.1f} GiB"]
    return "\n".join(lines)


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
    k = cell.settings.num_demonstrations
    is_random = cell.init != "pretrained"
    work = [
        ("model", (cell.init, cell.seed if is_random else 0), Stage("model", kind=(is_random,))),
        ("prompts", (cell.dataset, cell.seed, cell.permutation, prompt_settings(cell)), Stage("prompts", cell.dataset)),
        ("zsl", observed(cell, "zsl"), Stage("zsl", cell.dataset)),
        ("icl", observed(cell, "icl"), Stage("icl", cell.dataset, kind=(k,))),
        ("measure", cell, Stage("measure", cell.dataset, cell.method)),
    ]
    for method in _trained(cell):
        other = cell.changed(method=method)
        stage = Stage("ft", cell.dataset, method, (k, cell.settings.reading.step_per))
        work.append(("ft", observed(other, "ft"), stage))
    return work


def _trained(cell: Cell) -> tuple[str, ...]:
    """The methods whose fine-tuned models the cell needs."""
    method = get_method(cell.method)
    return method.compares or ((cell.method,) if method.trains else ())


def measure_stages(
    stages: dict[Stage, tuple[int, Cell]], files: ModelFiles, data: Path, shape: dict[str, int]
) -> tuple[dict[Stage, float], list[PromptSet]]:
    """Seconds of one run of each stage at full size, and the prompts that were looked at."""
    seconds: dict[Stage, float] = {}
    prompts: list[PromptSet] = []
    with tempfile.TemporaryDirectory() as name:
        shallow = [ShallowModel(Path(name), layers, files, data, shape) for layers in SHALLOW]
        for stage, (_, cell) in stages.items():
            if stage.name == "ft":
                cell = cell.changed(method=stage.method)
            whole = shallow[0].engine.prompts_of(cell)
            prompts.append(whole)
            count = len(whole.queries)
            limits = (count,) if count <= FEW[1] else FEW
            by_limit = []
            for limit in limits:
                limited = cell.changed(limit=limit)
                by_layers = [model.seconds(stage, limited) for model in shallow]
                by_limit.append(_line(SHALLOW, by_layers, shape["layers"]))
            seconds[stage] = _line(limits, by_limit, count)
    return seconds, prompts


class ShallowModel:
    """An engine on a random model of the run's shape with few layers, and how long its stages take."""

    def __init__(self, folder: Path, layers: int, files: ModelFiles, data: Path, shape: dict[str, int]):
        checkpoint = folder / f"{layers}.pt"
        save_random_model(checkpoint, load_dictionary(files.dictionary), {**shape, "layers": layers})
        self.engine = Engine(replace(files, checkpoint=checkpoint), data, Store(folder / f"run{layers}"))
        self._seen: dict[tuple[Cell, str], tuple[Any, float]] = {}

    def seconds(self, stage: Stage, cell: Cell) -> float:
        """Seconds that the stage takes; what comes before it is done already."""
        if stage.name in ("prompts", "model"):
            work = self.engine.prompts_of if stage.name == "prompts" else self.engine.base_model
            self.engine.forget()
            return _timed(lambda: work(cell))[1]
        if stage.name != "measure":
            return self._observe(cell, stage.name)[1]
        bundles = [self._observe(cell, name)[0] for name in ("zsl", "icl")]
        bundles += [self._observe(cell.changed(method=method), "ft")[0] for method in _trained(cell)]
        return _timed(lambda: self.engine.measure(cell, bundles))[1]

    def _observe(self, cell: Cell, setting: str) -> tuple[Any, float]:
        """(what was observed, seconds), measured once."""
        key = (observed(cell, setting), setting)
        if key not in self._seen:
            self.engine.prompts_of(cell)
            self.engine.base_model(cell)
            self._seen[key] = _timed(lambda: self.engine.observe(cell, setting))
        return self._seen[key]


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


def _by_name(stages: dict[Stage, tuple[int, Cell]], seconds: dict[Stage, float]) -> list[tuple[str, float]]:
    names = {
        "model": "loading models",
        "prompts": "building prompts",
        "zsl": "observing ZSL",
        "icl": "observing ICL",
        "ft": "fine-tuning",
        "measure": "computing metrics",
    }
    parts = Counter()
    for stage, (count, _) in stages.items():
        parts[names[stage.name]] += seconds[stage] * count
    return [(name, parts[name]) for name in names.values() if name in parts]


def peak_bytes(shape: dict[str, int], prompts: Sequence[PromptSet], cells: Sequence[Cell]) -> float:
    """Most memory at once: weights, what learns three times, the largest pass, and the observations of one run."""
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
    return PROCESS_BYTES + 4 * (weights + 2 * learning + max(training, prefix) + observed_numbers)


def _unfinished(cells: Sequence[Cell], files: ModelFiles, data: Path, out: Path) -> list[Cell]:
    """The cells that the results folder does not have yet."""
    if not (out / "store.json").is_file() or not files.checkpoint.is_file():
        return list(cells)
    store = Store(out, create=False)
    engine = Engine(files, data, store)
    return [cell for cell in cells if not store.is_finished(engine.key(cell))]


def _counted(cells: Sequence[Cell], todo: Sequence[Cell]) -> str:
    """Cells by init, dataset and method, and how many of them are still to do."""
    planned = Counter((cell.init, cell.dataset, cell.method) for cell in cells)
    left = Counter((cell.init, cell.dataset, cell.method) for cell in todo)
    rows = [("init", "dataset", "method", "cells", "to do")]
    rows += [(*place, str(count), str(left[place])) for place, count in planned.items()]
    rows += [("", "", "all", str(len(cells)), str(len(todo)))]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
