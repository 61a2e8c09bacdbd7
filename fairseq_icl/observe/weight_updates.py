"""What ICL and FT add to the matrix V^T K that linear attention applies to a query vector, head by head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_icl.metrics.weight_space import Projections, WeightUpdates, head_matrices
from fairseq_icl.observe.layout import Position, lay_out
from fairseq_icl.observe.prefix import Prefix
from fairseq_icl.observe.probe import attention_modules
from fairseq_icl.prompts.build import Query
from fairseq_icl.prompts.tokens import BOS


@torch.no_grad()
def observe_weight_updates(
    model: nn.Module, queries: Sequence[Query], prefix: Prefix, position: Position = "option0"
) -> WeightUpdates:
    """dW_icl (L, H, D, D) of the prefix's demonstrations and dW_ft (n, L, H, D, D) on the tokens of the queries.

    The layer inputs of both are those of the base model, as in the papers' derivation.
    """
    layout = lay_out(queries, position)
    tokens = layout.tokens(before=(BOS,))[layout.recorded_sequence]  # (n, T)
    place = torch.arange(tokens.size(1))
    is_token = (place >= 1) & (place <= layout.recorded_position[:, None] + 1)  # (n, T)
    modules = attention_modules(model.decoder)

    def matrices() -> Tensor:  # (n, L, H, D, D)
        layers = zip(modules, inputs, strict=True)
        return torch.cat([_matrices(module, x, is_token.to(x.device)) for module, x in layers], dim=1)

    with model.base_weights():
        with attention_inputs(model.decoder) as inputs:
            model.decoder.extract_features(tokens.to(prefix.keys[0].device), None)
        base = matrices()
    return WeightUpdates(icl=_prefix_matrices(prefix).cpu(), ft=(model.evaluate(matrices) - base).cpu())


@contextmanager
def attention_inputs(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """A list that fills with what each layer's self-attention receives, (n, T, d), while the decoder runs."""
    inputs: list[Tensor] = []

    def look(module: MultiheadAttention, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs.append((kwargs["query"] if "query" in kwargs else args[0]).transpose(0, 1))

    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in attention_modules(decoder)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _matrices(module: MultiheadAttention, x: Tensor, is_token: Tensor) -> Tensor:
    """V^T K of one layer on inputs (n, T, d): (n, 1, H, D, D)"""
    key, value = module.k_proj, module.v_proj
    projections = Projections(key.weight[None], key.bias[None], value.weight[None], value.bias[None])
    return head_matrices(x[:, None], is_token, projections, module.num_heads)


def _prefix_matrices(prefix: Prefix) -> Tensor:
    """V'^T K' of the context without its BOS, which the zero-shot prompt has too: (L, H, D, D)"""
    layers = []
    for layer in range(len(prefix.keys)):
        keys, values = prefix.tokens_of(layer)
        layers.append(values[:, 1:].transpose(1, 2) @ keys[:, 1:])
    return torch.stack(layers)
