"""The shared-prefix pass: the context runs once, queries run on top of its keys and values.

Exact, because attention is causal: what the context's tokens compute does not depend on what follows. While a pass
runs, the forward methods of the self-attention modules and of the position embedding are replaced; everything else
is the decoder's own code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.modules import MultiheadAttention, SinusoidalPositionalEmbedding
from torch import Tensor

from fairseq_icl.models.attention import decayed_sum, rule_of
from fairseq_icl.observing.probe import (
    Attention,
    at_least_single,
    attention_modules,
    is_plain,
    queries_keys_values,
)

PIECE = 256
"""Tokens of a context that run at once."""


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a context of P tokens, per layer (H, P, D)."""

    length: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    momenta: tuple[Tensor | None, ...]
    """Per layer (H, 1, D): the momentum that the first token behind the context gets; None without momentum."""

    def first(self, length: int) -> "Prefix":
        """The first `length` tokens of the context, as views."""
        if length == self.length:
            return self
        if any(momentum is not None for momentum in self.momenta):
            raise ValueError("the momentum behind an earlier token is not kept")
        keys, values = (tuple(layer[:, :length] for layer in part) for part in (self.keys, self.values))
        return Prefix(length, keys, values, self.momenta)

    def scores(self, query: Tensor) -> Tensor:
        """Scores of n query vectors (n, L, d) over the context, summed over the heads: (n, L, P)."""
        layers = []
        for layer, vectors in enumerate(query.unbind(1)):
            keys = self.keys[layer].transpose(0, 1).flatten(1)  # (P, d), heads concatenated
            layers.append(vectors @ keys.T)
        return torch.stack(layers, dim=1)

    def scores_by_head(self, query: Tensor, start: int) -> Tensor:
        """Scores of n query vectors (n, L, d) over the context from token `start` on: (n, L, H, P - start)."""
        layers = []
        for keys, vectors in zip(self.keys, query.unbind(1), strict=True):
            heads = vectors.unflatten(1, (keys.size(0), keys.size(2)))  # (n, H, D)
            layers.append(torch.einsum("nhd,hpd->nhp", heads, keys[:, start:]))
        return torch.stack(layers, dim=1)


def supports_prefix(decoder: Any) -> bool:
    """Whether the pass below computes what the decoder's own attention does."""
    return all(
        is_plain(module) if isinstance(module, MultiheadAttention) else hasattr(module, "queries_keys_values")
        for module in attention_modules(decoder)
    )


def run_prefix(decoder: Any, context: Sequence[int]) -> Prefix:
    """Run the context once and keep the keys and values of every layer."""
    empty = []
    for module in attention_modules(decoder):
        empty.append(module.k_proj.weight.new_empty(module.num_heads, 0, module.head_dim))
    return extend_prefix(decoder, Prefix(0, tuple(empty), tuple(empty), (None,) * len(empty)), context)


def extend_prefix(decoder: Any, prefix: Prefix, more: Sequence[int]) -> Prefix:
    """The prefix with more tokens after it; those that it has do not run again.

    In pieces, each on top of those before it: the activations of a long context would be the peak of memory.
    """
    keys, values, momenta = list(prefix.keys), list(prefix.values), list(prefix.momenta)

    def attend(module: Attention, layer: int, x: Tensor) -> Tensor:
        start = keys[layer].size(1)
        output, key, value = joint_attention(module, x, start, keys[layer], values[layer], momenta[layer])
        if rule_of(module).momentum:
            momenta[layer] = decayed_sum(value[0], rule_of(module).momentum, momenta[layer])[1]
        keys[layer] = torch.cat([keys[layer], key[0]], dim=1)
        values[layer] = torch.cat([values[layer], value[0]], dim=1)
        return output

    tokens = torch.tensor([more], device=keys[0].device)
    for start in range(0, len(more), PIECE):
        with _replaced_attention(decoder, attend), positions_from(decoder, prefix.length + start):
            decoder.extract_features(tokens[:, start : start + PIECE], None)
    return Prefix(prefix.length + len(more), tuple(keys), tuple(values), tuple(momenta))


def features_on_prefix(decoder: Any, tokens: Tensor, prefix: Prefix) -> tuple[Tensor, list[Tensor]]:
    """Decoder features (B, T, d) of sequences (B, T) that each follow the prefix, and its inner states, (T, B, d)."""

    def attend(module: Attention, layer: int, x: Tensor) -> Tensor:
        seen = prefix.keys[layer], prefix.values[layer], prefix.momenta[layer]
        return joint_attention(module, x, prefix.length, *seen)[0]

    with _replaced_attention(decoder, attend), positions_from(decoder, prefix.length):
        features, extra = decoder.extract_features(tokens, None)
    return features, extra["inner_states"]


def joint_attention(
    module: Attention,
    x: Tensor,
    start: int,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    momentum: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of x (T, B, d) to (prefix, own past) with its output projection; also own keys and values (B, H, T, D).

    `start` is the length of the prefix, `momentum` (H, 1, D) the decayed sum of its values, if the model has one.
    """
    query, key, value = queries_keys_values(module, x, start)  # (B, H, T, D) each
    rule = rule_of(module)
    if rule.linear:  # nothing normalises over both parts: they add
        own = (query @ key.transpose(2, 3)).tril() @ value
        attended = (query @ prefix_keys.transpose(1, 2)) @ prefix_values + own
    else:
        attended = joint_softmax(query, key, value, prefix_keys, prefix_values)
    if rule.momentum:
        state = None if momentum is None else momentum.expand(x.size(1), -1, -1, -1)
        attended = attended + decayed_sum(value, rule.momentum, state)[0]
    return module.out_proj(attended.permute(2, 0, 1, 3).flatten(2)), key, value


def joint_softmax(query: Tensor, key: Tensor, value: Tensor, prefix_keys: Tensor, prefix_values: Tensor) -> Tensor:
    """Softmax attention of tokens (B, H, T, D) to a prefix (H, P, D) and to their own past: (B, H, T, D).

    Each part by itself first, with the logarithm of its softmax's denominator: the share of a part in the whole is its
    share of the two denominators' sum. The prefix meets the rows of all queries at once, never a copy of it for each.
    In half precision all of this is in fp32, as the softmax of fairseq's own attention is.
    """
    given = query.dtype
    query, key, value, prefix_keys, prefix_values = map(
        at_least_single, (query, key, value, prefix_keys, prefix_values)
    )
    own, own_total = softmax_attention(query, key, value, causal=True)
    if prefix_keys.size(1) == 0:
        return own.to(given)
    batch, _, length, _ = query.shape
    rows = query.permute(1, 2, 0, 3).flatten(1, 2)  # (H, T * B, D): in this order a view, see `projected`
    seen, total = softmax_attention(rows[None], prefix_keys[None], prefix_values[None], causal=False)
    seen = seen[0].unflatten(1, (length, batch)).permute(2, 0, 1, 3)  # (B, H, T, D)
    total = total[0].unflatten(1, (length, batch)).permute(2, 0, 1)  # (B, H, T)
    return torch.lerp(seen, own, torch.sigmoid(own_total - total)[..., None]).to(given)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of (B, H, T, D) to (B, H, K, D), and logsumexp of its scores, (B, H, T).

    On a processor by PyTorch's fused kernel, which has this logarithm; its public function keeps it to itself. Where
    gradients are wanted by the formula: the kernel has none of the logarithm.
    """
    learns = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    if learns or query.device.type != "cpu":
        return attention_by_formula(query, key, value, causal=causal)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended, total = fused(query, key, value, 0.0, causal, scale=1.0)
    return attended, total


def attention_by_formula(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The same with all scores in memory, summed in fp32 or better."""
    scores = (query @ key.transpose(2, 3)).to(torch.promote_types(query.dtype, torch.float32))  # (B, H, T, K)
    if causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    total = scores.logsumexp(dim=3)
    return (scores - total[..., None]).exp().to(value) @ value, total


@contextmanager
def positions_from(decoder: Any, start: int) -> Iterator[None]:
    """Make the decoder number the positions of its tokens from `start`.

    Reads the rows of the table directly: fairseq's sinusoidal module cannot run under functorch, and neither it nor
    the learned one takes an offset. A decoder without such a table (rotary positions) gets its offset elsewhere.
    """
    embedding = decoder.embed_positions
    if embedding is None:
        yield
        return

    def forward(tokens: Tensor, **_: object) -> Tensor:
        first = embedding.padding_idx + 1 + start
        stop = first + tokens.size(1)
        if not isinstance(embedding, SinusoidalPositionalEmbedding):
            return embedding.weight[first:stop].expand(tokens.size(0), -1, -1)
        table = embedding.weights
        if stop > table.size(0):
            table = embedding.get_embedding(stop, embedding.embedding_dim, embedding.padding_idx).to(table)
        return table[first:stop].expand(tokens.size(0), -1, -1)

    embedding.forward = forward
    try:
        yield
    finally:
        del embedding.forward


@contextmanager
def _replaced_attention(decoder: Any, attend: Callable[[Attention, int, Tensor], Tensor]) -> Iterator[None]:
    """Let `attend(module, layer, x)` stand in for the forward method of every self-attention module."""
    modules = attention_modules(decoder)
    for layer, module in enumerate(modules):

        def forward(
            query: Tensor, *_: object, _module: Attention = module, _layer: int = layer, **__: object
        ) -> tuple[Tensor, None]:
            return attend(_module, _layer, query), None

        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward
