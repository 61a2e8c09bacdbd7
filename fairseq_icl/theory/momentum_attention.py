"""Attention with momentum: what the analogy between attention and gradient descent suggests.

Dai et al. (2023, arXiv 2212.10559, section 5.2). If attention to earlier tokens is a sum of updates, momentum is an
exponentially decaying sum of the earlier values, added to it:

    MoAttn(q_t) = sum_{i <= t} softmax_i(q_t . k_i / sqrt(D)) v_i + m_t,      m_t = sum_{i < t} eta^(t-i) v_i

The authors released no code. The sum follows m_{t+1} = eta (m_t + v_t). Here it is a scan by doubling: if s_t holds
the decayed sum over the last 2^j values, then s_t + eta^(2^j) s_{t-2^j} holds it over the last 2^(j+1), so log2(T)
additions of whole tensors replace T steps in Python, nothing is divided by a power of eta, and no (T x T) matrix is
needed. eta may be one number or one per head, and may be learned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_icl.errors import UserError


def decayed_sum(values: Tensor, eta: float | Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """m_t = sum_{i < t} eta^(t-i) v_i, the value of t itself excluded.

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
