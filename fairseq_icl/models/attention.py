"""Other rules of attention than softmax alone, for any decoder here: linear attention and momentum attention.

With q_t, k_i, v_i the queries (scaled), keys and values of one head and tokens i <= t, ordinary attention puts out
sum_i softmax_i(q_t . k_i) v_i. A `Rule` changes this in one or both of two ways:

    linear       sum_i (q_t . k_i) v_i, queries unscaled     the papers' relaxation (Dai et al. 2023, section 3)
    momentum     + sum_{i < t} eta^(t-i) v_i                 their momentum attention (the same, section 5.2)

`set_rule` gives a decoder its rule: a pretrained one the setting `attention`, and the model `attention_lm`, which is
fairseq's `transformer_lm` with this choice, the one it is trained with. Shapes: B sequences, H heads, T tokens, D the
width of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_icl.errors import UserError


def decayed_sum(values: Tensor, eta: float | Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """m_t = sum_{i < t} eta^(t-i) v_i, the value of t itself excluded.

    The sum follows m_{t+1} = eta (m_t + v_t). Here it is a scan by doubling: if s_t holds the decayed sum over the last
    2^j values, then s_t + eta^(2^j) s_{t-2^j} holds it over the last 2^(j+1), so log2(T) additions of whole tensors
    replace T steps in Python, nothing is divided by a power of eta, and no (T x T) matrix is needed.

    Args:
        values: (..., T, D); set those of padding to zero, they then add nothing.
        eta: in [0, 1); a number, or a tensor that broadcasts to (..., 1, 1), such as (H, 1, 1).
        state: (..., 1, D), what an earlier call returned as state, to go on behind its tokens; none at the beginning.

    Returns:
        The sums (..., T, D) and the state behind the last token, which is the m of the token that comes next.
    """
    rate = torch.as_tensor(eta, dtype=values.dtype, device=values.device)
    if bool((rate < 0).any()) or bool((rate >= 1).any()):
        raise UserError(f"momentum {eta}: must be at least 0 and below 1, or the sum does not decay")
    length = values.shape[-2]
    total = values if state is None else torch.cat([values[..., :1, :] + state, values[..., 1:, :]], dim=-2)
    reach = 1
    while reach < length:
        total = total + rate**reach * F.pad(total[..., :-reach, :], (0, 0, reach, 0))
        reach *= 2
    shifted = rate * total  # (..., T, D) of the token after t
    first = torch.zeros_like(values[..., :1, :]) if state is None else state
    return torch.cat([first, shifted[..., :-1, :]], dim=-2), shifted[..., -1:, :]


@dataclass(frozen=True)
class Rule:
    """How a head makes its output of queries, keys and values."""

    linear: bool = False
    """Without softmax; the queries are then unscaled, for which `set_rule` sees to."""
    momentum: float = 0.0
    """eta; 0: none."""

    @property
    def is_ordinary(self) -> bool:
        """Whether this is softmax attention and nothing else."""
        return not self.linear and self.momentum == 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
        """Every token to itself and its past: (B, H, T, D) each -> (B, H, T, D).

        `dropout` is that of softmax's weights; linear attention has none.
        """
        if self.linear:
            attended = (query @ key.transpose(2, 3)).tril() @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=1.0)
        return attended + decayed_sum(value, self.momentum)[0] if self.momentum else attended


ORDINARY = Rule()


def rule_of(module: Any) -> Rule:
    """The rule of an attention module; fairseq's own has none but the ordinary one."""
    rule: Rule = getattr(module, "rule", ORDINARY)
    return rule


def projected(module: Any, x: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (scaled), keys and values of fairseq's attention, (B, H, T, D) each, for what it receives, x (T, B, d).

    Where x starts plays no part in it. They are views of (T, B, H, D): the products read x as it lies in memory, and
    nothing is copied.
    """
    heads = (module.num_heads, module.head_dim)
    query, key, value = module.q_proj(x) * module.scaling, module.k_proj(x), module.v_proj(x)
    query, key, value = (part.unflatten(2, heads).permute(1, 2, 0, 3) for part in (query, key, value))
    return query, key, value


class RuledAttention(nn.Module):
    """fairseq's causal self-attention under another rule, with its parameters and their names.

    It answers the instrument's one question itself (`queries_keys_values`), as any other family's attention does.
    """

    self_attention = True

    def __init__(self, plain: MultiheadAttention, rule: Rule) -> None:
        super().__init__()
        if not plain.self_attention or plain.bias_k is not None or plain.add_zero_attn or plain.use_xformers:
            raise UserError("attention: the model's self-attention has extras (biases, xformers) beside softmax")
        self.rule = rule
        self.num_heads, self.head_dim = plain.num_heads, plain.head_dim
        self.scaling: float = plain.scaling
        self.dropout: float = plain.dropout_module.p
        self.k_proj, self.v_proj, self.q_proj = plain.k_proj, plain.v_proj, plain.q_proj
        self.out_proj = plain.out_proj

    def queries_keys_values(self, x: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (scaled), keys and values of x (T, B, d): (B, H, T, D) each; `start`, the position, plays no part."""
        return projected(self, x, start)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attention of `query` (T, B, d) to itself and its past, with output projection: (T, B, d).

        `key` and `value` are there for fairseq's way of calling and must be the same tensor. Padding may only fill up
        sequences on the right, where nothing sees it.
        """
        if incremental_state is not None:
            raise UserError("linear and momentum attention keep no incremental state: fairseq-generate cannot use them")
        if key_padding_mask is not None and bool(key_padding_mask[:, 0].any()):
            raise UserError("linear and momentum attention want sequences filled up on the right, not on the left")
        attended = self.rule.attend(*self.queries_keys_values(query, 0), self.dropout if self.training else 0.0)
        return self.out_proj(attended.permute(2, 0, 1, 3).flatten(2)), None

    def _get_input_buffer(self, incremental_state: Any) -> dict[str, Tensor]:
        """fairseq's decoder layer asks for this before every pass; see `forward` for why it is always empty."""
        return {}


def set_rule(decoder: Any, rule: Rule) -> None:
    """Let the self-attention of every layer follow `rule`; parameters and their names stay as they are."""
    if rule.is_ordinary:
        return
    for layer in decoder.layers:
        if isinstance(layer.self_attn, MultiheadAttention):
            layer.self_attn = RuledAttention(layer.self_attn, rule)
        else:
            layer.self_attn.rule = rule
        if rule.linear:
            layer.self_attn.scaling = 1.0


@contextmanager
def relaxed(decoder: Any) -> Iterator[None]:
    """While open, the decoder's attention is linear; whatever else its rule says stays."""
    before = [(layer, layer.self_attn, rule_of(layer.self_attn), layer.self_attn.scaling) for layer in decoder.layers]
    set_rule(decoder, replace(before[0][2], linear=True))
    try:
        yield
    finally:
        for layer, module, rule, scaling in before:
            layer.self_attn = module
            module.scaling = scaling
            if not isinstance(module, MultiheadAttention):
                module.rule = rule
