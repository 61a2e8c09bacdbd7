"""A tiny model, samples for it and its gradients, for tests of training."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_icl.criterions.layer_causal_ce import LayerCausalCrossEntropy
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.tasks.prompt_datasets import collate, language_model_item
from tests.models.tiny_linearized import build_decoder

PAD = 1


def task() -> SimpleNamespace:
    """What a criterion wants of a stock task."""
    return SimpleNamespace(target_dictionary=Dictionary())


def criterion(**options: str | None) -> LayerCausalCrossEntropy:
    return LayerCausalCrossEntropy(task(), **options)


def build_model(dtype: torch.dtype = torch.float64, train_all: bool = False, **options: object) -> PretrainedLM:
    """3 layers, width 16, 2 heads; keys and values of self-attention learn, or everything."""
    model = PretrainedLM(build_decoder(decoder_layers=3, **options)).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(train_all or ".k_proj." in name or ".v_proj." in name)
    return model


def sample_of(sequences: list[list[int]]) -> dict:
    """A training batch in which every token after the first is scored."""
    scored = [[False] + [True] * (len(tokens) - 1) for tokens in sequences]
    pairs = zip(sequences, scored, strict=True)
    return collate([language_model_item(i, *pair, PAD) for i, pair in enumerate(pairs)], PAD)


def gradients(model: nn.Module, *losses: Tensor) -> dict[str, Tensor]:
    """Name -> gradient of the sum of the losses, for the parameters that get one."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
