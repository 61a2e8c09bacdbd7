"""Where the numbers of many examples live: in memory while they are few, else in a file that is mapped.

The file has no name, lies in the folder that TMPDIR says, and vanishes with the last tensor on it. Its tensors are like
any others; `Room.release` takes what was touched of them out of memory, and the next look brings it back.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from math import prod

import torch

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of

LARGE = 2**20
"""Bytes from which a tensor is kept in a file."""


class Room:
    """A tensor of zeros to be written into; it may be in a file."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._file: mmap.mmap | None = None
        if prod(shape) * dtype.itemsize < LARGE:
            self.tensor = torch.zeros(tuple(shape), dtype=dtype)
        else:
            self._file = _mapped(prod(shape) * dtype.itemsize)
            self.tensor = torch.frombuffer(self._file, dtype=dtype).view(tuple(shape))  # keeps the mapping

    def release(self) -> None:
        """Give back the memory behind what was read or written; the file keeps the numbers."""
        if self._file is not None:
            self._file.madvise(mmap.MADV_DONTNEED)  # of a shared mapping this loses nothing


def _mapped(size: int) -> mmap.mmap:
    """A new file of so many bytes, all of them reserved: a disk that fills up later would end the process (SIGBUS)."""
    try:
        with tempfile.TemporaryFile(prefix="fairseq-icl-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f"no room for {size / 2**20:.0f} MiB of what is observed in the folder of temporary files "
            f"({reason_of(error)}); free some space there, or let TMPDIR name a folder on another disk"
        ) from error
