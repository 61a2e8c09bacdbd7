"""Attention to demonstrations as a change of weights: exact without softmax, measurable with it.

Dai et al. (2023, arXiv 2212.10559, section 3). With the demonstrations' tokens X', the query's own tokens X and a query
vector q, one head without softmax and scale computes

    F(q) = W_V [X'; X] (W_K [X'; X])^T q = W_ZSL q + dW_ICL q
    W_ZSL = V^T K = sum_own v_t k_t^T,      dW_ICL = V'^T K' = sum_demonstrations v_i k_i^T

so the demonstrations add one matrix (`weight_update`) that does not depend on q. Softmax attention normalises over both
parts; for it another decomposition is exact, with the share s(q) of attention that demonstrations receive:

    o_ICL - o_ZSL = s(q) (o_demonstrations(q) - o_ZSL(q))

`explain` measures how much of this change dW_ICL q still explains. Shapes: H heads, D their width, n query vectors, P
demonstration tokens, T own tokens; every query vector may see all T own tokens (mask by passing fewer).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    """Queries, keys and values of some tokens, (H, tokens, D) each; queries unscaled."""

    query: Tensor
    key: Tensor
    value: Tensor


def weight_update(key: Tensor, value: Tensor) -> Tensor:
    """V^T K = sum_i v_i k_i^T: key (..., P, D), value (..., P, D) -> (..., D, D), acting on a query vector"""
    return value.transpose(-2, -1) @ key


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """sum_i softmax_i(scale q . k_i) v_i, (..., n, D), of query (..., n, D), key and value (..., P, D)

    `scale` is D ** -0.5 if not given."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax(scale * query @ key.transpose(-2, -1), dim=-1) @ value


class SoftmaxChange(NamedTuple):
    """What demonstrations do to softmax attention of n query vectors."""

    zero_shot: Tensor  # (..., n, D) output over the own tokens alone
    change: Tensor  # (..., n, D) output over both parts minus `zero_shot`
    share: Tensor  # (..., n) attention that goes to demonstrations
    demonstrations: Tensor  # (..., n, D) output over the demonstrations alone


def softmax_change(query: Tensor, own: Heads, demonstrations: Heads, scale: float | None = None) -> SoftmaxChange:
    """The change at equal queries (H, n, D) and own tokens: only the demonstrations' keys and values come or go."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    _, key, value = (torch.cat(pair, dim=-2) for pair in zip(demonstrations, own, strict=True))
    weights = torch.softmax(scale * query @ key.transpose(-2, -1), dim=-1)  # (H, n, P + T)
    zero_shot = softmax_attention(query, own.key, own.value, scale)
    only_demonstrations = softmax_attention(query, demonstrations.key, demonstrations.value, scale)
    share = weights[..., : demonstrations.key.shape[-2]].sum(-1)
    return SoftmaxChange(zero_shot, weights @ value - zero_shot, share, only_demonstrations)


class Explained(NamedTuple):
    """How well a linear part l explains a change d over n query vectors; one number per head (or per leading index)."""

    relative_error: Tensor  # |d - l| / |d| as the formula stands: the relaxation also drops the normalisation
    scale: Tensor  # the one factor that fits best, (d . l) / (l . l)
    scaled_error: Tensor  # |d - scale l| / |d|; equals sqrt(1 - cos^2) of all entries
    cosine: Tensor  # mean over the query vectors of cos(d, l): direction alone, each query on its own
    r2: Tensor  # of d = scale l + constant over the query vectors: does it follow q? nan for n = 1


def explain(change: Tensor, linear: Tensor) -> Explained:
    """A change of attention output (..., n, D), such as that of `softmax_change`, beside what a linear part predicts.

    For a whole layer pass (n, d) tensors after the output projection; then all results are single numbers.
    """
    tiny = torch.finfo(change.dtype).tiny

    def inner(first: Tensor, second: Tensor) -> Tensor:
        return (first * second).sum((-2, -1))

    def error(predicted: Tensor) -> Tensor:
        return inner(change - predicted, change - predicted).sqrt() / inner(change, change).sqrt().clamp_min(tiny)

    scale = inner(change, linear) / inner(linear, linear).clamp_min(tiny)
    centred_change, centred_linear = (part - part.mean(-2, keepdim=True) for part in (change, linear))
    spread = inner(centred_change, centred_change) * inner(centred_linear, centred_linear)
    return Explained(
        relative_error=error(linear),
        scale=scale,
        scaled_error=error(scale[..., None, None] * linear),
        cosine=torch.cosine_similarity(change, linear, dim=-1).mean(-1),
        r2=torch.where(spread > 0, inner(centred_change, centred_linear).square() / spread, torch.nan),
    )
