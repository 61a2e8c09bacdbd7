"""Seconds, peak memory and the machine's own speed."""

import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from fairseq_icl.bench.shapes import Shape

GEMM_FLOPS = 2e11
"""Operations spent on measuring the rate of matrix products: a few seconds."""


def interleave(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best seconds of each way: all run once a round, so that a busy machine slows them alike.

    The best and not the mean, because whatever else the machine does can only add.
    """
    best = dict.fromkeys(ways, float("inf"))
    gc.collect()
    for _ in range(rounds):
        for name, way in ways.items():
            best[name] = min(best[name], seconds(way))
    return best


def seconds(way: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = clock()
    way()
    return clock() - start


def clock() -> float:
    """Wall-clock time; with a single thread (OMP_NUM_THREADS=1) processor time, which other programs hardly disturb."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@torch.no_grad()
def gemm_rate(shape: Shape, rows: int) -> float:
    """Floating-point operations per second of bare fp32 matrix products: `rows` tokens through a feed-forward block.

    Several pairs of matrices take turns, so that, as in a model, weights come from memory and not from the cache. A
    pair is over in milliseconds, so that among many rounds some are not interrupted.
    """
    pairs = [(torch.randn(4 * shape.width, shape.width), torch.randn(shape.width, 4 * shape.width)) for _ in range(4)]
    inputs = torch.randn(rows, shape.width)
    inner, outer = torch.empty(rows, 4 * shape.width), torch.empty(rows, shape.width)

    def multiply(up: torch.Tensor, down: torch.Tensor) -> None:
        torch.mm(inputs, up.T, out=inner)
        torch.mm(inner, down.T, out=outer)

    flops = len(pairs) * 2 * (2 * rows * 4 * shape.width**2)
    rounds = int(min(50, max(4, GEMM_FLOPS / flops)))
    return flops / sum(interleave({str(i): partial(multiply, *pair) for i, pair in enumerate(pairs)}, rounds).values())


def peak_bytes_of(way: Callable[[], object]) -> int:
    """How far the resident memory of this process rises above its present size while `way` runs (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    way()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """A memory figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
