"""Agreement of two rankings: top-k recall and Kendall's tau-b, for many pairs of rankings at once."""

import numpy as np
import torch
from torch import Tensor

from fairseq_icl.metrics.registry import Similarity

PAIRS_AT_ONCE = 1 << 20  # comparisons that `_inversions` holds at a time, one byte each: what a cache takes


def top_k_recall(reference: Tensor, other: Tensor, k: int) -> Tensor:
    """|top k of reference & top k of other| / k along the last dimension: (..., T), (..., T) -> (...)"""
    return (top_k(reference, k) & top_k(other, k)).double().sum(-1) / k


def top_k(weights: Tensor, k: int) -> Tensor:
    """Whether each weight is among the k largest of its row; of equal weights the first wins. (..., T) -> (..., T)"""
    largest = weights.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, largest, True)


def kendall(a: Tensor, b: Tensor) -> Similarity:
    """tau-b = (concordant - discordant) / sqrt(pairs untied in a * pairs untied in b) along the last dimension.

    (..., T), (..., T) -> (...). Defined as 0, and counted, where all of a or all of b is tied.

    Sorted by a, and by b where a is tied, the discordant pairs are the inversions of b (Knight 1966); all other
    numbers follow from counting ties.
    """
    shape, size = a.shape[:-1], a.shape[-1]
    rank_a, rank_b = dense_rank(a.reshape(-1, size)), dense_rank(b.reshape(-1, size))  # (rows, T)
    by_a_then_b = rank_a * size + rank_b
    discordant = _inversions(rank_b.gather(-1, by_a_then_b.argsort(dim=-1)))  # (rows,)
    pairs = size * (size - 1) / 2
    untied_a, untied_b = pairs - _tied_pairs(rank_a), pairs - _tied_pairs(rank_b)
    comparable = untied_a + untied_b - pairs + _tied_pairs(dense_rank(by_a_then_b))  # tied in neither
    norm = torch.sqrt(untied_a * untied_b)
    all_tied = norm == 0
    value = (comparable - 2 * discordant) / torch.where(all_tied, 1.0, norm)
    return Similarity(value.reshape(shape), all_tied.long().reshape(shape))


def dense_rank(values: Tensor) -> Tensor:
    """0 for the smallest value of a row, equal for equal values, without gaps. (rows, T) -> (rows, T) int64"""
    ordered, order = values.sort(dim=-1)
    steps = torch.zeros_like(order)
    steps[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(order).scatter_(-1, order, steps.cumsum(-1))


def _tied_pairs(rank: Tensor) -> Tensor:
    """Number of pairs of equal rank: (rows, T) -> (rows,)"""
    sizes = torch.zeros_like(rank).scatter_add_(-1, rank, torch.ones_like(rank))
    return (sizes * (sizes - 1)).sum(-1).double() / 2


def _inversions(sequence: Tensor) -> Tensor:
    """Number of pairs i < j with sequence[i] > sequence[j]: (rows, T) -> (rows,)

    All pairs are compared in small integers, in numpy, whose broadcast comparison is ten times faster than torch's.
    """
    numbers = sequence.cpu().numpy().astype(np.int16 if sequence.shape[-1] < 2**15 else np.int32)
    size = numbers.shape[-1]
    later = np.triu(np.ones((size, size), dtype=bool), 1)
    counts = []
    for part in np.array_split(numbers, 1 + numbers.size * size // PAIRS_AT_ONCE):
        inverted = (part[:, :, None] > part[:, None, :]) & later  # (rows, T, T)
        counts.append(np.einsum("rij->r", inverted.view(np.int8), dtype=np.int32))  # quicker than count_nonzero
    return torch.from_numpy(np.concatenate(counts)).double()
