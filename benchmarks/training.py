"""Measure fine-tuning: one step of each method both ways, in turn, on the same demonstration."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.optim.sgd import SGD
from torch import Tensor

from benchmarks import authors, limits
from benchmarks.authors import Sample
from benchmarks.measure import gemm_rate, interleave
from benchmarks.report import BenchFindings, BenchRow, Limit
from benchmarks.shapes import Shape, demonstration, let_k_and_v_learn, weight_bytes
from fairseq_icl.criterions.layer_causal_ce import LayerCausalCrossEntropy
from fairseq_icl.metrics.vectors import l2_norm
from fairseq_icl.models import Model
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.prompts.encoding import FinetuningSequence
from fairseq_icl.settings import Settings
from fairseq_icl.tasks.demonstration_prompting import DemonstrationPromptingConfig, DemonstrationPromptingTask
from fairseq_icl.tasks.prompt_datasets import FinetuningDataset
from fairseq_icl.training.fine_tuning import own_copy_of_what_learns

TOKENS = 30
METHODS = {"ft": "vanilla", "lcgd": "layer-causal", "linearized": "linearized"}


def samples_of(sequences: Sequence[FinetuningSequence]) -> list[Sample]:
    """Training samples, one sequence each, as the task's dataset makes them."""
    dataset = FinetuningDataset(sequences)
    return [dataset.collater([dataset[index]]) for index in range(len(dataset))]


class TrainingSteps:
    """Our way, a step at a time: the task, the criterion and fairseq's SGD do what its trainer does in `fine_tuned`.

    The weights of `model` move, but for the linearized method, which has its own deltas.
    """

    def __init__(self, model: Model, method: str, learning_rate: float = authors.LEARNING_RATE) -> None:
        self.learner: PretrainedLM = model.lm
        if method == "linearized":
            self.learner = LinearizedLM.around(model.lm)
            let_k_and_v_learn(model.lm)  # the expansion has frozen the parameters that it shares with the model
        dictionary = model.files.load_dictionary()
        self.task = DemonstrationPromptingTask(
            DemonstrationPromptingConfig(record_queries=True), dictionary, Settings()
        )
        self.criterion: FairseqCriterion = (
            LayerCausalCrossEntropy(self.task)
            if method == "lcgd"
            else CrossEntropyCriterion(self.task, sentence_avg=False)
        )
        learning = [parameter for parameter in self.learner.parameters() if parameter.requires_grad]
        self.optimizer: Any = SGD(Namespace(lr=[learning_rate], momentum=0.0, weight_decay=0.0), learning)
        self.num_updates = 0

    def step(self, sample: Sample) -> float:
        """Forward, backward, gradients averaged over tokens, their norm, SGD; returns the loss."""
        self.optimizer.zero_grad()
        loss, sample_size, _ = self.task.train_step(
            sample, self.learner, self.criterion, self.optimizer, self.num_updates
        )
        self.optimizer.multiply_grads(1.0 / sample_size)
        self.optimizer.clip_grad_norm(0.0)
        self.task.optimizer_step(self.optimizer, self.learner, self.num_updates)
        self.num_updates += 1
        return float(loss.detach())


def measure_training(findings: BenchFindings, shape: Shape, model: Model, methods: list[str], rounds: int) -> None:
    """A row for each method; vanilla always runs along, because the others are also held against it."""
    (sample,) = samples_of([demonstration(shape, TOKENS)])
    ways: dict[str, Callable[[], float]] = {}
    # The linearized ones first: they expand around the weights as they are now.
    for method in sorted({"ft", *methods}, key=lambda method: method != "linearized"):
        ways[f"ours {method}"] = partial(TrainingSteps(model, method).step, sample)
        too_large = method == "linearized" and weight_bytes(model.lm) >= authors.LINEARIZED_LIMIT
        if method in methods and not too_large:
            ways[f"authors {method}"] = partial(authors.step_of(model.lm, method), sample)
    with own_copy_of_what_learns(model.lm):
        for way in ways.values():  # the first step is slower, and gives linearized deltas something to act on
            way()
        best = interleave(ways, rounds)
    rate = gemm_rate(shape, TOKENS)
    for method in methods:
        mine, theirs = best[f"ours {method}"], best.get(f"authors {method}")
        share = shape.training_flops(TOKENS, method) / mine / rate
        row = BenchRow(f"{METHODS[method]} step, {TOKENS} tokens", mine, theirs, gemm_share=share)
        findings.rows.append(row)
        if method in limits.STEPS:
            findings.expect_faster(row, limits.STEPS[method].at(shape.name), f"{METHODS[method]} step, times faster")
    if "lcgd" in methods:
        findings.notes.append(
            f"GEMM rates of steps are for {TOKENS} rows. Layer-causal losses multiply the rows of all layers with the "
            "vocabulary at once, which is more efficient than that."
        )
    for method, bound in (("lcgd", 2.5), ("linearized", 3.5)):
        if method in methods:
            what = f"{METHODS[method]} step, time over a vanilla step"
            findings.limits.append(Limit(what, best[f"ours {method}"] / best["ours ft"], bound))


def check_training(findings: BenchFindings, shape: Shape, model: Model, methods: list[str], steps: int = 2) -> None:
    """Both ways end in the same weights: the norm of the difference over that of the update."""
    lm = model.lm
    base = _one_vector(parameter for parameter in lm.parameters() if parameter.requires_grad)
    samples = samples_of([demonstration(shape, TOKENS, seed) for seed in range(steps)])
    for method in methods:
        if method == "linearized":
            continue
        results = []
        for step in (TrainingSteps(model, method).step, authors.step_of(lm, method)):
            with own_copy_of_what_learns(lm) as trained:
                for sample in samples:
                    step(sample)
            results.append(_one_vector(trained.values()))
        difference = l2_norm(results[0] - results[1])
        update = l2_norm(results[0] - base)
        what = f"{METHODS[method]} weights after {steps} steps, difference over update"
        findings.limits.append(Limit(what, float(difference / update), 1e-4))


def _one_vector(weights: Iterable[Tensor]) -> Tensor:
    """All the weights one after another, (their number,)."""
    return torch.cat([weight.detach().flatten() for weight in weights])
