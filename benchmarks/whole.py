"""Measure one whole run both ways: fine-tune, score ZSL, ICL and FT, compute the metrics, write the results.

Neither way is charged for starting its commands and loading the base model.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import authors, limits
from benchmarks.measure import clock, seconds
from benchmarks.report import BenchFindings, BenchRow, Limit
from benchmarks.scoring import sample_by_length
from benchmarks.shapes import VALIDATION_SIZE
from benchmarks.training import samples_of
from fairseq_icl.api import compare, fine_tuned, observe
from fairseq_icl.models import Model
from fairseq_icl.observing import Observer
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.results import write_results
from fairseq_icl.training.dynamics import Curve
from fairseq_icl.training.fine_tuning import own_copy_of_what_learns

SAMPLED_STEPS = 4
ROUNDS = 2
FEW_QUERIES = 100
CURVE_SHARE = 48 / VALIDATION_SIZE
"""Of the queries that dynamics are measured on: the experiment's default, of SST-2's validation set."""
FIXED_OURS, FIXED_AUTHORS = ("fine-tuning", "metrics"), ("fine-tuning", "checkpoint")
"""Stages that do not depend on the number of queries; our metrics are mostly of the first 100 examples."""


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

    @classmethod
    def best(cls, watches: Sequence["Stopwatch"]) -> "Stopwatch":
        """The shortest time of every stage: whatever else the machine does can only add."""
        watch = cls()
        for stage in watches[0].seconds:
            watch.seconds[stage] = min(one.seconds[stage] for one in watches)
        return watch

    def total(self) -> float:
        """All stages together."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())


def measure_pipeline(findings: BenchFindings, model: Model, prompts: Prompts, sample: int) -> None:
    """Row `whole pipeline`: both ways in turn, of each stage the best time of either."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first call of all loads what fairseq's trainer needs, which belongs to starting a command.
        run_ours(model, replace(prompts, queries=prompts.queries[:2], finetuning=prompts.finetuning[:1]), folder)
        runs = [(run_authors(model, prompts, folder, sample), run_ours(model, prompts, folder)) for _ in range(ROUNDS)]
    prefix = seconds(lambda: Observer(model, prompts, in_context=True).prefix)
    theirs, mine = (Stopwatch.best(watches) for watches in zip(*runs, strict=True))
    number = len(prompts.queries)
    row = BenchRow(f"whole pipeline, {number} queries", mine.total(), theirs.total())
    findings.rows.append(row)
    least = limits.PIPELINE.at(findings.shape) if number >= VALIDATION_SIZE else limits.PIPELINE.otherwise
    findings.expect_faster(row, least, f"whole pipeline with {number} queries, times faster")
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
    files = {condition: folder / f"{condition}.jsonl" for condition in ("zsl", "icl", "ft")}
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
