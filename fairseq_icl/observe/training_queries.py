"""Query vectors of a demonstration's tokens as the model being fine-tuned sees them, just before it learns from it."""

from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_icl.observe.probe import attention_modules


@torch.no_grad()
def observe_training_queries(model: BaseFairseqModel, tokens: Tensor) -> Tensor:
    """(layers, tokens, dim): scaled queries, heads concatenated, of one sequence `tokens` (BOS and label included)."""
    decoder = model.decoder

    def run() -> Tensor:
        queries: list[Tensor] = []

        def look(module: MultiheadAttention, args: tuple, kwargs: dict[str, Any]) -> None:
            inputs = kwargs["query"] if "query" in kwargs else args[0]  # (tokens, 1, dim)
            queries.append(module.q_proj(inputs[:, 0]) * module.scaling)

        hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in attention_modules(decoder)]
        try:
            decoder(tokens[None].to(next(decoder.parameters()).device), features_only=True)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(queries)

    return model.evaluate(run).float().cpu()
