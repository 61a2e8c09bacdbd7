"""The shared-prefix pass: the context runs once, queries run on top of its keys and values.

Exact, because attention is causal: what the context's tokens compute does not depend on what follows. While a pass
runs, the forward methods of the self-attention modules and of the position embedding are replaced; everything else
is the decoder's own code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from fairseq.modules import MultiheadAttention, SinusoidalPositionalEmbedding
from torch import Tensor, nn

from fairseq_icl.observe.probe import attention_modules

PIECE = 512
"""Tokens of a context that run at once."""


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a context of P tokens, per layer (P, d), heads concatenated."""

    length: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def scores(self, query: Tensor) -> Tensor:
        """Scores of n query vectors (n, L, d) over the context, summed over the heads: (n, L, P)."""
        return torch.stack([query[:, layer] @ keys.T for layer, keys in enumerate(self.keys)], dim=1)


def supports_prefix(decoder: nn.Module) -> bool:
    """Whether the decoder's attention is fairseq's own, so that the pass below computes the same."""
    return all(
        type(module) is MultiheadAttention
        and module.self_attention
        and module.bias_k is None
        and not module.add_zero_attn
        and not module.use_xformers
        for module in attention_modules(decoder)
    )


def run_prefix(decoder: nn.Module, context: Sequence[int]) -> Prefix:
    """Run the context once and keep the keys and values of every layer.

    In pieces, each on top of those before it: the activations of a long context would be the peak of memory.
    """
    modules = attention_modules(decoder)
    keys = [module.k_proj.weight.new_empty(0, module.embed_dim) for module in modules]
    values = list(keys)

    def attend(module: MultiheadAttention, layer: int, x: Tensor) -> Tensor:
        output, key, value = joint_attention(module, x, keys[layer], values[layer])
        keys[layer] = torch.cat([keys[layer], key[0]])
        values[layer] = torch.cat([values[layer], value[0]])
        return output

    tokens = torch.tensor([context], device=keys[0].device)
    for start in range(0, len(context), PIECE):
        with _replaced_attention(decoder, attend), positions_from(decoder, start):
            decoder.extract_features(tokens[:, start : start + PIECE], None)
    return Prefix(len(context), tuple(keys), tuple(values))


def features_on_prefix(decoder: nn.Module, tokens: Tensor, prefix: Prefix) -> Tensor:
    """Decoder features of sequences (B, T) that each follow the prefix: (B, T, d)."""

    def attend(module: MultiheadAttention, layer: int, x: Tensor) -> Tensor:
        return joint_attention(module, x, prefix.keys[layer], prefix.values[layer])[0]

    with _replaced_attention(decoder, attend), positions_from(decoder, prefix.length):
        return decoder.extract_features(tokens, None)[0]


def joint_attention(
    module: MultiheadAttention, x: Tensor, prefix_keys: Tensor, prefix_values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax over (prefix, own past) of q . k, times v, through the output projection; also the own keys and values.

    `x` is (T, B, d), the prefix (P, d). Head by head, so that the scores (B*T, P+T) stay in the processor's cache and
    the prefix is multiplied once with the rows of all queries, never copied for each.
    """
    length, batch, width = x.shape
    rows = x.transpose(0, 1)  # (B, T, d)
    query = module.q_proj(rows) * module.scaling
    key, value = module.k_proj(rows), module.v_proj(rows)
    future = torch.full((length, length), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
    outputs = []
    for head in range(module.num_heads):
        part = slice(head * module.head_dim, (head + 1) * module.head_dim)
        past = query[..., part].flatten(0, 1) @ prefix_keys[:, part].T  # (B*T, P)
        own = query[..., part] @ key[..., part].transpose(1, 2) + future  # (B, T, T)
        weights = torch.cat([past, own.flatten(0, 1)], dim=1).softmax(dim=1)
        past, own = weights.split([past.size(1), length], dim=1)
        seen = (own.unflatten(0, (batch, length)) @ value[..., part]).flatten(0, 1)
        outputs.append(torch.addmm(seen, past, prefix_values[:, part]))
    output = module.out_proj(torch.cat(outputs, dim=1))  # (B*T, d)
    return output.view(batch, length, width).transpose(0, 1), key, value


@contextmanager
def positions_from(decoder: nn.Module, start: int) -> Iterator[None]:
    """Make the decoder number the positions of its tokens from `start`.

    Reads the rows of the table directly: fairseq's sinusoidal module cannot run under functorch, and neither it nor
    the learned one takes an offset.
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
def _replaced_attention(
    decoder: nn.Module, attend: Callable[[MultiheadAttention, int, Tensor], Tensor]
) -> Iterator[None]:
    """Let `attend(module, layer, x)` stand in for the forward method of every self-attention module."""
    modules = attention_modules(decoder)
    for layer, module in enumerate(modules):

        def forward(query: Tensor, *_: object, _module=module, _layer=layer, **__: object) -> tuple[Tensor, None]:
            return attend(_module, _layer, query), None

        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward
