"""Attention with momentum: what the analogy between attention and gradient descent suggests.

Dai et al. (2023, arXiv 2212.10559, section 5.2). If attention to earlier tokens is a sum of updates, momentum is an
exponentially decaying sum of the earlier values, added to it:

    MoAttn(q_t) = sum_{i <= t} softmax_i(q_t . k_i / sqrt(D)) v_i + m_t,      m_t = sum_{i < t} eta^(t-i) v_i

The authors released no code. The sum is a scan, `models.attention.decayed_sum`, which the model `attention_lm` uses as
well; here eta may be one number or one per head, and may be learned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_icl.models.attention import decayed_sum

__all__ = ["decay_matrix", "decayed_sum", "momentum_attention"]


def decay_matrix(length: int, eta: float | Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """eta^(t-i) for i < t, else 0: (T, T); `decay_matrix @ values` is the same sum, for reading and for short T"""
    distance = torch.arange(length)[:, None] - torch.arange(length)  # (T, T) t - i
    powers = torch.as_tensor(eta, dtype=dtype) ** distance.clamp_min(1)
    return torch.where(distance > 0, powers, torch.zeros_like(powers))


def momentum_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eta: float | Tensor,
    past: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Causal softmax attention plus momentum.

    Args:
        query, key, value: (B, H, T, D) each, of the new tokens; queries unscaled.
        eta: as in `decayed_sum`; 0 is ordinary attention.
        past: what the call for the earlier tokens returned, for incremental decoding.

    Returns:
        The outputs (B, H, T, D), and (keys, values, momentum state) of all tokens so far.
    """
    state = None
    keys, values = key, value
    if past is not None:
        keys, values, state = torch.cat([past[0], key], dim=-2), torch.cat([past[1], value], dim=-2), past[2]
    new, all_tokens = query.shape[-2], keys.shape[-2]
    visible = torch.ones(new, all_tokens, dtype=torch.bool, device=query.device).tril(all_tokens - new)
    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
    momentum, state = decayed_sum(value, eta, state)
    return attended + momentum, (keys, values, state)
