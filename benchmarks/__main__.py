"""`python -m benchmarks`: seconds, memory and disk of our way beside the authors' way, on random weights."""

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Callable, Collection

import torch

from benchmarks import CLONE
from benchmarks.experiment import measure_experiment, measure_scale
from benchmarks.growth import measure_growth
from benchmarks.measure import measure_memory
from benchmarks.peer_runs import measure_peers
from benchmarks.profile import measure_profile
from benchmarks.report import BenchFindings
from benchmarks.scoring import measure_metrics, measure_opening, measure_scoring
from benchmarks.shapes import PUBLISHED, SHAPES, VALIDATION_SIZE, Shape, model_of, random_prompts
from benchmarks.training import METHODS, check_training, measure_training
from benchmarks.whole import measure_dynamics, measure_pipeline
from fairseq_icl.errors import UserError, exit_with

PARTS = ("zsl", "icl", "opening", "metrics", "ft", "lcgd", "linearized", "sweep", "pipeline", "dynamics", "memory")
IN_PROCESS = PARTS[:-1]
SCALE, EXPERIMENT = "scale", "experiment"
"""Runs of the command `fairseq-icl replicate`: minutes at the larger shapes, so only when asked for."""
PARTS_HELP = (
    f"any of {', '.join(PARTS)} (default: all of these), {SCALE} (fairseq-icl replicate, one seed) and {EXPERIMENT} "
    "(the same with all seeds, inits and methods of deutch2024, by one worker and by two)"
)
QUICK_VALIDATION_SIZE = 200
"""Examples that a quick run makes do with, instead of all of SST-2's validation set."""
ALL_SHAPES = "all"
DOCS = CLONE / "docs"


def main(argv: list[str]) -> int:
    """Measure, print, and return 1 if a limit was missed."""
    arguments = parse(argv)
    parts = chosen("--what", arguments.what, "part", (*PARTS, SCALE, EXPERIMENT))
    published = arguments.shape == ALL_SHAPES
    shapes = list(PUBLISHED) if published else chosen("--shape", arguments.shape, "shape", SHAPES)
    kept = True
    for shape in shapes:
        findings = run(SHAPES[shape], parts, quick=arguments.quick, peers=arguments.peers, say=say)
        print(findings.text() + "\n" * (shape != shapes[-1]), flush=True)
        if arguments.write_docs:
            findings.write(DOCS, shlex.join(["python", "-m", "benchmarks", *argv]))
        kept = kept and all(limit.kept for limit in findings.limits)
    return 0 if kept else 1


def chosen(flag: str, text: str, kind: str, known: Collection[str]) -> list[str]:
    """The names of a list with commas, each once."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {text}: no {kind} {name!r}; choose from {', '.join(known)}")
    return names


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure our way against the authors' way on a model of random weights: scoring, fine-tuning, "
        "metrics, memory. Both run in turn in one process, so that a busy machine slows them alike; on a very busy one "
        "set OMP_NUM_THREADS=1, which counts processor time instead of wall-clock time. The exit code is 1 if a figure "
        "misses its limit.",
    )
    parser.add_argument(
        "--shape",
        default="125m",
        metavar="SHAPES",
        help=f"sizes of the model, with commas between them: any of {', '.join(SHAPES)}; or {ALL_SHAPES}, which is "
        f"{','.join(PUBLISHED)} (default: 125m)",
    )
    parser.add_argument("--what", default=",".join(PARTS), metavar="PARTS", help=PARTS_HELP)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and queries: rougher figures, sooner")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also against transformers, TransformerLens and lm-evaluation-harness (those that are installed; extra "
        "[bench]), on a GPT-2 and a Llama of the same shape",
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="write each shape's part of docs/benchmark.md, and its plot"
    )
    return parser.parse_args(argv)


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run(
    shape: Shape, parts: list[str], *, quick: bool, say: Callable[[str], None], peers: bool = False
) -> BenchFindings:
    """Measure the parts one after another."""
    title = f"{shape.name} shape ({shape.layers} layers, width {shape.width}, vocabulary {shape.vocabulary:,}), fp32, "
    threads = torch.get_num_threads()
    title += "random weights, " + (
        "1 thread, processor time" if threads == 1 else f"{threads} threads, wall-clock time"
    )
    title += f" ({platform.machine()}), torch {torch.__version__}"
    findings = BenchFindings(shape.name, title + "; 32 demonstrations of about 26 tokens, queries of about 30 tokens")
    if set(parts) & set(IN_PROCESS):
        measure_in_process(findings, shape, parts, quick, say)
    if peers:
        measure_peers(findings, shape, 2 if quick else 4, 2 if quick else 4, say)
    if "memory" in parts:
        measure_memory(findings, shape, say)
    if SCALE in parts:
        measure_scale(findings, shape, 20 if quick else 100, say)
    if EXPERIMENT in parts:
        measure_experiment(findings, shape, say)
    return findings


def measure_in_process(
    findings: BenchFindings, shape: Shape, parts: list[str], quick: bool, say: Callable[[str], None]
) -> None:
    """The parts that share one model."""
    rounds, sample = (2, 2) if quick else (4, 4)
    say(f"a random model of the {shape.name} shape")
    model, prompts = model_of(shape), random_prompts(shape)
    conditions = [part for part in ("zsl", "icl") if part in parts]
    if conditions:
        say("scoring")
        measure_scoring(findings, shape, model, prompts, conditions, rounds, sample)
    if "icl" in parts:
        measure_profile(findings, shape, model, prompts)
    if "opening" in parts:
        say("queries that begin alike")
        measure_opening(findings, shape, model, rounds)
    if "metrics" in parts:
        say("metrics and records")
        measure_metrics(findings, shape, model, prompts, rounds, sample)
    methods = [method for method in METHODS if method in parts]
    if methods:
        say("fine-tuning steps")
        check_training(findings, shape, model, methods)
        measure_training(findings, shape, model, methods, 3 * rounds)
    if "sweep" in parts:
        say("cost as prompts, queries, labels, models and validation sets grow")
        measure_growth(findings, shape, model, rounds, quick)
    if "pipeline" in parts:
        say("whole pipeline")
        size = QUICK_VALIDATION_SIZE if quick else VALIDATION_SIZE
        measure_pipeline(findings, model, random_prompts(shape, num_queries=size), sample)
    if "dynamics" in parts:
        say("dynamics")
        size = QUICK_VALIDATION_SIZE if quick else VALIDATION_SIZE
        measure_dynamics(findings, model, random_prompts(shape, num_queries=size))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        exit_with(str(error))
