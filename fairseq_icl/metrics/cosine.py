"""Cosines that are defined everywhere: the cosine with a zero vector is 0, and such cases can be counted."""

import torch
from torch import Tensor

from fairseq_icl.metrics.registry import Similarity


def cosine(a: Tensor, b: Tensor) -> Similarity:
    """a.b / (|a| |b|) along the last dimension; 0 where a or b is the zero vector.

    Works in float64: an update is a small difference of large vectors, and its square must not underflow.
    Both papers' code gives 0 for a zero vector too, by a floor under the product of the norms.
    """
    a, b = a.double(), b.double()  # (..., d)
    norms = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)  # (...)
    zero = norms == 0
    value = (a * b).sum(-1) / torch.where(zero, 1.0, norms)
    return Similarity(value.clamp(-1, 1), zero.long())


def unit(vector: Tensor) -> Tensor:
    """x / |x| along the last dimension; the zero vector stays zero. (..., d) -> (..., d) float64"""
    vector = vector.double()
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return vector / torch.where(norm == 0, 1.0, norm)


def mean_over_heads(similarity: Similarity) -> Similarity:
    """(n, layers, heads) -> (n, layers): cosines averaged, zero updates added."""
    return Similarity(similarity.value.mean(-1), similarity.zero_updates.sum(-1))
