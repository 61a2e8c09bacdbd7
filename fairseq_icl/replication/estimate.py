"""What a plan costs: how often each stage is run, times what it takes; and how much memory the largest one needs.

What cells share is counted once, as the engine does it.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_icl.prompts.build import PromptSet
from fairseq_icl.replication.cells import Cell, observed
from fairseq_icl.replication.engine import Engine, prompt_settings
from fairseq_icl.replication.measuring import Stage, measure_stages
from fairseq_icl.replication.methods import get_method
from fairseq_icl.replication.model_files import ModelFiles, find_model, shape_of
from fairseq_icl.replication.store import Store

PROCESS_BYTES = 600 * 2**20
"""A process with fairseq and torch imported, before any model is loaded."""


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
    seconds, prompts = measure_stages(stages, files, data, shape, quiet=config["quiet"])
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
    for method in get_method(cell.method).trained:
        tuned = observed(cell.changed(method=method), "ft")
        work.append(("train", tuned, Stage("train", cell.dataset, method, (k, cell.settings.reading.step_per))))
        work.append(("ft", tuned, Stage("ft", cell.dataset, method)))
    return work


def _by_name(stages: dict[Stage, tuple[int, Cell]], seconds: dict[Stage, float]) -> list[tuple[str, float]]:
    names = {
        "model": "loading models",
        "prompts": "building prompts",
        "zsl": "observing ZSL",
        "icl": "observing ICL",
        "train": "fine-tuning",
        "ft": "observing FT",
        "measure": "computing metrics",
    }
    parts = Counter()
    for stage, (count, _) in stages.items():
        parts[names[stage.name]] += seconds[stage] * count
    return [(name, parts[name]) for name in names.values() if name in parts]


def peak_bytes(shape: dict[str, int], prompts: Sequence[PromptSet], cells: Sequence[Cell]) -> float:
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
    return PROCESS_BYTES + max(loading, 4 * (weights + 2 * learning + max(training, prefix) + observed_numbers))


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
        return f"{seconds / 60:.{0 if seconds >= 1200 else 1}f} min"
    return f"{seconds / 3600:.1f} h"
