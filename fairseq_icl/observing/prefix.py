"""The shared-prefix pass: the context runs once, queries run on top of its keys and values.

Exact, because attention is causal: what the context's tokens compute does not depend on what follows. While a pass
runs, something else attends where the self-attention modules hand over their queries, keys and values (`Seam`), and
positions are counted from where the context ends; everything else is the decoder's own code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention, SinusoidalPositionalEmbedding
from torch import Tensor

from fairseq_icl.models.attention import (
    HIDDEN,
    Rule,
    RuledAttention,
    decayed_sum,
    projected,
    replaced_forward,
    rule_of,
    softmax_attention,
)
from fairseq_icl.models.state_edits import StateEdit, edited
from fairseq_icl.observing.layers import last_feed_forward_at, only_at
from fairseq_icl.observing.layout import Packed
from fairseq_icl.observing.probe import at_least_single, attention_modules, is_plain, seam_of

PIECE = 512  # tokens of a context that run at once
Rows = Tensor | slice
AfterLayer = Callable[[int, Rule, Tensor, Tensor], None]


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a context of P tokens, per layer (G, P, D): once where several of the H heads share them."""

    length: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    momenta: Sequence[Tensor | None]  # (H, 1, D) that the first token behind the context gets; None without momentum

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
        for keys, vectors in zip(self.keys, query.unbind(1), strict=True):
            keys = for_heads(keys, vectors.size(1)).transpose(0, 1).flatten(1)  # (P, d), heads concatenated
            layers.append(vectors @ keys.T)
        return torch.stack(layers, dim=1)

    def scores_by_head(self, query: Tensor, start: int) -> Tensor:
        """Scores of n query vectors (n, L, d) over the context from token `start` on: (n, L, H, P - start)."""
        layers = []
        for keys, vectors in zip(self.keys, query.unbind(1), strict=True):
            heads = vectors.unflatten(1, (-1, keys.size(2)))  # (n, H, D)
            layers.append(torch.einsum("nhd,hpd->nhp", heads, for_heads(keys, vectors.size(1))[:, start:]))
        return torch.stack(layers, dim=1)


def for_heads(part: Tensor, width: int) -> Tensor:
    """A layer's keys or values (G, P, D) for each of its heads, (H, P, D), which are `width` = H D wide together."""
    heads_per_key = width // (part.size(0) * part.size(2))
    return part if heads_per_key == 1 else part.repeat_interleave(heads_per_key, dim=0)


def supports_prefix(decoder: Any) -> bool:
    """Whether the pass below computes what the decoder's own attention does."""
    return all(
        is_plain(module) if isinstance(module, MultiheadAttention) else hasattr(module, "seam")
        for module in attention_modules(decoder)
    )


def run_prefix(decoder: Any, context: Sequence[int], known: Prefix | None = None) -> Prefix:
    """Run the context once and keep every layer's keys and values; `known`: those of its first tokens, not to run."""
    if known is None:
        like = next(decoder.parameters())
        empty = tuple(
            like.new_empty(module.num_heads // seam_of(module).heads_per_key, 0, module.head_dim)
            for module in attention_modules(decoder)
        )
        known = Prefix(0, empty, empty, (None,) * len(empty))
    keys, values, momenta = list(known.keys), list(known.values), list(known.momenta)
    nowhere = torch.empty(0, dtype=torch.long)  # nobody reads what the last layer makes of what it receives

    def grow(layer: int, rule: Rule, key: Tensor, value: Tensor) -> None:
        if rule.momentum:
            momenta[layer] = decayed_sum(value.transpose(0, 1), rule.momentum, momenta[layer])[1]
        step = key.size(1) // len(keys[layer])  # heads that share their keys and values
        keys[layer] = torch.cat([keys[layer], key[:, ::step].transpose(0, 1)], dim=1)
        values[layer] = torch.cat([values[layer], value[:, ::step].transpose(0, 1)], dim=1)

    # In pieces, each on top of those before it: the activations of a long context would be the peak of memory.
    for start in range(known.length, len(context), PIECE):
        piece = Packed.of([context[start : start + PIECE]])
        with last_feed_forward_at(decoder, nowhere, nowhere):
            features_on_prefix(decoder, piece, Prefix(start, keys, values, momenta), nowhere, grow)
    return Prefix(len(context), tuple(keys), tuple(values), tuple(momenta))


def features_on_prefix(
    decoder: Any, packed: Packed, prefix: Prefix, read: Tensor | None = None, after_layer: AfterLayer | None = None
) -> Tensor:
    """Decoder features (N, 1, d) of packed sequences that each follow the prefix; each token is a sequence of its own.

    `read` (R,): the only tokens at which the last layer's attention is wanted; the others leave it without.
    `after_layer` is called with each layer's number, rule, keys and values (N, H, D) of the sequences.
    """
    tokens = packed.tokens[:, None].to(next(decoder.parameters()).device)

    def attend(layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        rows = read if read is not None and layer == len(prefix.keys) - 1 else slice(None)
        query, key, value = (part[:, :, 0] for part in (query, key, value))
        seen = Seen(packed, prefix.keys[layer], prefix.values[layer], prefix.momenta[layer])
        attended = seen.attend(rule, query, key, value, sinks, rows)
        if after_layer is not None:
            after_layer(layer, rule, key, value)
        return attended[:, :, None]

    positions = positions_from(decoder, packed.position + prefix.length)
    with replaced_attention(decoder, attend), positions, ExitStack() as last:
        if read is not None:
            module = attention_modules(decoder)[-1]
            where = (torch.zeros_like(read), read)  # (1, N, d) with fairseq's attention, (N, 1, d) with others
            where = where if isinstance(module, MultiheadAttention | RuledAttention) else where[::-1]
            last.enter_context(only_at([module.out_proj], module.out_proj, *where))
        features: Tensor = decoder.extract_features(tokens, None)[0]
    return features


def run_edited(decoder: Any, prefix: Prefix, sequences: Sequence[Sequence[int]], edit: StateEdit) -> Tensor:
    """Features (B, d) at the last tokens of sequences that each follow the prefix, with the edit at these tokens."""
    packed = Packed.of(sequences)
    ends = packed.first + torch.tensor([len(sequence) - 1 for sequence in sequences])
    ends = ends.to(next(decoder.parameters()).device)
    with edited(decoder, edit, ends, torch.zeros_like(ends)):
        return features_on_prefix(decoder, packed, prefix, ends.unique())[ends, 0]


@dataclass(frozen=True)
class Seen:
    """What packed tokens attend to: a prefix, (G, P, D) of G groups of heads, and their own past."""

    packed: Packed
    keys: Tensor
    values: Tensor
    momentum: Tensor | None = None  # (H, 1, D): the decayed sum of the prefix's values, if the model has momentum

    def attend(self, rule: Rule, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rows: Rows) -> Tensor:
        """What the heads put out, (N, H, D), of queries, keys and values (N, H, D); zero but at `rows`."""
        if isinstance(rows, Tensor) and len(rows) == 0:
            return torch.zeros_like(query)
        if rule.linear:
            attended = self._linear(rule, query, key, value, rows)
        else:
            attended = self.softmax(rule, query, key, value, sinks, rows)
        if rule.momentum:
            attended = attended + _by_sequence(partial(self._add_up, rule.momentum), self.packed, value)[0][rows]
        if isinstance(rows, Tensor):
            return torch.zeros_like(query).index_copy(0, rows.to(query.device), attended)
        return attended

    def _add_up(self, eta: float, values: Tensor) -> tuple[Tensor, ...]:
        state = None if self.momentum is None else self.momentum.expand(len(values), -1, -1, -1)
        return decayed_sum(values, eta, state)[:1]

    def _linear(self, rule: Rule, query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
        """Linear attention, (R, H, D): nothing normalises over both parts, they add."""
        attend = replace(rule, momentum=0.0).attend
        (own,) = _by_sequence(lambda *parts: (attend(*parts),), self.packed, query, key, value)
        scores = self._asking(query[rows]) @ self.keys.transpose(1, 2)  # (G, HR/G, P)
        if rule.window is not None:
            scores = scores * (self._hidden(rule.window, rows, query.size(1)) == 0).to(scores)
        return (scores @ self.values).view(query.size(1), -1, query.size(2)).transpose(0, 1) + own[rows]

    def _asking(self, query: Tensor) -> Tensor:
        """Queries (R, H, D) as the prefix meets them, (G, HR/G, D): heads that share keys one after the other."""
        return query.transpose(0, 1).reshape(len(self.keys), -1, query.size(2))

    def _hidden(self, window: int, rows: Rows, heads: int) -> Tensor:
        """(HR/G, P): 0 where a token of the prefix is in the window of a row, else `HIDDEN`."""
        count = partial(torch.arange, device=self.keys.device)  # made where they are used: nothing goes there
        position = torch.cat([count(length).repeat(sequences) for sequences, length in self.packed.groups])  # (N,)
        distance = position[rows, None] + self.keys.size(1) - count(self.keys.size(1))
        return torch.where(distance < window, 0.0, HIDDEN).repeat(heads // len(self.keys), 1)

    def softmax(
        self,
        rule: Rule,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        rows: Rows = slice(None),
    ) -> Tensor:
        """Softmax attention to the prefix and the own past, at `rows`: (R, H, D).

        Each part by itself first, with the logarithm of its softmax's denominator: the share of a part in the whole is
        its share of the two denominators' sum. The prefix meets the rows of all queries at once, never a copy of it for
        each. In half precision all of this is in fp32, as the softmax of fairseq's own attention is.
        """
        given = query.dtype
        query, key, value, keys, values = map(at_least_single, (query, key, value, self.keys, self.values))
        attend = partial(softmax_attention, rule=rule)
        attended, total = _by_sequence(partial(attend, causal=True), self.packed, query, key, value)
        attended, total = attended[rows], total[rows]
        if keys.size(1) > 0:
            longest, heads = keys.size(1) + int(self.packed.position.max()) + 1, query.size(1)
            mask = self._hidden(rule.window, rows, heads).to(query) if rule.window and longest > rule.window else None
            asking = self._asking(query[rows])[None]
            seen, seen_total = attend(asking, keys[None], values[None], causal=False, mask=mask)
            seen = seen.reshape(heads, -1, query.size(2)).transpose(0, 1)  # (R, H, D)
            seen_total = seen_total.reshape(heads, -1).T  # (R, H)
            attended = torch.lerp(seen, attended, torch.sigmoid(total - seen_total)[..., None])
            total = torch.logaddexp(total, seen_total)
        if sinks is not None:
            attended = attended * torch.sigmoid(total - sinks).to(attended)[..., None]
        return attended.to(given)


def _by_sequence(function: Callable[..., tuple[Tensor, ...]], packed: Packed, *parts: Tensor) -> tuple[Tensor, ...]:
    """What `function`, (B, H, T, ...) -> (B, H, T, ...), makes of packed sequences: (N, H, ...) -> (N, H, ...)."""
    results, start = [], 0
    for count, length in packed.groups:  # those of one length together, as views of where they lie
        stop = start + count * length
        given = (part[start:stop].unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        results.append([result.transpose(1, 2).flatten(0, 1) for result in function(*given)])
        start = stop
    return tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*results, strict=True))


def positions_from(decoder: Any, start: int | Tensor) -> AbstractContextManager[None]:
    """Make the decoder number the positions of its tokens from `start`; one for all sequences or one each, (B,).

    Reads the rows of the table directly: fairseq's sinusoidal module cannot run under functorch, and neither it nor
    the learned one takes an offset. A decoder without such a table (rotary positions) gets its offset elsewhere.
    """
    if hasattr(decoder, "positions_from"):  # one of transformers
        return cast(AbstractContextManager[None], decoder.positions_from(start))
    embedding = decoder.embed_positions
    if embedding is None:
        return nullcontext()

    def forward(tokens: Tensor, **_: object) -> Tensor:
        first = torch.as_tensor(start)[..., None] + embedding.padding_idx + 1
        places = (first + torch.arange(tokens.size(1))).expand(tokens.size(0), -1)  # (B, T)
        if not isinstance(embedding, SinusoidalPositionalEmbedding):
            return F.embedding(places.to(embedding.weight.device), embedding.weight)
        table, stop = embedding.weights, int(places.max()) + 1
        if stop > table.size(0):
            table = embedding.get_embedding(stop, embedding.embedding_dim, embedding.padding_idx).to(table)
        return table[places.to(table.device)]

    return replaced_forward({embedding: lambda _: forward})


@contextmanager
def replaced_attention(decoder: Any, attend: Callable[..., Tensor]) -> Iterator[None]:
    """Let `attend(layer, rule, query, key, value, sinks)`, (B, H, T, D) each, stand in for attention for a pass."""
    modules = attention_modules(decoder)
    for layer, module in enumerate(modules):
        seam_of(module).stand_in = partial(attend, layer)

    def step_by_step(module: MultiheadAttention, _: Any) -> Callable[..., tuple[Tensor, None]]:
        def forward(query: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:  # fairseq's is one fused operation
            attended = module.seam.attend(rule_of(module), *projected(module, query))  # (B, H, T, D) of (T, B, d)
            return module.out_proj(attended.permute(2, 0, 1, 3).flatten(2)), None

        return forward

    plain = [module for module in modules if isinstance(module, MultiheadAttention)]
    try:
        with replaced_forward({module: partial(step_by_step, module) for module in plain}):
            yield
    finally:
        for module in modules:
            module.seam.stand_in = None
