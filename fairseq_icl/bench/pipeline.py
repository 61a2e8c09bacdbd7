"""Measure a whole run: fine-tune, keep the checkpoint, score ZSL, ICL and FT, compute the metrics, write the results.

Neither way is charged for starting its commands and loading the base model (two commands ours, five the authors').
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fairseq_icl.bench import authors, authors_training, ours
from fairseq_icl.bench.measure import clock
from fairseq_icl.bench.report import Findings, Limit, Row
from fairseq_icl.bench.scoring import sample_by_length
from fairseq_icl.bench.shapes import Shape
from fairseq_icl.metrics.collect import Collector
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import PrefixCache, observe_queries
from fairseq_icl.prompts.build import PromptSet
from fairseq_icl.prompts.tokens import BOS
from fairseq_icl.results import write_results

SAMPLED_STEPS = 4
FEW_QUERIES = 100


class Stages:
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


def measure_pipeline(findings: Findings, shape: Shape, model: PretrainedLM, prompts: PromptSet, sample: int) -> None:
    """Row `whole pipeline`. The authors' way runs before and after ours, and its better time counts."""
    model.keep_base()
    with tempfile.TemporaryDirectory() as folder:
        first = run_authors(model, prompts, Path(folder), sample)
        mine = run_ours(shape, model, prompts, Path(folder))
        second = run_authors(model, prompts, Path(folder), sample)
    theirs = min(first, second, key=Stages.total)
    number = len(prompts.queries)
    row = Row(f"whole pipeline, {number} queries", mine.total(), theirs.total())
    findings.rows.append(row)
    findings.limits.append(Limit(f"whole pipeline with {number} queries, times faster", row.ratio, 10, at_least=True))
    few_mine, few_theirs = (with_fewer_queries(stages, number) for stages in (mine, theirs))
    findings.notes += [
        f"Whole pipeline, seconds of ours: {mine}.",
        f"Whole pipeline, seconds of the authors' way: {theirs} "
        f"(timed on {sample} queries and {SAMPLED_STEPS} steps, scaled up).",
        "Neither way is charged for starting its commands and loading the base model.",
        f"With {FEW_QUERIES} queries, where the same fine-tuning weighs more, the pipeline would be "
        f"{few_theirs / few_mine:.1f} times faster ({few_mine:.0f} s against {few_theirs:.0f} s).",
    ]


def with_fewer_queries(stages: Stages, number: int) -> float:
    """Seconds with `FEW_QUERIES` instead of `number`: all stages but those of fine-tuning and the prefix shrink."""
    fixed = ("fine-tuning", "checkpoint", "prefix")
    return sum(s if stage in fixed else s * FEW_QUERIES / number for stage, s in stages.seconds.items())


def run_ours(shape: Shape, model: PretrainedLM, prompts: PromptSet, folder: Path) -> Stages:
    """`fairseq-train`, then `fairseq-validate --criterion icl_similarity`."""
    stages, path = Stages(), folder / "trained.pt"
    with stages.time("fine-tuning"):
        training = ours.Training(shape, model, "gd")
        for sample in ours.samples_of(prompts.finetuning):
            training.step(sample)
        training.optimizer.zero_grad()
    with stages.time("checkpoint"):
        torch.save({"model": model.state_dict()}, path)
        trained = torch.load(path)["model"]
        model.reset_to_base()
        model.load_state_dict(trained)
    cache, collector = PrefixCache(), Collector()
    with stages.time("prefix"), model.base_weights():
        prefix = cache.of(model, prompts.context)
    for batch in ours.batches_of(prompts.queries):
        queries = [prompts.queries[index] for index in batch]
        with model.base_weights():
            with stages.time("ZSL"):
                zsl = observe_queries(model, queries)
            with stages.time("ICL"):
                icl = observe_queries(model, queries, context=prompts.context, prefix=prefix)
        with stages.time("FT"):
            ft = observe_queries(model, queries)
        with stages.time("metrics"):
            collector.add(batch, zsl, icl, ft)
    with stages.time("metrics"):
        write_results(folder / "results.parquet", collector.table(dataset="sst2", method="gd"), {})
    model.reset_to_base()
    return stages


def run_authors(model: PretrainedLM, prompts: PromptSet, folder: Path, sample: int) -> Stages:
    """A pass each for zs, icl, fine-tuning and ftzs, with files between them, and the script of the metrics."""
    stages, path = Stages(), folder / "finetuned.pt"
    queries = sample_by_length(prompts.queries, sample)
    scale = len(prompts.queries) / sample
    files = {setting: folder / f"{setting}.jsonl" for setting in ("zsl", "icl", "ft")}
    with stages.time("ZSL", scale):
        authors.score_to_file(model, queries, (BOS,), files["zsl"])
    with stages.time("ICL", scale):
        authors.score_to_file(model, queries, prompts.context, files["icl"])
    samples = ours.samples_of(prompts.finetuning)
    with stages.time("fine-tuning", len(samples) / SAMPLED_STEPS):
        step = authors_training.step_of(model, "ft")
        for finetuning_sample in samples[:SAMPLED_STEPS]:
            step(finetuning_sample)
    with stages.time("checkpoint"):
        torch.save({"model": model.decoder.state_dict()}, path)
        model.decoder.load_state_dict(torch.load(path)["model"])
    with stages.time("FT", scale):
        authors.score_to_file(model, queries, (BOS,), files["ft"])
    with stages.time("metrics", scale):
        authors.metrics_from_files(*files.values())
    model.reset_to_base()
    return stages
