"""The shared-prefix pass: the context runs once, queries run on top of its keys and values.

Exact, because attention is causal: what the context's tokens compute does not depend on what follows. While a pass
runs, the forward methods of the self-attention modules and of the position embedding are replaced; everything else
is the decoder's own code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention, SinusoidalPositionalEmbedding
from torch import Tensor

from fairseq_icl.models.attention import Rule, decayed_sum, rule_of
from fairseq_icl.observing.last_layer import last_feed_forward_at
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.probe import (
    Attention,
    at_least_single,
    attention_modules,
    is_plain,
    queries_keys_values,
)

PIECE = 512
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
    last = len(keys) - 1

    def attend(module: Attention, layer: int, x: Tensor) -> Tensor:
        before = keys[layer], values[layer], momenta[layer]
        # Nobody reads what the last layer puts out: keys and values are made of what it receives.
        rows = nowhere if layer == last else None
        output, key, value = joint_attention(module, x, piece, before[0].size(1), *before, rows=rows)
        if rule_of(module).momentum:
            momenta[layer] = decayed_sum(value, rule_of(module).momentum, momenta[layer])[1]
        keys[layer] = torch.cat([keys[layer], key], dim=1)
        values[layer] = torch.cat([values[layer], value], dim=1)
        return output

    nowhere = torch.empty(0, dtype=torch.long)
    for start in range(0, len(more), PIECE):
        piece = Packed.of([more[start : start + PIECE]])
        with last_feed_forward_at(decoder, nowhere, nowhere):
            _run(decoder, piece, prefix.length + start, attend)
    return Prefix(prefix.length + len(more), tuple(keys), tuple(values), tuple(momenta))


def features_on_prefix(decoder: Any, packed: Packed, prefix: Prefix, read: Tensor | None = None) -> Tensor:
    """Decoder features (N, 1, d) of sequences that each follow the prefix.

    `read` (R,): the only tokens at which the last layer's attention is wanted; the others leave it without.
    """
    last = len(prefix.keys) - 1

    def attend(module: Attention, layer: int, x: Tensor) -> Tensor:
        seen = prefix.keys[layer], prefix.values[layer], prefix.momenta[layer]
        return joint_attention(module, x, packed, prefix.length, *seen, rows=read if layer == last else None)[0]

    return _run(decoder, packed, prefix.length, attend)


def _run(decoder: Any, packed: Packed, start: int, attend: Callable[[Attention, int, Tensor], Tensor]) -> Tensor:
    """Features (N, 1, d) of packed sequences from position `start` on: to the decoder each token is one of its own."""
    tokens = packed.tokens[:, None].to(next(decoder.parameters()).device)
    with _replaced_attention(decoder, attend), positions_from(decoder, packed.position + start):
        features: Tensor = decoder.extract_features(tokens, None)[0]
    return features


def joint_attention(
    module: Attention,
    x: Tensor,
    packed: Packed,
    start: int,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    momentum: Tensor | None = None,
    *,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of x (1, N, d) to (prefix, own past) with its output projection; also own keys and values (H, N, D).

    `start` is the length of the prefix, `momentum` (H, 1, D) the decayed sum of its values, if the model has one.
    `rows` (R,): the output is wanted there alone, and zero elsewhere.
    """
    parts = queries_keys_values(module, x, packed.position + start)  # (N, H, 1, D) each
    query, key, value = (part[:, :, 0] for part in parts)  # (N, H, D)
    if rows is not None and len(rows) == 0:
        output = torch.zeros_like(x)
    else:
        chosen = slice(None) if rows is None else rows
        seen = prefix_keys, prefix_values, momentum
        attended = _attended(rule_of(module), query, key, value, packed, *seen, chosen)
        output = module.out_proj(attended.flatten(1))[None]
        if rows is not None:
            output = torch.zeros_like(x).index_copy(1, rows.to(x.device), output)
    return output, key.transpose(0, 1), value.transpose(0, 1)


def _attended(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    momentum: Tensor | None,
    rows: Tensor | slice,
) -> Tensor:
    """What the heads put out at `rows`, (R, H, D), of queries, keys and values (N, H, D)."""
    if rule.linear:  # nothing normalises over both parts: they add
        own = _by_sequence(lambda q, k, v: ((q @ k.transpose(2, 3)).tril() @ v,), packed, query, key, value)[0]
        seen = (query[rows].transpose(0, 1) @ prefix_keys.transpose(1, 2)) @ prefix_values  # (H, R, D)
        attended = seen.transpose(0, 1) + own[rows]
    else:
        attended = joint_softmax(query, key, value, packed, prefix_keys, prefix_values, rows)
    if rule.momentum:

        def add_up(values: Tensor) -> tuple[Tensor]:
            state = None if momentum is None else momentum.expand(len(values), -1, -1, -1)
            return (decayed_sum(values, rule.momentum, state)[0],)

        attended = attended + _by_sequence(add_up, packed, value)[0][rows]
    return attended


def _by_sequence(function: Callable[..., tuple[Tensor, ...]], packed: Packed, *parts: Tensor) -> tuple[Tensor, ...]:
    """What `function` makes of sequences, (B, H, T, ...) -> (B, H, T, ...), packed again: (N, H, ...) -> (N, H, ...).

    Sequences of one length go through it together, as views of where they lie.
    """
    results, start = [], 0
    for count, length in packed.groups:
        stop = start + count * length
        given = (part[start:stop].unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        results.append([result.transpose(1, 2).flatten(0, 1) for result in function(*given)])
        start = stop
    return tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*results, strict=True))


def joint_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Packed,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    rows: Tensor | slice = slice(None),
) -> Tensor:
    """Softmax attention of packed tokens (N, H, D) to a prefix (H, P, D) and to their own past, at `rows`: (R, H, D).

    Each part by itself first, with the logarithm of its softmax's denominator: the share of a part in the whole is its
    share of the two denominators' sum. The prefix meets the rows of all queries at once, never a copy of it for each.
    In half precision all of this is in fp32, as the softmax of fairseq's own attention is.
    """
    given = query.dtype
    query, key, value, prefix_keys, prefix_values = map(
        at_least_single, (query, key, value, prefix_keys, prefix_values)
    )
    own, own_total = _by_sequence(partial(softmax_attention, causal=True), packed, query, key, value)
    own, own_total = own[rows], own_total[rows]
    if prefix_keys.size(1) == 0:
        return own.to(given)
    asking = query[rows].transpose(0, 1)[None]  # (1, H, R, D)
    seen, total = softmax_attention(asking, prefix_keys[None], prefix_values[None], causal=False)
    seen, total = seen[0].transpose(0, 1), total[0].T  # (R, H, D), (R, H)
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
def positions_from(decoder: Any, start: int | Tensor) -> Iterator[None]:
    """Make the decoder number the positions of its tokens from `start`; one for all sequences or one each, (B,).

    Reads the rows of the table directly: fairseq's sinusoidal module cannot run under functorch, and neither it nor
    the learned one takes an offset. A decoder without such a table (rotary positions) gets its offset elsewhere.
    """
    embedding = decoder.embed_positions
    if embedding is None:
        yield
        return

    def forward(tokens: Tensor, **_: object) -> Tensor:
        first = torch.as_tensor(start)[..., None] + embedding.padding_idx + 1
        places = (first + torch.arange(tokens.size(1))).expand(tokens.size(0), -1)  # (B, T)
        if not isinstance(embedding, SinusoidalPositionalEmbedding):
            return F.embedding(places.to(embedding.weight.device), embedding.weight)
        table, stop = embedding.weights, int(places.max()) + 1
        if stop > table.size(0):
            table = embedding.get_embedding(stop, embedding.embedding_dim, embedding.padding_idx).to(table)
        return table[places.to(table.device)]

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
