"""Cosines that are defined everywhere, and random vectors addressed by example.

The cosine with a zero vector is 0, and such cases can be counted. Random numbers are the same however the examples are
batched, ordered or spread over processes: each is a hash (splitmix64) of a stream name, the example's position in the
validation set and the component, so baselines need no generator state and a repeated run writes the same bytes.

So are all values: an example's is the same to the last bit whatever examples stand beside it. The sum of a row does not
depend on other rows, but on the row's width; where that is the longest example's, `sum_of_padded` adds up.
"""

import math
import zlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fairseq_icl.metrics import Similarity

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment and its two multipliers
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
STRETCH = 1024
"""Numbers whose squares are added up together in fp32."""


def sum_of_padded(values: Tensor) -> Tensor:
    """The sum along the last dimension, from left to right: zeros at either end, however many, change no bit of it.

    `sum` adds in an order that depends on the width. (..., d) -> (...)
    """
    return values.cumsum(-1)[..., -1]


def l2_norm(x: Tensor) -> Tensor:
    """Of all numbers of a tensor of any shape, in its own precision; 0-dimensional.

    Stretch by stretch: torch adds up the squares of a matrix in fp32 with an error of 1e-4 at 2048 x 2048, of 1e-2 in
    the largest.
    """
    if x.numel() <= 16 * STRETCH:
        return torch.linalg.vector_norm(x)
    numbers = x.flatten()
    even = numbers[: len(numbers) // STRETCH * STRETCH].view(-1, STRETCH)
    parts = torch.linalg.vector_norm(even, dim=1), torch.linalg.vector_norm(numbers[even.numel() :]).view(1)
    return torch.linalg.vector_norm(torch.cat(parts))


def log_shares(scores: Tensor) -> Tensor:
    """log softmax over the options, -inf where an example has fewer; free of how many others have. (..., C) float64"""
    scores = scores.double()
    above = scores - scores.amax(-1, keepdim=True)
    return above - sum_of_padded(above.exp()).log()[..., None]


def cosine(a: Tensor, b: Tensor, *, padded: bool = False) -> Similarity:
    """a.b / (|a| |b|) along the last dimension; 0 where a or b is the zero vector.

    Works in float64: an update is a small difference of large vectors, and its square must not underflow.
    Both papers' code gives 0 for a zero vector too, by a floor under the product of the norms.
    `padded`: vectors of several lengths, filled up with zeros.
    """
    a, b = a.double(), b.double()  # (..., d)
    if padded:
        product = sum_of_padded(a * b)
        lengths = (sum_of_padded(a * a).sqrt(), sum_of_padded(b * b).sqrt())  # (...) each
    else:
        product = (a * b).sum(-1)
        lengths = (torch.linalg.vector_norm(a, dim=-1), torch.linalg.vector_norm(b, dim=-1))
    norms = lengths[0] * lengths[1]
    zero = norms == 0
    value = product / torch.where(zero, 1.0, norms)
    return Similarity(value.clamp(-1, 1), zero.long(), lengths)


def unit(vector: Tensor) -> Tensor:
    """x / |x| along the last dimension; the zero vector stays zero. (..., d) -> (..., d) float64"""
    vector = vector.double()
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return vector / torch.where(norm == 0, 1.0, norm)


def mean_over_heads(similarity: Similarity) -> Similarity:
    """(n, layers, heads) -> (n, layers): cosines averaged, zero updates added, lengths those of all heads together."""
    lengths = similarity.lengths
    if lengths is not None:
        lengths = (torch.linalg.vector_norm(lengths[0], dim=-1), torch.linalg.vector_norm(lengths[1], dim=-1))
    return Similarity(similarity.value.mean(-1), similarity.zero_updates.sum(-1), lengths)


def uniform(example: Tensor, shape: tuple[int, ...], stream: str) -> Tensor:
    """Independent uniform numbers on [0, 1): (n,) example positions -> (n, *shape) float64. Not to be written into."""
    return _uniform(tuple(example.tolist()), shape, stream)


def gaussian(example: Tensor, shape: tuple[int, ...], stream: str) -> Tensor:
    """Independent standard normal numbers: (n,) example positions -> (n, *shape) float64. Not to be written into."""
    return _gaussian(tuple(example.tolist()), shape, stream)


@lru_cache(maxsize=2)  # the metrics with and without normalising follow each other and use the same draws
def _uniform(example: tuple[int, ...], shape: tuple[int, ...], stream: str) -> Tensor:
    first = np.array(example, dtype=np.uint64) + (np.uint64(zlib.crc32(stream.encode())) << np.uint64(32))
    counter = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * GOLDEN_GAMMA  # (size,)
    bits = _mix(_mix(first)[:, None] + counter)  # (n, size)
    numbers = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(numbers.reshape(len(example), *shape))


@lru_cache(maxsize=2)
def _gaussian(example: tuple[int, ...], shape: tuple[int, ...], stream: str) -> Tensor:
    """The inverse of the normal distribution function at uniform numbers, kept off 0 where it is -inf."""
    return torch.special.ndtri(_uniform.__wrapped__(example, shape, stream).clamp_min(2.0**-54))


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 on an array of uint64."""
    state = (state ^ (state >> np.uint64(30))) * MULTIPLIERS[0]
    state = (state ^ (state >> np.uint64(27))) * MULTIPLIERS[1]
    return state ^ (state >> np.uint64(31))
