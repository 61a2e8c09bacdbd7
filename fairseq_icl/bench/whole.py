"""Measure whole runs: the pipeline of one run both ways, and an experiment as a user would run it.

Pipeline: fine-tune, score ZSL, ICL and FT, compute the metrics, write the results. Neither way is charged for starting
its commands and loading the base model.

Experiment: `fairseq-icl replicate` on random weights and SST-2-like data, twice in processes of their own, once for its
plan and once in earnest. Reported are the seconds and the peak memory of the whole process, and how far the plan's
estimate was from what the run took.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from fairseq_icl.api import compare, fine_tuned, observe
from fairseq_icl.bench import authors
from fairseq_icl.bench.measure import clock, seconds
from fairseq_icl.bench.report import BenchFindings, BenchRow, Limit
from fairseq_icl.bench.scoring import sample_by_length
from fairseq_icl.bench.shapes import SPECIAL_SYMBOLS, Shape
from fairseq_icl.bench.training import samples_of
from fairseq_icl.models import Model
from fairseq_icl.models.files import load_dictionary, save_random_model
from fairseq_icl.observing import Observer
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results import write_results
from fairseq_icl.training import own_copy_of_what_learns
from fairseq_icl.training.dynamics import Curve

SAMPLED_STEPS = 4
FEW_QUERIES = 100
CURVE_SHARE = 48 / 872
"""Of the queries that dynamics are measured on: the experiment's default, of SST-2's validation set."""
FIXED_OURS, FIXED_AUTHORS = ("fine-tuning", "metrics"), ("fine-tuning", "checkpoint")
"""Stages that do not depend on the number of queries; our metrics are mostly of the first 100 examples."""

TEMPLATE_WORDS = ("Sentence:", "Label:", "Negative", "Positive")
SENTENCE_WORDS = (10, 36)
"""Shortest and longest sentence; with the template a demonstration has about 26 tokens."""
TRAIN_ROWS, VALID_ROWS = 200, 872
GIBI = 2**30
MEMORY_LIMIT = 9.0
LAUNCHER = """
import os, resource, sys
status = os.spawnv(os.P_WAIT, sys.argv[1], sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\n", used.ru_maxrss, " ", used.ru_utime + used.ru_stime, sep="")
sys.exit(status)
"""
"""Linux counts the memory of whoever starts a process as the new one's: a small program must start what is measured."""
FAIRSEQ_ICL = "import sys; from fairseq_icl.commands import main; sys.exit(main())"
UNITS = {"s": 1, "min": 60, "h": 3600}


class Stopwatch:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str, scale: float = 1.0) -> Iterator[None]:
        """Add what happens inside to a stage, `scale` times."""
        start = clock()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + scale * (clock() - start)

    def total(self) -> float:
        """All stages together."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())


def measure_pipeline(findings: BenchFindings, model: Model, prompts: Prompts, sample: int) -> None:
    """Row `whole pipeline`. The authors' way runs before and after ours, and its better time counts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first call of all loads what fairseq's trainer needs, which belongs to starting a command.
        run_ours(model, replace(prompts, queries=prompts.queries[:2], finetuning=prompts.finetuning[:1]), folder)
        first = run_authors(model, prompts, folder, sample)
        mine = run_ours(model, prompts, folder)
        second = run_authors(model, prompts, folder, sample)
    prefix = seconds(lambda: Observer(model, prompts, in_context=True).prefix)
    theirs = min(first, second, key=Stopwatch.total)
    number = len(prompts.queries)
    row = BenchRow(f"whole pipeline, {number} queries", mine.total(), theirs.total())
    findings.rows.append(row)
    findings.expect_faster(row, 10, f"whole pipeline with {number} queries, times faster")
    few_mine = with_fewer_queries(mine, number, FIXED_OURS, once=prefix)
    few_theirs = with_fewer_queries(theirs, number, FIXED_AUTHORS)
    findings.notes += [
        f"Whole pipeline, seconds of ours: {mine}; of ICL the prefix takes {prefix:.1f}.",
        f"Whole pipeline, seconds of the authors' way: {theirs} "
        f"(timed on {sample} queries and {SAMPLED_STEPS} steps, scaled up).",
        "Neither way is charged for starting its commands and loading the base model. Ours records "
        "gradients while it trains.",
        f"With {FEW_QUERIES} queries, where the same fine-tuning weighs more, the pipeline would be "
        f"{few_theirs / few_mine:.1f} times faster ({few_mine:.0f} s against {few_theirs:.0f} s).",
    ]


def with_fewer_queries(watch: Stopwatch, number: int, stages: Sequence[str], once: float = 0.0) -> float:
    """Seconds with `FEW_QUERIES` instead of `number`: all shrinks but these stages and `once`, that of the prefix."""
    fixed = once + sum(watch.seconds[stage] for stage in stages)
    return fixed + (watch.total() - fixed) * FEW_QUERIES / number


def measure_dynamics(findings: BenchFindings, model: Model, prompts: Prompts) -> None:
    """Row `dynamics`: the same run with a curve over the demonstrations, on the share of queries that SST-2 has."""
    examples = max(1, round(CURVE_SHARE * len(prompts.queries)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ours(model, replace(prompts, queries=prompts.queries[:2], finetuning=prompts.finetuning[:1]), folder)
        plain, watched = run_ours(model, prompts, folder), run_ours(model, prompts, folder, examples)
    number = len(prompts.queries)
    findings.rows.append(BenchRow(f"dynamics, {examples} of {number} queries", watched.total()))
    what = f"dynamics of {len(prompts.finetuning)} demonstrations, times the plain run of {number} queries"
    findings.limits.append(Limit(what, watched.total() / plain.total(), 2.5))
    findings.notes.append(f"Dynamics, seconds: {watched}; the plain run: {plain}.")


def run_ours(model: Model, prompts: Prompts, folder: Path, curve_examples: int = 0) -> Stopwatch:
    """The functions that `fairseq-icl replicate` calls for one run; leaves results.parquet in the folder."""
    watch = Stopwatch()
    with watch.time("ZSL"):
        zsl = observe(model, prompts)
    with watch.time("ICL"):
        icl = observe(model, prompts, in_context=True)
    curve = Curve(prompts, zsl, icl, curve_examples) if curve_examples else None
    after = None if curve is None else curve.after_demonstration
    with ExitStack() as stack:
        with watch.time("fine-tuning"):
            # As the authors' way: attention to training tokens is another analysis, with records of its own.
            how: dict[str, Any] = {"lr": authors.LEARNING_RATE, "record_queries": False, "after_demonstration": after}
            tuned = stack.enter_context(fine_tuned(model, prompts, "gd", **how))
        with watch.time("FT"):
            ft = observe(tuned, prompts)
    if curve is not None:
        with watch.time("curve"):
            curve.finish(ft)
    with watch.time("metrics"):
        write_results(folder / "results.parquet", compare(prompts, zsl, icl, ft), {})
    return watch


def run_authors(model: Model, prompts: Prompts, folder: Path, sample: int) -> Stopwatch:
    """A pass each for zs, icl, fine-tuning and ftzs, with files between them, and the script of the metrics."""
    watch, path, lm = Stopwatch(), folder / "finetuned.pt", model.lm
    queries = sample_by_length(prompts.queries, sample)
    scale = len(prompts.queries) / sample
    files = {setting: folder / f"{setting}.jsonl" for setting in ("zsl", "icl", "ft")}
    with watch.time("ZSL", scale):
        authors.score_to_file(lm, queries, prompts.start, files["zsl"])
    with watch.time("ICL", scale):
        authors.score_to_file(lm, queries, prompts.context, files["icl"])
    samples = samples_of(prompts.finetuning)
    with own_copy_of_what_learns(lm):
        with watch.time("fine-tuning", len(samples) / SAMPLED_STEPS):
            step = authors.step_of(lm, "ft")
            for finetuning_sample in samples[:SAMPLED_STEPS]:
                step(finetuning_sample)
        with watch.time("checkpoint"):
            torch.save({"model": lm.decoder.state_dict()}, path)
            lm.decoder.load_state_dict(torch.load(path)["model"])
        with watch.time("FT", scale):
            authors.score_to_file(lm, queries, prompts.start, files["ft"])
    with watch.time("metrics", scale):
        authors.metrics_from_files(*files.values())
    return watch


@dataclass(frozen=True)
class CommandRun:
    """How a command went."""

    seconds: float
    """By the clock of the benchmark: processor time with a single thread, otherwise the wall clock's."""
    peak_bytes: int
    output: str


def measure_experiment(findings: BenchFindings, shape: Shape, limit: int, say: Callable[[str], None]) -> None:
    """A note and limits of an experiment with vanilla and layer-causal fine-tuning, `limit` queries scored."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(folder, shape)
        words = replicate_words(folder, shape, limit)
        shown = " ".join(["fairseq-icl", *words]).replace(name, "FOLDER")
        say(f"plan of {shown}")
        estimate = estimated_seconds(run_command([*words, "--dry-run"]).output)
        say("the same in earnest")
        taken = run_command([*words, "--quiet"])
    findings.notes.append(
        f"`{shown}` took {taken.seconds:.0f} s and {taken.peak_bytes / GIBI:.2f} GiB at its peak; its plan said "
        f"{estimate:.0f} s. FOLDER holds random weights of this shape and random sentences."
    )
    findings.limits += [
        Limit("whole experiment, peak memory in GiB", taken.peak_bytes / GIBI, MEMORY_LIMIT),
        Limit("whole experiment, error of the time in its plan", abs(estimate / taken.seconds - 1), 0.3),
    ]


def write_world(folder: Path, shape: Shape) -> None:
    """A model of random weights with its dictionary, and rows of random words in the layout of SST-2."""
    words = [f"word{number}" for number in range(shape.vocabulary - SPECIAL_SYMBOLS - len(TEMPLATE_WORDS))]
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in (*TEMPLATE_WORDS, *words)))
    save_random_model(folder / "model.pt", load_dictionary(folder / "dict.txt"), shape.sizes())
    (folder / "sst2").mkdir()
    rng = Random(1)
    for split, count in (("train", TRAIN_ROWS), ("validation", VALID_ROWS)):
        with (folder / "sst2" / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                sentence = " ".join(rng.choices(words, k=rng.randint(*SENTENCE_WORDS)))
                file.write(json.dumps({"sentence": sentence, "label": rng.randrange(2)}) + "\n")


def replicate_words(folder: Path, shape: Shape, limit: int) -> list[str]:
    """The words of the command after `fairseq-icl`."""
    return [
        "replicate",
        "experiment=deutch2024",
        f"model={folder / 'model.pt'}",
        f"model.name={shape.name}",
        "model.bpe=null",
        f"data={folder}",
        "dataset=[sst2]",
        "init=[pretrained]",
        "seed=first",
        "method=[gd,lcgd]",
        f"limit={limit}",
        f"out={folder / 'out'}",
    ]


def run_command(words: list[str]) -> CommandRun:
    """Run `fairseq-icl WORDS`; its peak memory is what the kernel counted for that process alone."""
    start = time.perf_counter()
    command = [sys.executable, "-c", LAUNCHER, sys.executable, "-c", FAIRSEQ_ICL, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"fairseq-icl {' '.join(words)} ended with exit code {done.returncode}")
    output, used = done.stdout.rstrip("\n").rsplit("\n", 1)
    peak, processor = used.split()
    taken = float(processor) if torch.get_num_threads() == 1 else time.perf_counter() - start
    return CommandRun(taken, int(peak) * 1024, output)


def estimated_seconds(plan: str) -> float:
    """The time that a printed plan expects."""
    found = re.search(r"^estimated time: ([\d.]+) (s|min|h)\b", plan, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no estimated time in the plan:\n{plan}")
    number, unit = found.groups()
    return float(number) * UNITS[unit]
