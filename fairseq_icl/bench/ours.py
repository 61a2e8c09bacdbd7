"""Our way, through the functions that `fairseq-train` and `fairseq-validate` run with this plugin."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.optim.sgd import SGD
from torch import nn

from fairseq_icl.bench.authors_training import LEARNING_RATE
from fairseq_icl.bench.shapes import Shape, dictionary_of
from fairseq_icl.criterions.layer_causal_ce import LayerCausalCrossEntropy
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import MAX_TOKENS, Observation, PrefixCache, concatenate, observe_queries
from fairseq_icl.prompts.build import FinetuningSequence, Query
from fairseq_icl.reading import Reading
from fairseq_icl.tasks.demonstration_prompting import DemonstrationPromptingTask
from fairseq_icl.tasks.prompt_datasets import FinetuningDataset, QueryDataset
from fairseq_icl.tasks.prompting_config import DemonstrationPromptingConfig

Sample = dict[str, Any]


def batches_of(queries: Sequence[Query]) -> list[list[int]]:
    """Indices of the queries in the batches that `fairseq-validate` makes of them."""
    dataset = QueryDataset(queries)
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=MAX_TOKENS)
    return [[int(index) for index in batch] for batch in batches]


def score(
    model: nn.Module,
    queries: Sequence[Query],
    context: Sequence[int] | None,
    cache: PrefixCache,
    context_row: bool = False,
) -> Observation:
    """One setting's pass over the validation set in its own order; the prefix runs unless the cache has it."""
    prefix = None if context is None else cache.of(model, context)
    order, parts = [], []
    for batch in batches_of(queries):
        order += batch
        chosen = [queries[index] for index in batch]
        parts.append(observe_queries(model, chosen, context=context, prefix=prefix, context_row=context_row))
    return concatenate(parts).take(torch.argsort(torch.tensor(order)))


def samples_of(sequences: Sequence[FinetuningSequence]) -> list[Sample]:
    """Training samples, one sequence each, as the task's dataset makes them."""
    dataset = FinetuningDataset(sequences)
    return [dataset.collater([dataset[index]]) for index in range(len(dataset))]


def linearized(model: PretrainedLM) -> LinearizedLM:
    """The linearized model made of `model`, which must not be used afterwards."""
    return LinearizedLM(model.decoder, model.trained_names)


class Training:
    """Fine-tuning with the task, the criterion and fairseq's SGD; `step` does what fairseq's trainer does a step."""

    def __init__(self, shape: Shape, model: PretrainedLM, method: str) -> None:
        self.model = model
        self.task = DemonstrationPromptingTask(DemonstrationPromptingConfig(), dictionary_of(shape), Reading())
        self.criterion = criterion_of(method, self.task)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = SGD(Namespace(lr=[LEARNING_RATE], momentum=0.0, weight_decay=0.0), parameters)
        self.num_updates = 0

    def step(self, sample: Sample) -> float:
        """Forward, backward, gradients averaged over tokens, their norm, SGD; returns the loss."""
        self.optimizer.zero_grad()
        loss, sample_size, _ = self.task.train_step(
            sample, self.model, self.criterion, self.optimizer, self.num_updates
        )
        self.optimizer.multiply_grads(1.0 / sample_size)
        self.optimizer.clip_grad_norm(0.0)
        self.task.optimizer_step(self.optimizer, self.model, self.num_updates)
        self.num_updates += 1
        return float(loss.detach())


def criterion_of(method: str, task: DemonstrationPromptingTask) -> FairseqCriterion:
    """The criterion of a fine-tuning method: layer_causal_ce for lcgd, else fairseq's cross_entropy."""
    return LayerCausalCrossEntropy(task) if method == "lcgd" else CrossEntropyCriterion(task, sentence_avg=False)
