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
import torch.nn.functional as F
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
WIDENED = 8
"""Dimensions that keys and values of a prefix have more than in the model."""


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a context of P tokens, per layer (H, P + 1, D + 8); see `with_slot` for the additions."""

    length: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    momenta: tuple[Tensor | None, ...]
    """Per layer (H, 1, D): the momentum that the first token behind the context gets; None without momentum."""

    def tokens_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as they are in the model: (H, P, D) each."""
        return self.keys[layer][:, :-1, :-WIDENED], self.values[layer][:, :-1, :-WIDENED]

    def scores(self, query: Tensor) -> Tensor:
        """Scores of n query vectors (n, L, d) over the context, summed over the heads: (n, L, P)."""
        layers = []
        for layer, vectors in enumerate(query.unbind(1)):
            keys = self.tokens_of(layer)[0].transpose(0, 1).flatten(1)  # (P, d), heads concatenated
            layers.append(vectors @ keys.T)
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
        empty.append(with_slot(module.k_proj.weight.new_empty(module.num_heads, 0, module.head_dim)))
    return extend_prefix(decoder, Prefix(0, tuple(empty), tuple(empty), (None,) * len(empty)), context)


def extend_prefix(decoder: Any, prefix: Prefix, more: Sequence[int]) -> Prefix:
    """The prefix with more tokens after it; those that it has do not run again.

    In pieces, each on top of those before it: the activations of a long context would be the peak of memory.
    """
    keys, values, momenta = list(prefix.keys), list(prefix.values), list(prefix.momenta)

    def attend(module: Attention, layer: int, x: Tensor) -> Tensor:
        start = keys[layer].size(1) - 1
        output, key, value = joint_attention(module, x, start, keys[layer], values[layer], momenta[layer])
        if rule_of(module).momentum:
            momenta[layer] = decayed_sum(value[0], rule_of(module).momentum, momenta[layer])[1]
        keys[layer] = torch.cat([keys[layer][:, :-1], with_slot(key[0])], dim=1)
        values[layer] = torch.cat([values[layer][:, :-1], with_slot(value[0])], dim=1)
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


def with_slot(tokens: Tensor) -> Tensor:
    """Keys or values (H, P, D) with one more token, zero but for a 1 in one more dimension: (H, P + 1, D + 8).

    A query that ends in c scores c on this slot and its old scores on the rest. Of the eight dimensions added seven
    are zeros: GPU kernels want widths that are multiples of eight.
    """
    wide = F.pad(tokens, (0, WIDENED, 0, 1))
    wide[:, -1, -WIDENED] = 1
    return wide


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
        keys, values = prefix_keys[:, :-1, :-WIDENED], prefix_values[:, :-1, :-WIDENED]  # (H, P, D)
        attended = (query @ keys.transpose(1, 2)) @ values + (query @ key.transpose(2, 3)).tril() @ value
    else:
        attended = joint_softmax(query, key, value, prefix_keys, prefix_values)
    if rule.momentum:
        state = None if momentum is None else momentum.expand(x.size(1), -1, -1, -1)
        attended = attended + decayed_sum(value, rule.momentum, state)[0]
    return module.out_proj(attended.transpose(1, 2).flatten(2)).transpose(0, 1), key, value


def joint_softmax(query: Tensor, key: Tensor, value: Tensor, prefix_keys: Tensor, prefix_values: Tensor) -> Tensor:
    """Softmax attention of tokens (B, H, T, D) to a prefix (H, P + 1, D + 8) and to their own past: (B, H, T, D).

    The own part is computed first: o = softmax(s) v and c = logsumexp(s) of its scores s. With c in the slot of the
    prefix, one fused pass over prefix and slot normalises over both parts: it gives the prefix's share of the output,
    and in the slot the weight that o has to get. The prefix meets the rows of all queries at once, never a copy of it
    for each, and no map of scores (B * T, P) is formed.

    In half precision the softmax is in fp32, as in fairseq's own attention; c would otherwise be off by percents.
    """
    given = query.dtype
    query, key, value, prefix_keys, prefix_values = map(
        at_least_single, (query, key, value, prefix_keys, prefix_values)
    )
    length = query.size(2)
    future = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    scores = query @ key.transpose(2, 3) + future  # (B, H, T, T)
    total = scores.logsumexp(dim=3, keepdim=True)  # (B, H, T, 1)
    own = (scores - total).exp() @ value  # (B, H, T, D)
    wide = F.pad(torch.cat([query, total], dim=3), (0, WIDENED - 1)).transpose(0, 1)  # (H, B, T, D + 8)
    seen = F.scaled_dot_product_attention(wide.flatten(1, 2)[None], prefix_keys[None], prefix_values[None], scale=1.0)
    seen = seen[0].unflatten(1, wide.shape[1:3]).transpose(0, 1)  # (B, H, T, D + 8)
    share, slot = seen[..., :-WIDENED], seen[..., -WIDENED, None]
    return (share + slot * own).to(given)


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
