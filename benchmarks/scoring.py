"""Measure scoring: ZSL and ICL both ways on the same queries, and the metrics with their files."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import authors, limits
from benchmarks.measure import gemm_rate, interleave
from benchmarks.report import BenchFindings, BenchRow, Limit
from benchmarks.shapes import PUBLISHED, Shape, random_prompts
from fairseq_icl.api import compare, fine_tuned, observe
from fairseq_icl.models import Model
from fairseq_icl.observing import Observation, Observer
from fairseq_icl.observing.layout import plan_batches
from fairseq_icl.observing.saved import save_observations
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import Query
from fairseq_icl.results import write_results

AGNEWS_TOKENS, AGNEWS_OPENING = 75, 20
"""Mean length of an AGNews query with its template, and the tokens of the template's instruction."""


def sample_by_length(queries: Sequence[Query], size: int) -> list[Query]:
    """`size` queries whose lengths are spread like those of all."""
    ordered = sorted(queries, key=lambda query: len(query.inputs[0]))
    return [ordered[(2 * i + 1) * len(ordered) // (2 * size)] for i in range(size)]


def run_batches(observer: Observer) -> list[Observation]:
    """`observe` with an observer of one's own: its prefix, once there, does not run again. A batch an observation."""
    queries = observer.prompts.queries
    return [observer([queries[index] for index in batch]) for batch in plan_batches(queries)]


def score_all(model: Model, queries: Sequence[Query], context: Sequence[int]) -> list[authors.AuthorsRecord]:
    """The authors' way under the model's weights, one record a query."""
    return model.evaluate(lambda: [authors.score(model.lm, query, context) for query in queries])


def measure_scoring(
    findings: BenchFindings,
    shape: Shape,
    model: Model,
    prompts: Prompts,
    conditions: Sequence[str],
    rounds: int,
    sample: int,
) -> None:
    """Rows `zsl` and `icl`: our way on all queries, the authors' on a sample whose time is scaled up."""
    sampled = sample_by_length(prompts.queries, sample)
    scale = len(prompts.queries) / sample
    for condition in conditions:
        in_context = condition == "icl"
        observer = Observer(model, prompts, in_context=in_context)
        shallow = Observer(model, prompts, in_context=in_context, by_depth=False)
        theirs = partial(score_all, model, sampled, observer.context)
        for one in (observer, shallow):
            one(prompts.queries[:2])  # the prefix is there
        ways: dict[str, Callable[[], object]] = {
            "ours": partial(observe, model, prompts, in_context=in_context),
            "authors": theirs,
            "queries": partial(run_batches, observer),
            "not by depth": partial(run_batches, shallow),
        }
        best = interleave(ways, rounds)
        share = rate_share(shape, prompts, in_context, best["queries"])
        name = f"{condition.upper()} scoring, {len(prompts.queries)} queries"
        row = BenchRow(name, ours=best["ours"], authors=scale * best["authors"], gemm_share=share)
        findings.rows.append(row)
        if in_context:
            findings.expect_faster(row, limits.ICL_SCORING.at(shape.name), "ICL scoring, times faster")
            least = limits.GEMM_SHARE.at(shape.name)
            findings.limits.append(Limit("shared-prefix scoring, share of the GEMM rate", share, least, at_least=True))
        extra = best["queries"] / best["not by depth"] - 1
        findings.limits.append(Limit(f"{condition.upper()} scoring, share that accuracy by depth adds", extra, 0.05))
        mine = observe(model, replace(prompts, queries=tuple(sampled)), in_context=in_context)
        what = f"{condition.upper()} scoring, largest relative difference"
        findings.limits.append(Limit(what, largest_difference(mine, theirs()), 1e-5))
    findings.notes.append(f"The authors' way was timed on {sample} queries of spread lengths and scaled up.")


def measure_opening(findings: BenchFindings, shape: Shape, model: Model, rounds: int) -> None:
    """Rows `opening`: queries as long as AGNews', with an instruction that all share, and with the same text unshared.

    One query that begins otherwise is enough for nothing to be shared.
    """
    plain = random_prompts(shape, num_demonstrations=8, query_tokens=AGNEWS_TOKENS - AGNEWS_OPENING, num_queries=16)
    opening = plain.context[-AGNEWS_OPENING:]
    queries = [replace(query, inputs=((*opening, *query.inputs[0]),) * 2) for query in plain.queries]
    other = replace(queries[0], inputs=((opening[-1] ^ 1, *queries[0].inputs[0][1:]),) * 2)
    shared, unshared = (replace(plain, queries=(first, *queries[1:])) for first in (queries[0], other))
    for in_context in (False, True):
        observers = [Observer(model, prompts, in_context=in_context) for prompts in (shared, unshared)]
        assert [len(observer.opening) >= AGNEWS_OPENING for observer in observers] == [True, False]
        for observer in observers:
            observer(observer.prompts.queries[:1])  # what is shared is there
        best = interleave({str(n): partial(run_batches, observer) for n, observer in enumerate(observers)}, rounds)
        name = f"{'ICL' if in_context else 'ZSL'} scoring, {AGNEWS_OPENING} of {AGNEWS_TOKENS} tokens shared (AGNews)"
        row = BenchRow(f"{name}, against none shared", best["0"], best["1"])
        findings.rows.append(row)
        if shape.name in PUBLISHED:  # in a tiny model tokens cost less than calls
            findings.expect_faster(row, limits.OPENING, f"{name}, times faster than none shared")


def rate_share(shape: Shape, prompts: Prompts, in_context: bool, best: float) -> float:
    """Operations a second that scoring needs (its padding not counted) over those of bare products of as many rows."""
    tokens = sum(len(query.inputs[0]) + 1 for query in prompts.queries)
    rows = round(tokens / len(plan_batches(prompts.queries)))
    flops = shape.scoring_flops(tokens, len(prompts.context) if in_context else 0, len(prompts.queries))
    return flops / best / gemm_rate(shape, rows)


def largest_difference(seen: Observation, records: Sequence[authors.AuthorsRecord]) -> float:
    """max |ours - authors'| over scores, attention outputs and attention rows, each relative to its largest value."""
    differences = []
    for number, record in enumerate(records):
        length = int(seen.query_length[number])
        for mine, recorded in (
            (seen.option_logprobs[number], record["option_scores"]),
            (seen.attention_output[number], record["hidden"]),
            (seen.attention_row[number][..., -length:], record["attention"]),
            (seen.query_vector[number], record["query"]),
        ):
            theirs = torch.tensor(recorded)
            differences.append(float((mine - theirs).abs().max() / theirs.abs().max()))
        if int(seen.prediction[number]) != record["prediction"] and _is_clear(record):
            differences.append(float("inf"))
    return max(differences)


def _is_clear(record: authors.AuthorsRecord) -> bool:
    """Whether the two best options are further apart than rounding."""
    best, second = sorted(record["option_scores"], reverse=True)[:2]
    return bool(best - second > 1e-5 * abs(best))


def measure_metrics(
    findings: BenchFindings, shape: Shape, model: Model, prompts: Prompts, rounds: int, sample: int
) -> None:
    """Row `metrics`: from what scoring saw to all numbers on disk, and the bytes written an example."""
    sampled = sample_by_length(prompts.queries, sample)
    zsl, icl = observe(model, prompts), observe(model, prompts, in_context=True)
    records = {
        "zsl": score_all(model, sampled, prompts.start),
        "icl": score_all(model, sampled, prompts.context),
    }
    one_step = replace(prompts, finetuning=prompts.finetuning[:1])
    with fine_tuned(model, one_step, "gd", lr=authors.LEARNING_RATE) as tuned:
        # The authors' records have no query vectors of training, so the metrics made of them are left out here.
        ft = replace(observe(tuned, prompts), training_queries=None)
        records["ft"] = score_all(tuned, sampled, prompts.start)
    with tempfile.TemporaryDirectory() as folder:
        files = {condition: Path(folder) / f"{condition}.jsonl" for condition in records}
        table, activations = Path(folder) / "results.parquet", Path(folder) / "all.safetensors"
        best = interleave(
            {
                "ours": lambda: write_results(table, compare(prompts, zsl, icl, ft), {}),
                "authors": lambda: write_and_read_records(records, files),
            },
            rounds,
        )
        disk = sum(file.stat().st_size for file in files.values()) / sample
        ours_disk = table.stat().st_size / len(prompts.queries)
        save_observations(activations, {"zsl": zsl, "icl": icl, "ft": ft}, precision="half")
        all_disk = activations.stat().st_size / len(prompts.queries)
    authors_seconds = best["authors"] * len(prompts.queries) / sample
    name = f"metrics and records, {len(prompts.queries)} queries"
    everything = "the same, and every activation saved"
    findings.rows += [
        BenchRow(name, best["ours"], authors_seconds, ours_disk=ours_disk, authors_disk=disk),
        BenchRow(everything, ours_disk=ours_disk + all_disk, authors_disk=disk),
    ]
    findings.limits += [
        Limit("bytes written an example, share of the authors'", ours_disk / disk, 0.1),
        Limit("the same with --save-activations", (ours_disk + all_disk) / disk, 0.1),
    ]


def write_and_read_records(records: Mapping[str, Sequence[authors.AuthorsRecord]], files: Mapping[str, Path]) -> None:
    """The authors' way from the observations of each condition to the metrics."""
    for condition, file in files.items():
        file.write_text("".join(json.dumps(record) + "\n" for record in records[condition]))
    authors.metrics_from_files(**files)
