"""What a plan costs: how often each stage is run, times what it takes; and how much memory the largest one needs.

What cells share is counted once, as the engine does it. Times come from the operations of each stage and the speed of
this machine at such operations (effort.py): no model is loaded or run. The prompts are built: their lengths count.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fairseq_icl.models.files import ModelFiles
from fairseq_icl.models.pretrained_lm import DTYPES, MAPPED_BYTES
from fairseq_icl.observing.observation import AT_ONCE
from fairseq_icl.operations import DecoderSizes, Work
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.effort import Machine, clock, fine_tuning, measuring, observing, watching
from fairseq_icl.replication.engine import Engine
from fairseq_icl.replication.scheduling import split_each_model
from fairseq_icl.replication.sharing import can_share
from fairseq_icl.replication.stand_in import find_model, shape_of
from fairseq_icl.replication.store import Store
from fairseq_icl.results import text_table
from fairseq_icl.settings import Settings
from fairseq_icl.training.methods import get_method

PROCESS_BYTES = 600 * 2**20
"""A process with fairseq and torch imported, before any model is loaded."""
START_CALLS, CELL_CALLS, HASH_RATE = 6_000_000, 100_000, 1e9
"""Calls (effort.py) that take as long as importing torch and fairseq and writing the report, and as what is written and
reported of a cell; bytes of the weights' files that are hashed in a second. Fitted to the demo: 24 s when all of its 42
cells are finished."""
LOAD_TOUCHES, RANDOM_TOUCHES = 30, 30
"""Touches (effort.py) of a weight that is loaded, and of one that is drawn at random besides."""
FINETUNING = ("finetuning_demonstrations", "loss_on")
LENGTHS = ("num_demonstrations", "queries", "limit", "max_validation", "position", *FINETUNING)
"""Settings that change the number or the lengths of a dataset's sequences; seeds and orders hardly do."""
PASSES = ("step_per", "layers", "gradient_norms", "train_parameters", *FINETUNING)
"""Settings that change what fine-tuning does."""


@dataclass(frozen=True)
class Stage:
    """One kind of work: all cells in it cost about the same."""

    name: str
    """zsl, icl, train, ft, curve, measure, prompts or model."""
    dataset: str = ""
    method: str = ""
    kind: tuple[Any, ...] = ()
    """What else makes a difference: k, precision, the settings of `PASSES`."""


def describe(config: dict[str, Any], cells: Sequence[Cell], data: Path, cost: "Cost | None" = None) -> str:
    """The plan in words, with the time and memory of what is unfinished; `cost`: if it has been estimated already."""
    out = Path(config["out"])
    files = find_model(config["model"], out, make=False)
    sizes, todo = sizes_of(config["model"], files), unfinished(config, cells, data)
    lines = [f"{config['name']} on {files.name} ({sizes.layers} layers of width {sizes.width}) into {out}", ""]
    lines += [_counted(cells, todo), ""]
    if not todo:
        return "\n".join([*lines, "everything is finished already"])
    cost = cost or estimate(config, todo, data)
    lines += [f"estimated time: {duration(cost.seconds)} on this machine, if it does nothing else"]
    lines += [f"  {name:<18} {duration(part)}" for name, part in cost.parts]
    lines += [f"estimated memory: {cost.bytes / 2**30:.1f} GiB"]
    if config["workers"] > 1:
        shared = "work and weights" if can_share() else "the work"
        lines[-1] += f" for {config['workers']} workers together, who share {shared}"
    return "\n".join(lines)


@dataclass(frozen=True)
class Cost:
    """What some cells cost."""

    seconds: float
    """In one process."""
    parts: list[tuple[str, float]]
    """Name of the work -> its seconds."""
    bytes: float
    """Most memory at once, of all workers together."""


def estimate(config: dict[str, Any], todo: Sequence[Cell], data: Path) -> Cost:
    """Time and memory of the cells: their operations counted, the machine's speed measured."""
    files = find_model(config["model"], Path(config["out"]), make=False)
    sizes, stages = sizes_of(config["model"], files), stages_of(todo)
    precisions = {cell.settings.precision for cell in todo}
    machines = {name: Machine.measured(sizes, DTYPES[name]) for name in precisions}
    built: dict[Any, tuple[Prompts, float]] = {}
    seconds: dict[Stage, float] = {}
    for stage, (_, cell) in stages.items():
        key = (cell.dataset, *(getattr(cell.settings, name) for name in LENGTHS))
        if key not in built:
            built[key] = _built(cell, files, data)
        prompts, building = built[key]
        machine = machines[cell.settings.precision]
        work = _work(stage, cell.settings, sizes, prompts)
        seconds[stage] = building if stage.name == "prompts" else machine.seconds(work, sizes)
    around = machine.call * (START_CALLS + CELL_CALLS * len(todo)) + files_bytes(files) / HASH_RATE
    parts = [("start and report", around), *_by_name(stages, seconds)]
    memory = peak_bytes(sizes, [prompts for prompts, _ in built.values()], todo, config["workers"])
    return Cost(sum(part for _, part in parts), parts, memory)


def _built(cell: Cell, files: ModelFiles, data: Path) -> tuple[Prompts, float]:
    """The cell's prompts, and the seconds that building them took; the tokenizer is there before."""
    writing, start = files.writing, clock()
    return build_prompts(cell.spec, data, writing, cell.settings), clock() - start


def _work(stage: Stage, settings: Settings, sizes: DecoderSizes, prompts: Prompts) -> Work:
    """What one run of the stage needs."""
    method = get_method(stage.method or "none")
    linearized = "--linearize" in method.flags
    if stage.name == "model":
        return Work({"touches": (LOAD_TOUCHES + RANDOM_TOUCHES * stage.kind[0]) * sizes.weights})
    if stage.name in ("zsl", "icl"):
        return observing(sizes, prompts, len(prompts.context) if stage.name == "icl" else 0)
    if stage.name == "train":
        return fine_tuning(sizes, prompts, method, settings)
    if stage.name == "ft":
        return observing(sizes, prompts, 0, linearized=linearized)
    if stage.name == "curve":
        return watching(sizes, prompts, settings.curve_examples, linearized=linearized)
    return measuring(sizes, prompts, len(method.trained)) if stage.name == "measure" else Work()


def sizes_of(config: dict[str, Any], files: ModelFiles) -> DecoderSizes:
    """The sizes of the model's matrices, by its own configuration or that of the run."""
    shape = shape_of(config, files)
    rotary = files.hugging_face.rotary if files.hugging_face is not None else None
    return DecoderSizes.of(**shape) if rotary is None else DecoderSizes.of_rotary(rotary, shape["vocabulary"])


def files_bytes(files: ModelFiles) -> int:
    """Bytes of the weights' files; 0 for random weights that are not made yet."""
    if files.checkpoint.is_dir() and files.hugging_face is not None:
        return sum(path.stat().st_size for path in files.hugging_face.weight_files())
    return files.checkpoint.stat().st_size if files.checkpoint.is_file() else 0


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
    steps = tuple(getattr(cell.settings, name) for name in PASSES)
    for method in get_method(cell.method).trained:
        tuned = cell.changed(method=method).observed("ft")
        work.append(("train", tuned, Stage("train", cell.dataset, method, (k, precision, *steps))))
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


def peak_bytes(sizes: DecoderSizes, prompts: Sequence[Prompts], cells: Sequence[Cell], workers: int = 1) -> float:
    """Most memory at once: loading; or weights, what learns three times, the largest pass, and what is compared.

    Of several workers together: the weights as often as different models are in use, all else for each of them.
    """
    layers, width = sizes.layers, sizes.width
    learning = layers * sizes.learning()  # a copy to go back to, and gradients
    longest = max((len(s.tokens) for p in prompts for s in p.finetuning), default=0)
    training = longest * (2 * sizes.vocabulary + layers * (12 * width + 3 * sizes.ffn))
    context = max(len(p.context) for p in prompts)
    prefix = layers * context * 2 * sizes.attention + context * 4 * sizes.ffn
    queries = min(AT_ONCE, max(len(p.queries) for p in prompts))  # the others are in files
    query = max(len(q.inputs[0]) for p in prompts for q in p.queries) + 1
    settings = 4 if any(get_method(cell.method).compares for cell in cells) else 3
    observed_numbers = queries * layers * (settings * (2 * width + sizes.heads * query) + context)
    loading = 4 * sizes.weights + MAPPED_BYTES  # in fp32, and what is mapped of the file
    size = 4 if any(cell.settings.precision == "fp32" for cell in cells) else 2  # bytes of a number in the model
    masters = 0 if size == 4 else 4 * 2 * learning  # fp32 copies of what learns, and of its gradient
    computing = size * (2 * learning + max(training, prefix)) + masters + 4 * observed_numbers
    models = models_at_once(cells, workers) if can_share() else workers
    processes = workers if workers == 1 else workers + 1  # the parent computes nothing, but has imported all
    return processes * PROCESS_BYTES + max(models * loading, models * size * sizes.weights + workers * computing)


def models_at_once(cells: Sequence[Cell], workers: int) -> int:
    """How many models workers that share them have in use at the same time, if all cells take equally long."""
    shares = split_each_model(cells, workers, len)
    return max(len({cell.model_key() for cell in now if cell is not None}) for now in zip_longest(*shares))


def unfinished(config: dict[str, Any], cells: Sequence[Cell], data: Path) -> list[Cell]:
    """The cells that the results folder does not have yet."""
    out = Path(config["out"])
    files = find_model(config["model"], out, make=False)
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
