"""Measure fine-tuning: one step of each method both ways, in turn, on the same demonstration."""

from functools import partial

import torch

from fairseq_icl.bench import authors_training, ours
from fairseq_icl.bench.measure import gemm_rate, interleave
from fairseq_icl.bench.report import Findings, Limit, Row
from fairseq_icl.bench.shapes import Shape, demonstration, random_model, weight_bytes
from fairseq_icl.models.pretrained_lm import PretrainedLM

TOKENS = 30
METHODS = {"ft": "vanilla", "lcgd": "layer-causal", "linearized": "linearized"}
LIMITS = {"ft": 1.3, "lcgd": 2.0}


def measure_training(findings: Findings, shape: Shape, model: PretrainedLM, methods: list[str], rounds: int) -> None:
    """A row for each method; vanilla always runs along, because the others are also held against it."""
    (sample,) = ours.samples_of([demonstration(shape, TOKENS)])
    ways = {"ours ft": partial(ours.Training(shape, model, "gd").step, sample)}
    for method in methods:
        if method == "linearized":
            linearized = ours.linearized(random_model(shape))
            ways["ours linearized"] = partial(ours.Training(shape, linearized, method).step, sample)
        elif method == "lcgd":
            ways["ours lcgd"] = partial(ours.Training(shape, model, method).step, sample)
        if method != "linearized" or weight_bytes(model) < authors_training.LINEARIZED_LIMIT:
            ways[f"authors {method}"] = partial(authors_training.step_of(model, method), sample)
    for way in ways.values():  # the first step is slower, and gives linearized deltas something to act on
        way()
    best = interleave(ways, rounds)
    rate = gemm_rate(shape, TOKENS)
    for method in methods:
        mine, theirs = best[f"ours {method}"], best.get(f"authors {method}")
        share = shape.training_flops(TOKENS, method) / mine / rate
        row = Row(f"{METHODS[method]} step, {TOKENS} tokens", mine, theirs, gemm_share=share)
        findings.rows.append(row)
        if method in LIMITS:
            what = f"{METHODS[method]} step, times faster"
            findings.limits.append(Limit(what, row.ratio, LIMITS[method], at_least=True))
    if "lcgd" in methods:
        findings.notes.append(
            f"GEMM rates of steps are for {TOKENS} rows. Layer-causal losses multiply the rows of all layers with the "
            "vocabulary at once, which is more efficient than that."
        )
    for method, bound in (("lcgd", 2.5), ("linearized", 3.5)):
        if method in methods:
            what = f"{METHODS[method]} step, time over a vanilla step"
            findings.limits.append(Limit(what, best[f"ours {method}"] / best["ours ft"], bound))


def check_training(findings: Findings, shape: Shape, model: PretrainedLM, methods: list[str], steps: int = 2) -> None:
    """Both ways end in the same weights: the norm of the difference over that of the update."""
    model.keep_base()
    base = _trained(model)
    samples = ours.samples_of([demonstration(shape, TOKENS, seed) for seed in range(steps)])
    for method in methods:
        if method == "linearized":
            continue
        results = []
        for step in (ours.Training(shape, model, method).step, authors_training.step_of(model, method)):
            for sample in samples:
                step(sample)
            results.append(_trained(model))
            model.reset_to_base()
        difference = torch.linalg.vector_norm(results[0] - results[1])
        update = torch.linalg.vector_norm(results[0] - base)
        what = f"{METHODS[method]} weights after {steps} steps, difference over update"
        findings.limits.append(Limit(what, float(difference / update), 1e-4))


def _trained(model: PretrainedLM) -> torch.Tensor:
    """All weights that learn, in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters() if parameter.requires_grad])
