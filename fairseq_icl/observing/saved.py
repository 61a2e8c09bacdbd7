"""Observations in a file (safetensors), written and read without a whole one in memory.

Tensors are named CONDITION.FIELD (`icl.attention_output`) after the fields of `Observation`. Rows of attention have no
padding there: `CONDITION.attention_row` is (layers, heads, sum of query lengths), one example after the other;
`query_length` tells where each ends.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.observing.observation import AT_ONCE, Gathering, Observation

ACTIVATIONS = (
    "attention_output",
    "attention_row",
    "query_vector",
    "head_output",
    "context_row",
    "depth_scores",
    "top_logprobs",
)
PRECISIONS = {"half": torch.float16, "single": torch.float32}
FORMAT = "fairseq_icl observations 1"
QUERIES = "training_queries"
CODES = {torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.float16: "F16"}
"""What safetensors calls the types that are written, in the order of the file: so all are aligned."""
FACTS = ("method", "init", "precision", "device", "skipped_updates")
"""What is known of a condition as a whole."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: what the file's head says of it, and the tensor if it is small."""

    kind: torch.dtype
    shape: tuple[int, ...]
    tensor: Tensor | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.kind.itemsize


def save_observations(
    path: str | Path, conditions: Mapping[str, Observation], example: Tensor | None = None, precision: str = "single"
) -> None:
    """Write the observations of some conditions; `example` (n,) are the positions in the validation set.

    Activations may be in half precision, which is what the authors recorded.
    """
    first = next(iter(conditions.values()))
    example = torch.arange(len(first)) if example is None else example
    entries = {"example": Entry(torch.int32, tuple(example.shape), example)}
    for condition, seen in conditions.items():
        for name, value in seen.tensors().items():
            kind = value.dtype if value.is_floating_point() else torch.int32
            kind = PRECISIONS[precision] if name in ACTIVATIONS else kind
            shape = tuple(value.shape)
            if name == "attention_row":
                shape = (*value.shape[1:3], int(seen.query_length.sum()))
            entries[f"{condition}.{name}"] = Entry(kind, shape)
        for row, queries in (seen.training_queries or {}).items():
            entries[f"{condition}.{QUERIES}.{row}"] = Entry(PRECISIONS[precision], tuple(queries.shape), queries)
    described = {name: {fact: getattr(seen, fact) for fact in FACTS} for name, seen in conditions.items()}
    metadata = {"format": FORMAT, "settings": json.dumps(described)}

    def save(unfinished: Path) -> None:
        with unfinished.open("wb") as file:
            starts = _write_head(file, entries, metadata)
            for name, entry in entries.items():
                if entry.tensor is not None:
                    _write(file, starts[name], entry.tensor.to(entry.kind))
            for condition, seen in conditions.items():
                for name, place, numbers in _pieces(seen):
                    entry = entries[f"{condition}.{name}"]
                    _write(file, starts[f"{condition}.{name}"] + place * entry.kind.itemsize, numbers.to(entry.kind))

    write_atomically(path, save)


def _write_head(file: BinaryIO, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> dict[str, int]:
    """Write the head of a safetensors file as the library does; returns where in the file each tensor begins."""
    head: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    order = list(CODES)
    for name, entry in sorted(entries.items(), key=lambda item: (order.index(item[1].kind), item[0])):
        offsets = [offset, offset + entry.size]
        head[name] = {"dtype": CODES[entry.kind], "shape": entry.shape, "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + head[name]["data_offsets"][0] for name in entries}


def _write(file: BinaryIO, place: int, numbers: Tensor) -> None:
    file.seek(place)
    file.write(numbers.contiguous().numpy().data)


def _pieces(seen: Observation) -> Iterator[tuple[str, int, Tensor]]:
    """Numbers that stand together in the file: the field, the place of the first of them in it, and they."""
    tokens, written = int(seen.query_length.sum()), 0
    for start, part in seen.parts():
        for name, value in part.tensors().items():
            if name != "attention_row":
                yield name, start * prod(value.shape[1:]), value
        rows = _without_padding(part).flatten(0, 1)  # (L * H, tokens of the part)
        for number, row in enumerate(rows):
            yield "attention_row", number * tokens + written, row
        written += rows.size(1)


def load_observations(path: str | Path) -> tuple[Tensor, dict[str, Observation]]:
    """What a file of observations holds; nothing stays mapped, or it would change with the file.

    Args:
        path: What `fairseq-icl score --save-activations` wrote.

    Returns:
        The examples (n,), positions in the validation set, and by condition ("zsl", "icl", "ft") the observations.

    Example:
        ```python
        example, seen = load_observations("observations.safetensors")
        seen["icl"].attention_output  # (n, layers, width)
        ```
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path}: not a file of observations of this version")
            described = json.loads(metadata["settings"])
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
            example = file.get_tensor("example").long().clone()
        return example, {name: _load(path, name, facts, shapes) for name, facts in described.items()}
    except (OSError, SafetensorError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: damaged, or not a file of observations ({error})") from error


def _load(
    path: str | Path, condition: str, facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Observation:
    """One condition's observation. The file is opened anew for every part: what was read before leaves the memory."""
    names, recorded = _names_of(condition, shapes)
    with safe_open(path, "pt") as file:
        lengths = file.get_tensor(names["query_length"]).long().clone()  # (n,)
        queries = {row: file.get_tensor(name).float().clone() for row, name in recorded.items()}
    if {shapes[full][0] for name, full in names.items() if name != "attention_row"} != {len(lengths)}:
        raise ValueError("its tensors are of different numbers of examples")
    longest, ends = int(lengths.max()), [0, *lengths.cumsum(0).tolist()]
    if shapes[names["attention_row"]][2] != ends[-1]:
        raise ValueError("its rows of attention are not as long as its queries")
    gathering = Gathering(len(lengths))
    for places in torch.arange(len(lengths)).split(AT_ONCE):
        start, stop = int(places[0]), int(places[-1]) + 1
        with safe_open(path, "pt") as file:
            values: dict[str, Any] = {
                name: _plain(file.get_slice(full)[start:stop])
                for name, full in names.items()
                if name != "attention_row"
            }
            rows = file.get_slice(names["attention_row"])[:, :, ends[start] : ends[stop]]
            values["attention_row"] = _with_padding(_plain(rows), lengths[start:stop], longest)
        gathering.put(places, Observation(**values, training_queries=queries or None, **facts))
        del values, rows  # and with them the mapping
    return gathering.observation()


def _names_of(condition: str, full_names: Iterable[str]) -> tuple[dict[str, str], dict[int, str]]:
    """The names that the fields of one condition have in the file, and by their row those of its training queries."""
    names: dict[str, str] = {}
    recorded: dict[int, str] = {}
    for full in full_names:
        if full != "example":
            owner, name, *row = full.split(".")
            if owner == condition and name == QUERIES:
                recorded[int(row[0])] = full
            elif owner == condition:
                names[name] = full
    return names, recorded


def _plain(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value.long()


def _without_padding(observation: Observation) -> Tensor:
    lengths = observation.query_length.tolist()
    return torch.cat([row[..., -length:] for row, length in zip(observation.attention_row, lengths, strict=True)], -1)


def _with_padding(rows: Tensor, lengths: Tensor, longest: int) -> Tensor:
    parts = rows.split(lengths.tolist(), dim=-1)  # each (L, H, length)
    return torch.stack([F.pad(part, (longest - part.size(-1), 0)) for part in parts])
