"""Seconds, the machine's own speed, and peak memory above the weights.

Memory is measured in a process of its own for every case: `python -m benchmarks.measure SHAPE CASE WAY`.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import authors, last_line_of
from benchmarks.operations import like_feed_forward
from benchmarks.report import BenchFindings, BenchRow, Limit
from benchmarks.shapes import SHAPES, Shape, demonstration, model_of, random_prompts, weight_bytes
from fairseq_icl.api import observe
from fairseq_icl.files import give_back_memory
from fairseq_icl.models import Model

GEMM_FLOPS = 2e11
"""Operations spent on measuring the rate of matrix products: a few seconds."""
WARM_UP_TOKENS = 2
MEMORY_CASES = {
    "zsl": "ZSL scoring",
    "icl": "ICL scoring",
    "ft_30": "vanilla step, 30 tokens",
    "lcgd_30": "layer-causal step, 30 tokens",
    "ft_300": "vanilla step, 300 tokens",
    "linearized_300": "linearized step, 300 tokens",
}
"""Scoring of a validation set, and one fine-tuning step on a demonstration of so many tokens."""


def interleave(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best seconds of each way: all run once a round, so that a busy machine slows them alike.

    The best and not the mean, because whatever else the machine does can only add.
    """
    best = dict.fromkeys(ways, float("inf"))
    gc.collect()
    for _ in range(rounds):
        for name, way in ways.items():
            best[name] = min(best[name], seconds(way))
    return best


def seconds(way: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = clock()
    way()
    return clock() - start


def clock() -> float:
    """Wall-clock time; with a single thread (OMP_NUM_THREADS=1) processor time, which other programs hardly disturb."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@torch.no_grad()
def gemm_rate(shape: Shape, rows: int) -> float:
    """Floating-point operations per second of bare fp32 matrix products: `rows` tokens through a feed-forward block."""
    flops, products = like_feed_forward(shape.decoder, rows, torch.empty(0))
    rounds = int(min(50, max(4, GEMM_FLOPS / flops / len(products))))
    best = interleave({str(number): product for number, product in enumerate(products)}, rounds)
    return flops * len(products) / sum(best.values())


@dataclass(frozen=True)
class Peak:
    """Bytes."""

    weights: int
    above: int
    """The most that was in memory beside the weights, gradients included."""


def measure_memory(findings: BenchFindings, shape: Shape, say: Callable[[str], None]) -> None:
    """A row for each case, and the limits between them."""
    above: dict[str, int] = {}
    weights = 0
    for case, name in MEMORY_CASES.items():
        say(f"memory: {name}")
        mine = peak_of(shape, case, "ours")
        runs = not case.startswith("linearized") or mine.weights < authors.LINEARIZED_LIMIT
        theirs = peak_of(shape, case, "authors").above if runs else None
        above[case], weights = mine.above, mine.weights
        findings.rows.append(BenchRow(f"{name}: memory", ours_memory=mine.above, authors_memory=theirs))
    findings.limits += [
        Limit("ICL scoring, memory with the weights over the weights", 1 + above["icl"] / weights, 1.6),
        Limit("layer-causal step, memory over a vanilla step", above["lcgd_30"] / above["ft_30"], 1.0),
        Limit("linearized step, memory over a vanilla step", above["linearized_300"] / above["ft_300"], 2.2),
    ]


def peak_of(shape: Shape, case: str, way: str) -> Peak:
    """Measure one case in a new process, whose memory nothing else has touched; `shape` is one of `SHAPES`."""
    return Peak(**json.loads(last_line_of("measure", shape.name, case, way)))


def main(argv: list[str]) -> None:
    """Build the model, warm up on a few tokens so that libraries have what they keep, measure, print JSON."""
    shape, case, way = SHAPES[argv[0]], argv[1], argv[2]
    model = model_of(shape)
    weights = weight_bytes(model.lm)
    run = (_scoring if case in ("icl", "zsl") else _training)(shape, model, case, way)
    run(True)
    above = peak_bytes_of(lambda: run(False))
    print(json.dumps({"weights": weights, "above": above}))


def _scoring(shape: Shape, model: Model, case: str, way: str) -> Callable[[bool], None]:
    """Score queries, few and short ones to warm up."""

    def run(warm_up: bool) -> None:
        prompts = random_prompts(shape, num_demonstrations=1 if warm_up else 32, num_queries=1 if warm_up else 40)
        if way == "ours":
            observe(model, prompts, in_context=case == "icl")
        else:
            authors.score(model.lm, prompts.queries[-1], prompts.context if case == "icl" else prompts.start)

    return run


def _training(shape: Shape, model: Model, case: str, way: str) -> Callable[[bool], None]:
    """One fine-tuning step, on few tokens to warm up. The first moves the weights, so linearized tangents exist."""
    from benchmarks.training import TrainingSteps, samples_of  # which measures with what is above

    method, tokens = case.rsplit("_", 1)
    steps = TrainingSteps(model, method) if way == "ours" else None
    step = steps.step if steps is not None else authors.step_of(model.lm, method)

    def run(warm_up: bool) -> None:
        (sample,) = samples_of([demonstration(shape, WARM_UP_TOKENS if warm_up else int(tokens))])
        step(sample)
        if warm_up and steps is not None:
            steps.optimizer.zero_grad()

    return run


def peak_bytes_of(way: Callable[[], object]) -> int:
    """How far the resident memory of this process rises above its present size while `way` runs (Linux)."""
    gc.collect()
    give_back_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    way()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """A memory figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


if __name__ == "__main__":
    main(sys.argv[1:])
