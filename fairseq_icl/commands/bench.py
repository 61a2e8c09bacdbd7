"""`fairseq-icl bench`: seconds, memory and disk of our way beside the authors' way, on random weights."""

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Callable

import torch

from fairseq_icl.bench.measure import measure_memory
from fairseq_icl.bench.peers import measure_peers
from fairseq_icl.bench.report import BenchFindings
from fairseq_icl.bench.scoring import measure_growth, measure_metrics, measure_scoring
from fairseq_icl.bench.shapes import SHAPES, Shape, model_of, random_prompts
from fairseq_icl.bench.training import METHODS, check_training, measure_training
from fairseq_icl.bench.whole import measure_dynamics, measure_experiment, measure_pipeline
from fairseq_icl.errors import UserError
from fairseq_icl.files import PACKAGE

PARTS = ("zsl", "icl", "metrics", "ft", "lcgd", "linearized", "sweep", "pipeline", "dynamics", "memory")
IN_PROCESS = PARTS[:-1]
SCALE = "scale"
"""A whole experiment by the command `fairseq-icl replicate`: minutes at the larger shapes, so only when asked for."""
PARTS_HELP = f"any of {', '.join(PARTS)} (default: all of these), {SCALE} (a whole experiment by fairseq-icl replicate)"
VALIDATION_SIZE, QUICK_VALIDATION_SIZE = 872, 200
"""Examples in SST-2's validation set, and what a quick run makes do with."""
DOCS = PACKAGE.parent / "docs"


def main(argv: list[str]) -> int:
    """Measure, print, and return 1 if a limit was missed."""
    arguments = parse(argv)
    parts = arguments.what.split(",")
    unknown = [part for part in parts if part not in (*PARTS, SCALE)]
    if unknown:
        raise UserError(f"--what {arguments.what}: no part {unknown[0]!r}; choose from {', '.join((*PARTS, SCALE))}")
    if arguments.write_docs and not DOCS.is_dir():
        raise UserError(f"--write-docs: {DOCS} is not there; run it in a clone of the repository")
    findings = run(SHAPES[arguments.shape], parts, quick=arguments.quick, peers=arguments.peers, say=say)
    print(findings.text())
    if arguments.write_docs:
        findings.write(DOCS, shlex.join(["fairseq-icl", "bench", *argv]))
    return 0 if all(limit.kept for limit in findings.limits) else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="fairseq-icl bench",
        description="Measure our way against the authors' way on a model of random weights: scoring, fine-tuning, "
        "metrics, memory. Both run in turn in one process, so that a busy machine slows them alike; on a very busy one "
        "set OMP_NUM_THREADS=1, which counts processor time instead of wall-clock time. The exit code is 1 if a figure "
        "misses its limit.",
    )
    parser.add_argument("--shape", choices=SHAPES, default="125m", help="size of the model (default: 125m)")
    parser.add_argument("--what", default=",".join(PARTS), metavar="PARTS", help=PARTS_HELP)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and queries: rougher figures, sooner")
    parser.add_argument(
        "--peers", action="store_true", help="also against transformers, on a GPT-2 and a Llama of the same shape"
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="write the shape's part of docs/benchmark.md, and its plot"
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
        measure_experiment(findings, shape, 20 if quick else 100, say)
    return findings


def measure_in_process(
    findings: BenchFindings, shape: Shape, parts: list[str], quick: bool, say: Callable[[str], None]
) -> None:
    """The parts that share one model."""
    rounds, sample = (2, 2) if quick else (4, 4)
    say(f"a random model of the {shape.name} shape")
    model, prompts = model_of(shape), random_prompts(shape)
    settings = [part for part in ("zsl", "icl") if part in parts]
    if settings:
        say("scoring")
        measure_scoring(findings, shape, model, prompts, settings, rounds, sample)
    if "metrics" in parts:
        say("metrics and records")
        measure_metrics(findings, shape, model, prompts, rounds, sample)
    methods = [method for method in METHODS if method in parts]
    if methods:
        say("fine-tuning steps")
        check_training(findings, shape, model, methods)
        measure_training(findings, shape, model, methods, 3 * rounds)
    if "sweep" in parts:
        say("cost a query as prompts and queries grow")
        measure_growth(findings, shape, model, rounds)
    if "pipeline" in parts:
        say("whole pipeline")
        size = QUICK_VALIDATION_SIZE if quick else VALIDATION_SIZE
        measure_pipeline(findings, model, random_prompts(shape, num_queries=size), sample)
    if "dynamics" in parts:
        say("dynamics")
        size = QUICK_VALIDATION_SIZE if quick else VALIDATION_SIZE
        measure_dynamics(findings, model, random_prompts(shape, num_queries=size))
