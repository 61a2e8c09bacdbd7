"""Cosines, of updates only where there is one, and random vectors addressed by example.

The cosine with a zero vector is 0, and such cases can be counted; that of an update which is not above the rounding of
the states it is the difference of is not a number, and counted likewise.

Random numbers are the same however the examples are batched, ordered or spread over processes: each is a hash
(splitmix64) of a stream name, the example's position in the validation set and the component, so baselines need no
generator state and a repeated run writes the same bytes.

So are all values: an example's is the same to the last bit whatever examples stand beside it. The sum of a row does not
depend on other rows, but on the row's width; where that is the longest example's, `log_shares` adds from left to right,
and rows are filled up to whole `STEP`s elsewhere.

Everything here runs on the device of its tensors. On a CPU numpy takes part: its products of rows are made by BLAS in
one pass, and its draws are several times as fast as torch's.
"""

import math
import zlib
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_icl.metrics import Similarity

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment and its two multipliers
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
UNITS = 256
"""Units in the last place of fp32 below which a change is rounding. Rotary scores should not change at all when a query
moves behind 800 tokens, and change by up to 60 units: the positions' angles are rounded."""
CELLS = 2**16
FAR = 2.6
"""The normal quantile is taken as straight in each of so many cells of [0, 1], which is right to 1e-6 up to here; for
one number in a hundred, beyond, it is computed."""
CACHED = 2**16  # numbers of one tensor that metrics take at a time: what fits into a processor's cache
STEP = 32  # numbers that BLAS multiplies and adds in one turn: zeros in front that fill whole turns change no bit
STRETCH = 1024  # numbers whose squares are added up together in fp32


def dots(*pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """a.b of several pairs along the last dimension: (..., d), (..., d) -> (...) each"""
    if pairs[0][0].is_cuda:
        return tuple((a * b).sum(-1) for a, b in pairs)
    arrays = {id(tensor): tensor.numpy() for pair in pairs for tensor in pair}
    with np.errstate(invalid="ignore", over="ignore"):  # as torch: numbers of a model that diverged
        return tuple(torch.from_numpy(np.asarray(np.vecdot(arrays[id(a)], arrays[id(b)]))) for a, b in pairs)


def in_parts(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What `function` makes of tensors (n, ...), a few examples at a time, joined; a GPU takes all at once."""
    numbers = max(1, tensors[0][:1].numel())
    some = len(tensors[0]) if tensors[0].is_cuda else max(1, CACHED // numbers)
    parts = [function(*given) for given in zip(*(tensor.split(some) for tensor in tensors), strict=True)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class Remembered:
    """A function with its last results kept: metrics that follow each other ask it about the same observations."""

    def __init__(self, function: Callable[..., Any], size: int) -> None:
        self.function, self.last = function, deque[tuple[tuple[Any, ...], Any]](maxlen=size)

    def __call__(self, *given: Any) -> Any:
        for known, result in self.last:
            if len(known) == len(given) and all(a is b for a, b in zip(known, given, strict=True)):
                return result
        return self.keep(given, self.function(*given))

    def keep(self, given: tuple[Any, ...], result: Any) -> Any:
        """Take in a result that was found on the way to another."""
        self.last.append((given, result))
        return result


def remembered(size: int) -> Callable[[Callable[..., Any]], Remembered]:
    """The decorated function remembers so many results."""
    return lambda function: Remembered(function, size)


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


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| over all entries of tensors of one shape; |value| if the reference is zero."""
    scale, distance = l2_norm(reference), l2_norm(value - reference)
    return float(distance / scale) if scale > 0 else float(distance)


def log_shares(scores: Tensor) -> Tensor:
    """log softmax over the options, -inf where an example has fewer; free of how many others have. (..., C) float64"""
    scores = scores.double()
    above = scores - scores.amax(-1, keepdim=True)
    # Added from left to right, where zeros at the end change no bit: the order of `sum` depends on the width.
    return above - above.exp().cumsum(-1)[..., -1:].log()


def cosine(a: Tensor, b: Tensor) -> Similarity:
    """a.b / (|a| |b|) along the last dimension; 0 where a or b is the zero vector.

    Works in float64: an update is a small difference of large vectors, and its square must not underflow.
    Both papers' code gives 0 for a zero vector too, by a floor under the product of the norms.
    """
    a, b = a.double(), b.double()  # (..., d)
    return cosine_of(*dots((a, b), (a, a), (b, b)))


def cosine_of(product: Tensor, a: Tensor, b: Tensor) -> Similarity:
    """The same, from the products a.b, a.a and b.b. (...) each, float64"""
    lengths = (a.sqrt(), b.sqrt())
    norms = lengths[0] * lengths[1]
    zero = norms == 0
    value = product / torch.where(zero, 1.0, norms)
    return Similarity(value.clamp(-1, 1), zero.long(), lengths)


def where_defined(similarity: Similarity, noise: Tensor) -> Similarity:
    """The cosine of two updates, but NaN, and counted, where `noise` (...) says so or one of them is 0."""
    assert similarity.lengths is not None
    undefined = noise | (similarity.zero_updates > 0)
    value, *lengths = (part.masked_fill(undefined, torch.nan) for part in (similarity.value, *similarity.lengths))
    return Similarity(value, undefined.long(), (lengths[0], lengths[1]))


def rounding_of(*observations: object) -> float:
    """The change of a vector, in units of its length, that may be rounding in the lowest of their precisions."""
    kinds = {"fp32": 0.0, "fp16": 2 * torch.finfo(torch.float16).eps, "bf16": 2 * torch.finfo(torch.bfloat16).eps}
    lowest = max(kinds.get(getattr(seen, "precision", "fp32"), 0.0) for seen in observations)
    return UNITS * torch.finfo(torch.float32).eps + lowest


def mean_over_heads(similarity: Similarity) -> Similarity:
    """(n, layers, heads) -> (n, layers): cosines averaged over the heads that have one, lengths theirs together."""
    undefined = similarity.value.isnan()
    lengths = similarity.lengths
    if lengths is not None:
        first, second = (torch.linalg.vector_norm(length.masked_fill(undefined, 0.0), dim=-1) for length in lengths)
        nowhere = undefined.all(-1)
        lengths = (first.masked_fill(nowhere, torch.nan), second.masked_fill(nowhere, torch.nan))
    # Not nanmean, whose sum has another order of additions.
    value = torch.where(undefined.any(-1), similarity.value.nanmean(-1), similarity.value.mean(-1))
    return Similarity(value, similarity.zero_updates.sum(-1), lengths)


def uniform(example: Tensor, shape: tuple[int, ...], stream: str) -> Tensor:
    """Independent uniform numbers on [0, 1): (n,) example positions -> (n, *shape) float64."""
    if example.is_cuda:
        return _drawn_by_torch(example, shape, stream)
    return torch.from_numpy(_shares(_bits(tuple(example.tolist()), shape, stream)))


def uniform_float32(example: Tensor, shape: tuple[int, ...], stream: str) -> Tensor:
    """The same, rounded to float32 (and so at most 1)."""
    if example.is_cuda:
        return uniform(example, shape, stream).float()
    halves = _bits(tuple(example.tolist()), shape, stream).view(np.uint32)[..., 1::2]
    return torch.from_numpy(halves.astype(np.float32)).mul_(2.0**-32)


def gaussian(example: Tensor, shape: tuple[int, ...], stream: str) -> Tensor:
    """Independent standard normal numbers: (n,) example positions -> (n, *shape) float32, quantiles of uniform ones."""
    if example.is_cuda:
        return _quantile(_drawn_by_torch(example, shape, stream)).float()
    bits = _bits(tuple(example.tolist()), shape, stream).reshape(-1)
    cell, within = (bits >> np.uint64(48)).view(np.int64), bits.view(np.uint16)[2::4]  # the first 16 bits, the next 16
    starts, slopes = _quantile_cells()
    numbers = slopes.take(cell)
    numbers *= within
    numbers += starts.take(cell)
    tails = np.flatnonzero(np.abs(numbers) > FAR)
    numbers[tails] = _quantile(torch.from_numpy(_shares(bits[tails]))).numpy()
    return torch.from_numpy(numbers.reshape(len(example), *shape))


def _quantile(shares: Tensor) -> Tensor:
    """Of the normal distribution, float64; at 0 it would be -inf."""
    return torch.special.ndtri(shares.clamp_min(2.0**-54))


@lru_cache(maxsize=1)
def _quantile_cells() -> tuple[np.ndarray, np.ndarray]:
    """The quantile where each cell begins, and what it grows by in every part in 2^16 of it: (CELLS,) float32 each"""
    ends = torch.special.ndtri(torch.arange(CELLS + 1, dtype=torch.float64) / CELLS).clamp(-9, 9).numpy()
    return ends[:-1].astype(np.float32), (np.diff(ends) / 2**16).astype(np.float32)


@lru_cache(maxsize=2)  # the metrics of uniform and of normal updates follow each other and use the same draws
def _bits(example: tuple[int, ...], shape: tuple[int, ...], stream: str) -> np.ndarray:
    """(n, *shape) uint64; not to be written into"""
    first = np.array(example, dtype=np.uint64) + np.uint64(zlib.crc32(stream.encode()) << 32)
    return _mix(_mix(first)[:, None] + _counter(math.prod(shape))).reshape(len(example), *shape)


@lru_cache(maxsize=4)
def _counter(size: int) -> np.ndarray:
    return np.arange(1, size + 1, dtype=np.uint64) * GOLDEN_GAMMA


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 on an array of uint64."""
    state = state ^ (state >> np.uint64(30))
    for multiplier, shift in zip(MULTIPLIERS, (27, 31), strict=True):
        state *= multiplier
        state ^= state >> np.uint64(shift)
    return state


def _shares(bits: np.ndarray) -> np.ndarray:
    """The first 53 of 64 bits as a number in [0, 1)."""
    return (bits >> np.uint64(11)).view(np.int64).astype(np.float64) * 2.0**-53


def _drawn_by_torch(example: Tensor, shape: tuple[int, ...], stream: str) -> Tensor:
    """`uniform` on the device of `example`: the same 64 bits as int64, whose sums and products wrap alike."""

    def shifted(bits: Tensor, by: int) -> Tensor:  # to the right, zeros moving in: torch moves in the sign
        return (bits >> by) & (2 ** (64 - by) - 1)

    def mix(state: Tensor) -> Tensor:
        state = state ^ shifted(state, 30)
        for multiplier, shift in zip(MULTIPLIERS, (27, 31), strict=True):
            state = state * int(multiplier.astype(np.int64))
            state = state ^ shifted(state, shift)
        return state

    first = mix(example + int(np.uint64(zlib.crc32(stream.encode()) << 32).astype(np.int64)))
    counter = torch.arange(1, math.prod(shape) + 1, device=example.device) * int(GOLDEN_GAMMA.astype(np.int64))
    return shifted(mix(first[:, None] + counter), 11).double().view(len(example), *shape) * 2.0**-53
