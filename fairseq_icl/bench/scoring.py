"""Measure scoring: ZSL and ICL both ways on the same queries, the metrics with their files, and how cost grows."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from fairseq_icl.bench import authors, ours
from fairseq_icl.bench.measure import gemm_rate, interleave, seconds
from fairseq_icl.bench.report import Findings, Limit, Point, Row
from fairseq_icl.bench.shapes import Shape, random_prompts
from fairseq_icl.metrics.collect import Collector
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import Observation, PrefixCache
from fairseq_icl.observing.activations import save_activations
from fairseq_icl.prompts.build import PromptSet, Query
from fairseq_icl.prompts.tokens import BOS
from fairseq_icl.results import write_results

DEMONSTRATIONS = (8, 16, 32, 64)
QUERY_LENGTHS = (15, 30, 60, 120)
SWEEP_QUERIES = 34


def sample_by_length(queries: Sequence[Query], size: int) -> list[Query]:
    """`size` queries whose lengths are spread like those of all."""
    ordered = sorted(queries, key=lambda query: len(query.inputs[0]))
    return [ordered[(2 * i + 1) * len(ordered) // (2 * size)] for i in range(size)]


def measure_scoring(
    findings: Findings,
    shape: Shape,
    model: PretrainedLM,
    prompts: PromptSet,
    settings: Sequence[str],
    rounds: int,
    sample: int,
) -> None:
    """Rows `zsl` and `icl`: our way on all queries, the authors' on a sample whose time is scaled up."""
    sampled = sample_by_length(prompts.queries, sample)
    scale = len(prompts.queries) / sample
    for setting in settings:
        context = prompts.context if setting == "icl" else None
        cache = PrefixCache()
        ours.score(model, prompts.queries[:2], context, cache)
        best = interleave(
            {
                "ours": lambda context=context: ours.score(model, prompts.queries, context, PrefixCache()),
                "authors": lambda context=context: [authors.score(model, q, context or (BOS,)) for q in sampled],
                "queries": lambda context=context, cache=cache: ours.score(model, prompts.queries, context, cache),
            },
            rounds,
        )
        share = rate_share(shape, prompts, context, best["queries"])
        name = f"{setting.upper()} scoring, {len(prompts.queries)} queries"
        row = Row(name, ours=best["ours"], authors=scale * best["authors"], gemm_share=share)
        findings.rows.append(row)
        if setting == "icl":
            findings.limits.append(Limit("ICL scoring, times faster", row.ratio, 20, at_least=True))
            findings.limits.append(Limit("shared-prefix scoring, share of the GEMM rate", share, 0.5, at_least=True))
        difference = largest_difference(
            ours.score(model, sampled, context, PrefixCache()),
            [authors.score(model, query, context or (BOS,)) for query in sampled],
        )
        findings.limits.append(Limit(f"{setting.upper()} scoring, largest relative difference", difference, 1e-5))
    findings.notes.append(f"The authors' way was timed on {sample} queries of spread lengths and scaled up.")


def rate_share(shape: Shape, prompts: PromptSet, context: Sequence[int] | None, best: float) -> float:
    """Operations a second that scoring needs (its padding not counted) over those of bare products of as many rows."""
    tokens = sum(len(query.inputs[0]) + 1 for query in prompts.queries)
    if context is None:
        tokens += len(prompts.queries)  # BOS
    rows = round(tokens / len(ours.batches_of(prompts.queries)))
    flops = shape.scoring_flops(tokens, len(context or ()), len(prompts.queries))
    return flops / best / gemm_rate(shape, rows)


def largest_difference(seen: Observation, records: Sequence[authors.Record]) -> float:
    """max |ours - authors'| over scores, attention outputs and attention rows, each relative to its largest value."""
    differences = []
    for number, record in enumerate(records):
        length = int(seen.query_length[number])
        for mine, theirs in (
            (seen.option_logprobs[number], record["option_scores"]),
            (seen.attention_output[number], record["hidden"]),
            (seen.attention_row[number][..., -length:], record["attention"]),
            (seen.query_vector[number], record["query"]),
        ):
            theirs = torch.tensor(theirs)
            differences.append(float((mine - theirs).abs().max() / theirs.abs().max()))
        if int(seen.prediction[number]) != record["prediction"] and _is_clear(record):
            differences.append(float("inf"))
    return max(differences)


def _is_clear(record: authors.Record) -> bool:
    """Whether the two best options are further apart than rounding."""
    best, second = sorted(record["option_scores"], reverse=True)[:2]
    return best - second > 1e-5 * abs(best)


def measure_metrics(
    findings: Findings, shape: Shape, model: PretrainedLM, prompts: PromptSet, rounds: int, sample: int
) -> None:
    """Row `metrics`: from what scoring saw to all numbers on disk, and the bytes written an example."""
    sampled = sample_by_length(prompts.queries, sample)
    records = {
        setting: [authors.score(model, query, context) for query in sampled]
        for setting, context in (("zsl", (BOS,)), ("icl", prompts.context))
    }
    zsl, icl = (ours.score(model, prompts.queries, c, PrefixCache(), True) for c in (None, prompts.context))
    model.keep_base()
    ours.Training(shape, model, "gd").step(ours.samples_of(prompts.finetuning[:1])[0])
    ft = ours.score(model, prompts.queries, None, PrefixCache(), True)
    records["ft"] = [authors.score(model, query) for query in sampled]
    model.reset_to_base()
    with tempfile.TemporaryDirectory() as folder:
        files = {setting: Path(folder) / f"{setting}.jsonl" for setting in records}
        table = Path(folder) / "results.parquet"
        best = interleave(
            {
                "ours": lambda: write_table(zsl, icl, ft, table),
                "authors": lambda: write_and_read_records(records, files),
            },
            rounds,
        )
        disk = sum(file.stat().st_size for file in files.values()) / sample
        ours_disk = table.stat().st_size / len(prompts.queries)
        save_activations(Path(folder) / "all.safetensors", torch.arange(len(zsl)), {"zsl": zsl, "icl": icl, "ft": ft})
        all_disk = (Path(folder) / "all.safetensors").stat().st_size / len(prompts.queries)
    authors_seconds = best["authors"] * len(prompts.queries) / sample
    name = f"metrics and records, {len(prompts.queries)} queries"
    findings.rows.append(Row(name, best["ours"], authors_seconds, ours_disk=ours_disk, authors_disk=disk))
    findings.rows.append(Row("the same, and every activation saved", ours_disk=ours_disk + all_disk, authors_disk=disk))
    findings.limits += [
        Limit("bytes written an example, share of the authors'", ours_disk / disk, 0.1),
        Limit("the same with --save-activations", (ours_disk + all_disk) / disk, 0.1),
    ]


def write_table(zsl: Observation, icl: Observation, ft: Observation, path: Path) -> None:
    """Our way from observations to the results file."""
    collector = Collector()
    collector.add(range(len(zsl)), zsl, icl, ft)
    write_results(path, collector.table(dataset="sst2", method="gd"), {})


def write_and_read_records(records: Mapping[str, Sequence[authors.Record]], files: Mapping[str, Path]) -> None:
    """The authors' way from the observations of each setting to the metrics."""
    for setting, file in files.items():
        file.write_text("".join(json.dumps(record) + "\n" for record in records[setting]))
    authors.metrics_from_files(**files)


def measure_growth(findings: Findings, shape: Shape, model: PretrainedLM, rounds: int) -> None:
    """Cost a query from 8 to 64 demonstrations, and for queries of 15 to 120 tokens after 32 demonstrations."""
    sizes = [("demonstrations", k, k, 30) for k in DEMONSTRATIONS]
    sizes += [("tokens in a query", length, 32, length) for length in QUERY_LENGTHS]
    ways: dict[str, Callable[[], object]] = {}
    prefix_seconds: dict[str, float] = {}
    all_prompts: dict[str, PromptSet] = {}
    for sweep, x, k, length in sizes:
        prompts = random_prompts(shape, num_demonstrations=k, query_tokens=length, num_queries=SWEEP_QUERIES)
        cache, key = PrefixCache(), f"{x} {sweep}"
        prefix_seconds[key] = seconds(partial(cache.of, model, prompts.context))
        all_prompts[key] = prompts
        ways[f"ours {key}"] = partial(ours.score, model, prompts.queries, prompts.context, cache)
        ways[f"authors {key}"] = partial(authors.score, model, sample_by_length(prompts.queries, 1)[0], prompts.context)
    best = interleave(ways, rounds)
    for sweep, x, _, _ in sizes:
        key = f"{x} {sweep}"
        times = prefix_seconds[key], best[f"ours {key}"] / SWEEP_QUERIES, best[f"authors {key}"]
        findings.points.append(Point(sweep, x, len(all_prompts[key].context), *times))
    costs = [point.ours for point in findings.points if point.sweep == "demonstrations"]
    mean = sum(costs) / len(costs)
    spread = max(abs(cost / mean - 1) for cost in costs)
    findings.limits.append(Limit("cost a query from 8 to 64 demonstrations, deviation from its mean", spread, 0.25))
    findings.notes.append(
        f"A query costs {costs[-1] / costs[0]:.2f} times as much after 64 demonstrations as after 8; the limit is on "
        "the deviation from the mean of the four. At the 125m shape the operations alone grow by a factor of 1.3, "
        "because every query token attends to seven times as many."
    )
