"""What a plan costs, about: times of cells that are finished already, else a probe of a few queries and steps.

The probe runs what the plan would run, on this machine, with two demonstrations and a few queries; its times are
scaled by the numbers of tokens. What cells share is counted once, as the graph has it.
"""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fairseq_icl.models import load_from
from fairseq_icl.observing import observe
from fairseq_icl.prompts.build import Prompts, build_prompts
from fairseq_icl.replication.cells import Cell, Keys
from fairseq_icl.replication.find_model import find_model, shape_of
from fairseq_icl.replication.folders import ResultsFolder
from fairseq_icl.replication.graph import observations_of
from fairseq_icl.replication.plan import borrowed_rates, counted
from fairseq_icl.settings import OF_TRAINING
from fairseq_icl.training.fine_tuning import fine_tuned

QUERIES, STEPS = 8, 2  # of the probe


def describe(config: dict[str, Any], cells: Sequence[Cell], data: Path) -> str:
    """The plan in words, with the time and memory of what is unfinished."""
    out = Path(config["out"])
    files = find_model(config["model"], out, make=False)
    shape = shape_of(config["model"], files)
    lines = [f"{config['name']} on {files.name} ({shape['layers']} layers of width {shape['width']}) into {out}", ""]
    if borrowed := borrowed_rates(cells):
        lines += [*borrowed, ""]
    if not files.checkpoint.exists():  # random weights that nobody has made yet
        return "\n".join([*lines, counted(cells, cells), "", "no estimate: the random weights are made by the run"])
    keys = Keys(files, data)
    folder = ResultsFolder(out, create=False) if (out / "store.json").is_file() else None
    finished = {cell: folder.cell(keys.of(cell)) for cell in cells} if folder else {}
    finished = {cell: found for cell, found in finished.items() if found.path.is_dir()}
    todo = [cell for cell in cells if cell not in finished]
    lines += [counted(cells, todo), ""]
    if not todo:
        return "\n".join([*lines, "everything is finished already"])
    taken: dict[tuple[str, ...], list[float]] = {}
    for cell, found in finished.items():
        taken.setdefault(_kind(cell), []).append(found.seconds())
    if {_kind(cell) for cell in todo} <= taken.keys():
        seconds, how = sum(fmean(taken[_kind(cell)]) for cell in todo), f"from {len(finished)} finished cells"
    else:
        seconds, how = Probe(keys, data).estimate(todo), f"from a probe of {QUERIES} queries and {STEPS} steps"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines += [f"about {duration(seconds)} on this machine in one process, if it does nothing else ({how})"]
    lines += [f"about {peak:.1f} GiB of memory for a process, more with long prompts (the probe's peak)"]
    return "\n".join(lines)


def _kind(cell: Cell) -> tuple[str, ...]:
    """Cells that take about as long: the speed of a GPU says nothing of the CPU's."""
    return cell.dataset, cell.method, cell.settings.device, cell.settings.precision


@dataclass
class Probe:
    """Seconds a token of every condition and method, measured once each."""

    keys: Keys
    data: Path
    rates: dict[tuple[str, ...], float] = field(default_factory=dict)
    prompts: dict[Any, Prompts] = field(default_factory=dict)

    def estimate(self, cells: Sequence[Cell]) -> float:
        """Seconds of all observations of the cells, each once."""
        needs = {need.key: need for cell in cells for need in observations_of(cell, self.keys)}
        total = 0.0
        for need in needs.values():
            for kind in ("train", "zsl") if need.kind == "ft" else (need.kind,):
                total += self._rate(kind, need.cell) * tokens(self._built(need.cell), kind)
        return total

    def _built(self, cell: Cell) -> Prompts:
        key = (cell.dataset, cell.settings.num_demonstrations, cell.settings.limit, cell.settings.queries)
        if key not in self.prompts:
            self.prompts[key] = build_prompts(cell.spec, self.data, self.keys.files.writing, cell.settings)
        return self.prompts[key]

    def _rate(self, kind: str, cell: Cell) -> float:
        work = (kind, cell.method if kind == "train" else "", cell.settings.device, cell.settings.precision)
        if work not in self.rates:
            small = replace(cell.settings, limit=QUERIES, num_demonstrations=STEPS, missing_class="ignore")
            prompts = build_prompts(cell.spec, self.data, self.keys.files.writing, small)
            model = load_from(self.keys.files, replace(small, init="pretrained"))
            start = time.perf_counter()
            if kind == "train":
                with fine_tuned(model, prompts, cell.method, **{name: getattr(small, name) for name in OF_TRAINING}):
                    pass
            else:
                observe(model, prompts, in_context=kind == "icl")
            self.rates[work] = (time.perf_counter() - start) / max(1, tokens(prompts, kind))
        return self.rates[work]


def tokens(prompts: Prompts, kind: str) -> int:
    """How many tokens an observation, or training, goes over; the demonstrations of a prompt once."""
    if kind == "train":
        return sum(len(sequence.tokens) for sequence in prompts.finetuning)
    return sum(query.longest for query in prompts.queries) + (len(prompts.context) if kind == "icl" else 0)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
