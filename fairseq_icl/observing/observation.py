"""What one condition (ZSL, ICL or FT) showed on n examples; large tensors of it are mapped from a file.

So memory does not grow with the validation set: whatever handles a whole one does it `AT_ONCE` examples at a time. The
file has no name, lies in the folder that TMPDIR says, and vanishes with the last tensor on it.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of
from fairseq_icl.observing.activations import Activations

AT_ONCE = 64  # examples that are in memory together
FILLED = {"attention_row": (True, 0.0), "option_logprobs": (False, -torch.inf), "depth_scores": (False, -torch.inf)}
"""Fields as wide as the longest row or the most options, filled up with: on the left?, the value."""
LARGE = 2**20  # bytes from which a tensor is kept in a file


class TensorStore:
    """A tensor of zeros to be written into; it may be in a file."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._file: mmap.mmap | None = None
        size = prod(shape) * dtype.itemsize
        if size < LARGE:
            self.tensor = torch.zeros(tuple(shape), dtype=dtype)
            return
        try:
            with tempfile.TemporaryFile(prefix="fairseq-icl-") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a disk that fills up later would end the process (SIGBUS)
                self._file = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise UserError(
                f"no room for {size / 2**20:.0f} MiB of what is observed in the folder of temporary files "
                f"({reason_of(error)}); free some space there, or let TMPDIR name a folder on another disk"
            ) from error
        self.tensor = torch.frombuffer(self._file, dtype=dtype).view(tuple(shape))  # keeps the mapping

    def release(self) -> None:
        """Give back the memory behind what was read or written; the file keeps the numbers."""
        if self._file is not None:
            self._file.madvise(mmap.MADV_DONTNEED)  # of a shared mapping this loses nothing


@dataclass(frozen=True)
class Observation:
    """n examples, C options, L layers, H heads, width d, up to Q query tokens, context of P tokens. CPU, fp32."""

    row: Tensor  # (n,) row of the data file
    gold: Tensor  # (n,) index of the right option
    option_logprobs: Tensor  # (n, C) mean log-probability of the label's tokens; -inf where there is no such option
    prediction: Tensor  # (n,) first best option
    attention_output: Tensor  # (n, L, d) with output projection and bias, before the residual
    attention_row: Tensor  # (n, L, H, Q) scores before the softmax over the query tokens; zeros on the left
    query_length: Tensor  # (n,) how many of the Q columns, from the right, are real
    query_vector: Tensor  # (n, L, d) scaled by head_dim ** -0.5, heads concatenated
    head_output: Tensor | None = None  # (n, L, H, D) of each head, before the output projection (head_outputs=recorded)
    context_row: Tensor | None = None  # (n, L, P) scores over the context, summed over the heads
    label_prior: Tensor | None = None  # (n, C) log of the options' mean probability on inputs without content
    label_prior_normalised: Tensor | None = None  # (n, C) the same, made shares of 1 at every input before the mean
    demonstration_logprob: Tensor | None = None  # (n,) mean over tokens that fine-tuning on it would score (not ICL)
    depth_scores: Tensor | None = None  # (n, L, C) of the model cut after each layer; the last is option_logprobs
    top_tokens: Tensor | None = None  # (n, K) the most likely next tokens where the label (of option 0) begins
    top_logprobs: Tensor | None = None  # (n, K) their log-probabilities, largest first
    training_queries: Mapping[int, Tensor] | None = None
    """Of a fine-tuned model: row of the train file -> query vectors (L, tokens, d) recorded before learning from it."""
    method: str = "none"  # how the model was fine-tuned
    init: str = "pretrained"  # what was kept of its checkpoint
    precision: str = "fp32"  # in which the model computed; the tensors here are fp32, of values that this precision has
    device: str = "cpu"  # where the model computed it, and where metrics of it are computed
    skipped_updates: int = 0  # steps that fine-tuning left out: their gradients overflowed
    activations: Activations | None = None  # at other tokens, if `observe` was asked for them; not in a part of it
    stores: tuple[TensorStore, ...] = field(default=(), repr=False, compare=False)  # of its tensors, by `Gathering`

    def __repr__(self) -> str:
        (layers, width), options = self.attention_output.shape[1:], self.option_logprobs.shape[1]
        parts = f"{len(self)} examples, {options} options, {layers} layers of width {width}"
        accuracy = float((self.prediction == self.gold).double().mean()) if len(self) else float("nan")
        return f"Observation({parts}, accuracy {accuracy:.2f}, method {self.method})"

    def __len__(self) -> int:
        return len(self.row)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that hold one entry per example, by name; what was not observed is left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def take(self, index: Tensor | Sequence[int]) -> "Observation":
        """The chosen examples, in that order."""
        chosen = torch.as_tensor(index, dtype=torch.long)
        if len(chosen) > AT_ONCE:
            gathering = Gathering(len(chosen))
            for places in torch.arange(len(chosen)).split(AT_ONCE):
                gathering.put(places, self.take(chosen[places]))
            return gathering.observation()
        taken: dict[str, Any] = {}
        for name, value in self.tensors().items():
            taken[name] = value[chosen]
            self.release()
        return replace(self, **taken, activations=None, stores=())

    def between(self, start: int, stop: int) -> "Observation":
        """The examples from `start` to before `stop`, as views: nothing is copied."""
        some: dict[str, Any] = {name: value[start:stop] for name, value in self.tensors().items()}
        return replace(self, **some, activations=None, stores=())

    def on(self, device: torch.device | str) -> "Observation":
        """The same with its tensors on a device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved, stores=())

    def parts(self) -> Iterator[tuple[int, "Observation"]]:
        """All examples, some at a time: the number of the first, and the part."""
        for places in torch.arange(len(self)).split(AT_ONCE):
            yield int(places[0]), self.take(places)

    def release(self) -> None:
        """Give back the memory behind what was looked at; nothing is lost."""
        for store in self.stores:
            store.release()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"stores": ()}  # a copy, or what another process gets, is in memory


class Gathering:
    """An observation of n examples that comes part by part, each example to its own place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._stores: dict[str, TensorStore] = {}
        self._first: Observation | None = None

    def put(self, places: Tensor, part: Observation) -> None:
        """Take in the examples of a part; `places` (n,) are their positions."""
        if self._first is None:
            self._first = part.take([])  # what is not by example
        for name, value in part.tensors().items():
            store = self._stores.get(name)
            if store is None or (name in FILLED and value.size(-1) > store.tensor.size(-1)):
                wider = TensorStore((self.size, *value.shape[1:]), value.dtype)
                for some in torch.arange(self.size).split(AT_ONCE):
                    if store is not None:
                        wider.tensor[some] = _filled_up(name, store.tensor[some], value.size(-1))
                        wider.release()
                        store.release()
                self._stores[name] = store = wider
            store.tensor[places] = _filled_up(name, value, store.tensor.size(-1))
            store.release()

    def observation(self) -> Observation:
        """All of them; what the parts share is the first one's."""
        if self._first is None:
            raise ValueError("nothing was gathered")
        tensors: dict[str, Any] = {name: store.tensor for name, store in self._stores.items()}
        return replace(self._first, **tensors, stores=tuple(self._stores.values()))


def _filled_up(name: str, value: Tensor, width: int) -> Tensor:
    """(n, ..., fewer) -> (n, ..., width)"""
    if name not in FILLED:
        return value
    on_the_left, filling = FILLED[name]
    missing = width - value.size(-1)
    return F.pad(value, (missing, 0) if on_the_left else (0, missing), value=filling)


def concatenate(observations: Sequence[Observation]) -> Observation:
    """Observations of the same condition joined; rows and options are filled up to the largest."""
    gathering, done = Gathering(sum(map(len, observations))), 0
    for _, part in chain.from_iterable(one.parts() for one in observations):
        gathering.put(torch.arange(done, done + len(part)), part)
        done += len(part)
    return gathering.observation()
