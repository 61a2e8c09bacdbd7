"""Observe a whole validation set in one setting, and keep what was observed in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairseq_icl.observe import Observation, PrefixCache, concatenate, observe_queries, plan_batches
from fairseq_icl.prompts.build import Query


def observe_all(
    model: nn.Module, queries: Sequence[Query], position: str, context: Sequence[int] | None = None
) -> Observation:
    """What `model` shows on every query, in their order: zero-shot, or after the demonstrations in `context`."""
    prefix = None if context is None else PrefixCache().of(model, context)
    was_training = model.training
    model.eval()
    batches = plan_batches(queries, position)
    parts = [
        observe_queries(
            model,
            [queries[index] for index in batch],
            context=context,
            prefix=prefix,
            position=position,
            context_row=context is not None,
        )
        for batch in batches
    ]
    model.train(was_training)
    order = torch.tensor([index for batch in batches for index in batch]).argsort()
    return concatenate(parts).take(order)


def save_bundle(path: Path, observation: Observation, **rest: Any) -> None:
    """Write an observation, and tensors or plain values that belong to it."""
    torch.save({"observation": vars(observation), **rest}, path)


def load_bundle(path: Path) -> tuple[Observation, dict[str, Any]]:
    """What `save_bundle` wrote; tensors stay on disk until they are looked at."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return Observation(**content.pop("observation")), content
