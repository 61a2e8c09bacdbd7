"""A probe on the self-attention of a fairseq decoder: what it put out and looked at, for chosen tokens.

Works on any path of fairseq's attention (fused, Python, replaced) because it reads only the module's input and output.
The model's outputs do not change by one bit.
"""

from types import TracebackType
from typing import Any, NamedTuple

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn


def attention_modules(decoder: nn.Module) -> list[MultiheadAttention]:
    """The self-attention modules of a decoder, bottom first."""
    return [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]


class AttentionRecord(NamedTuple):
    """What the probe saw at n chosen tokens of L layers."""

    output: Tensor  # (n, L, d) attention output with output projection and bias, before the residual
    query: Tensor  # (n, L, d) query vector, heads concatenated, times head_dim ** -0.5
    scores: Tensor  # (n, L, H, K) query . key of every token of the sequence, before mask and softmax


class AttentionProbe:
    """Context manager: while it is open, forward passes of `decoder` are recorded at the chosen tokens.

    Token i is number `positions[i]` of sequence `sequences[i]` of the batch. `record()` gives what was seen.
    """

    def __init__(self, decoder: nn.Module, sequences: Tensor, positions: Tensor) -> None:
        self.modules = attention_modules(decoder)
        self.sequences = sequences  # (n,)
        self.positions = positions  # (n,)
        self._seen: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "AttentionProbe":
        self._hooks = [module.register_forward_hook(self._look, with_kwargs=True) for module in self.modules]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def record(self) -> AttentionRecord:
        """The last forward pass, layers stacked."""
        per_layer = [self._seen[module] for module in self.modules]
        return AttentionRecord(*(torch.stack(layers, dim=1) for layers in zip(*per_layer, strict=True)))

    def _look(self, module: MultiheadAttention, args: tuple, kwargs: dict[str, Any], result: tuple) -> None:
        inputs = dict(zip(("query", "key"), args, strict=False)) | kwargs
        tokens = inputs["query"][self.positions, self.sequences]  # (n, d), out of (time, batch, d)
        query = module.q_proj(tokens) * module.scaling
        scores = key_scores(module, query, inputs["key"][:, self.sequences])
        self._seen[module] = (result[0][self.positions, self.sequences], query, scores)


def key_scores(module: MultiheadAttention, query: Tensor, inputs: Tensor) -> Tensor:
    """Per head q . (W x + b) = (q W) . x + q . b, for each of n queries over its own K inputs x: (n, H, K).

    `query` is (n, d), `inputs` (K, n, d). Multiplying in this order never forms the keys, which would cost as much
    as the projection did in the model itself.
    """
    heads = query.unflatten(1, (module.num_heads, module.head_dim))  # (n, H, d/H)
    weight = module.k_proj.weight.unflatten(0, (module.num_heads, module.head_dim))  # (H, d/H, d)
    scores = torch.einsum("nhd,knd->nhk", torch.einsum("nhe,hed->nhd", heads, weight), inputs)
    if module.k_proj.bias is None:
        return scores
    bias = module.k_proj.bias.unflatten(0, (module.num_heads, module.head_dim))  # (H, d/H)
    return scores + (heads * bias).sum(-1, keepdim=True)
