"""Measure peak memory above the weights, every case in a process of its own.

That process is `python -m fairseq_icl.bench.memory SHAPE CASE WAY`.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from fairseq_icl.bench import authors, authors_training, ours
from fairseq_icl.bench.measure import peak_bytes_of
from fairseq_icl.bench.report import Findings, Limit, Row
from fairseq_icl.bench.shapes import SHAPES, Shape, demonstration, random_model, random_prompts, weight_bytes
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import PrefixCache

WARM_UP_TOKENS = 2
CASES = {
    "zsl": "ZSL scoring",
    "icl": "ICL scoring",
    "ft_30": "vanilla step, 30 tokens",
    "lcgd_30": "layer-causal step, 30 tokens",
    "ft_300": "vanilla step, 300 tokens",
    "linearized_300": "linearized step, 300 tokens",
}
"""Scoring of a validation set, and one fine-tuning step on a demonstration of so many tokens."""


@dataclass(frozen=True)
class Peak:
    """Bytes."""

    weights: int
    above: int
    """The most that was in memory beside the weights, gradients included."""


def measure_memory(findings: Findings, shape: Shape, say: Callable[[str], None]) -> None:
    """A row for each case, and the limits between them."""
    above = {}
    for case, name in CASES.items():
        say(f"memory: {name}")
        mine = peak_of(shape, case, "ours")
        runs = not case.startswith("linearized") or mine.weights < authors_training.LINEARIZED_LIMIT
        theirs = peak_of(shape, case, "authors").above if runs else None
        above[case] = mine.above
        findings.rows.append(Row(f"{name}: memory", ours_memory=mine.above, authors_memory=theirs))
    findings.limits += [
        Limit("ICL scoring, memory with the weights over the weights", 1 + above["icl"] / mine.weights, 1.6),
        Limit("layer-causal step, memory over a vanilla step", above["lcgd_30"] / above["ft_30"], 1.0),
        Limit("linearized step, memory over a vanilla step", above["linearized_300"] / above["ft_300"], 2.2),
    ]


def peak_of(shape: Shape, case: str, way: str) -> Peak:
    """Measure one case in a new process, whose memory nothing else has touched."""
    command = [sys.executable, "-m", "fairseq_icl.bench.memory", shape.name, case, way]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return Peak(**json.loads(result.stdout.splitlines()[-1]))


def main(argv: list[str]) -> None:
    """Build the model, warm up on a few tokens so that libraries have what they keep, measure, print JSON."""
    shape, case, way = SHAPES[argv[0]], argv[1], argv[2]
    model = random_model(shape)
    weights = weight_bytes(model)
    run = (scoring if case in ("icl", "zsl") else training)(shape, model, case, way)
    run(True)
    above = peak_bytes_of(lambda: run(False))
    print(json.dumps({"weights": weights, "above": above}))


def scoring(shape: Shape, model: PretrainedLM, case: str, way: str) -> Callable[[bool], None]:
    """Score queries, few and short ones to warm up."""

    def run(warm_up: bool) -> None:
        prompts = random_prompts(shape, num_demonstrations=1 if warm_up else 32, num_queries=1 if warm_up else 40)
        context = prompts.context if case == "icl" else None
        if way == "ours":
            ours.score(model, prompts.queries, context, PrefixCache())
        else:
            authors.score(model, prompts.queries[-1], context or prompts.context[:1])

    return run


def training(shape: Shape, model: PretrainedLM, case: str, way: str) -> Callable[[bool], None]:
    """One fine-tuning step, on few tokens to warm up. The first moves the weights, so linearized tangents exist."""
    method, tokens = case.rsplit("_", 1)
    if way == "ours":
        model = ours.linearized(model) if method == "linearized" else model
        steps = ours.Training(shape, model, method)
        step, forget = steps.step, steps.optimizer.zero_grad
    else:
        step, forget = authors_training.step_of(model, method), lambda: None

    def run(warm_up: bool) -> None:
        (sample,) = ours.samples_of([demonstration(shape, WARM_UP_TOKENS if warm_up else int(tokens))])
        step(sample)
        if warm_up:
            forget()

    return run


if __name__ == "__main__":
    main(sys.argv[1:])
