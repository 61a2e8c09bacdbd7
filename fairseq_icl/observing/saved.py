"""Observations in a file (safetensors), written and read without a whole one in memory.

Tensors are named CONDITION.FIELD (`icl.attention_output`) after the fields of `Observation`. Rows of attention have no
padding there: `CONDITION.attention_row` is (layers, heads, sum of query lengths), one example after the other;
`query_length` tells where each ends.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.observing.observation import AT_ONCE, Gathering, Observation

ANSWERS = ("option_logprobs", "label_prior", "label_prior_normalised", "demonstration_logprob")  # keep their precision
PRECISIONS = {"half": torch.float16, "single": torch.float32}
FORMAT = "fairseq_icl observations 1"
QUERIES = "training_queries"
CODES = {torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.float16: "F16"}
"""What safetensors calls the types that are written, in the order of the file: so all are aligned."""
FACTS = ("method", "init", "precision", "device", "skipped_updates")  # what is known of a condition as a whole


def save_observations(
    path: str | Path, conditions: Mapping[str, Observation], example: Tensor | None = None, precision: str = "single"
) -> None:
    """Write observations by condition; `example` (n,): places in the validation set. The authors' precision: half."""
    examples = torch.arange(len(next(iter(conditions.values())))) if example is None else example
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"example": (torch.int32, tuple(examples.shape))}
    for condition, seen in conditions.items():
        for name, value in seen.tensors().items():
            exact = value.dtype if value.is_floating_point() else torch.int32
            kind = exact if name in ANSWERS or exact == torch.int32 else PRECISIONS[precision]
            shape = (*value.shape[1:3], int(seen.query_length.sum())) if name == "attention_row" else tuple(value.shape)
            entries[f"{condition}.{name}"] = (kind, shape)
        for row, queries in (seen.training_queries or {}).items():
            entries[f"{condition}.{QUERIES}.{row}"] = (PRECISIONS[precision], tuple(queries.shape))
    described = {name: {fact: getattr(seen, fact) for fact in FACTS} for name, seen in conditions.items()}
    # The head of a safetensors file, as the library writes it.
    head: dict[str, Any] = {"__metadata__": {"format": FORMAT, "settings": json.dumps(described)}}
    end, order = 0, list(CODES)
    for name, (kind, shape) in sorted(entries.items(), key=lambda item: (order.index(item[1][0]), item[0])):
        start, end = end, end + prod(shape) * kind.itemsize
        head[name] = {"dtype": CODES[kind], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def save(unfinished: Path) -> None:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, place, numbers in _pieces(conditions, examples):
                kind = entries[name][0]
                file.seek(8 + len(text) + head[name]["data_offsets"][0] + place * kind.itemsize)
                file.write(numbers.to(kind).contiguous().numpy().data)

    write_atomically(path, save)


def _pieces(conditions: Mapping[str, Observation], example: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """Numbers that stand together in the file: name of the tensor, the place of the first of them in it, and they."""
    yield "example", 0, example
    for condition, seen in conditions.items():
        for row, queries in (seen.training_queries or {}).items():
            yield f"{condition}.{QUERIES}.{row}", 0, queries
        tokens, written = int(seen.query_length.sum()), 0
        for start, part in seen.parts():
            for name, value in part.tensors().items():
                if name != "attention_row":
                    yield f"{condition}.{name}", start * prod(value.shape[1:]), value
            pairs = zip(part.attention_row, part.query_length.tolist(), strict=True)
            rows = torch.cat([row[..., -length:] for row, length in pairs], -1).flatten(0, 1)  # (L * H, tokens)
            for number, row in enumerate(rows):
                yield f"{condition}.attention_row", number * tokens + written, row
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
    split = [(*full.split(".", 1), full) for full in shapes if full != "example"]
    names = {name: full for owner, name, full in split if owner == condition}
    recorded = {int(name.split(".")[1]): names.pop(name) for name in list(names) if name.startswith(QUERIES)}
    with safe_open(path, "pt") as file:
        lengths = file.get_tensor(names["query_length"]).long().clone()  # (n,)
        queries = {row: file.get_tensor(name).float().clone() for row, name in recorded.items()}
    attention_row = names.pop("attention_row")
    if {shapes[full][0] for full in names.values()} != {len(lengths)}:
        raise ValueError("its tensors are of different numbers of examples")
    longest, ends = int(lengths.max()), [0, *lengths.cumsum(0).tolist()]
    if shapes[attention_row][2] != ends[-1]:
        raise ValueError("its rows of attention are not as long as its queries")
    gathering = Gathering(len(lengths))
    for places in torch.arange(len(lengths)).split(AT_ONCE):
        start, stop = int(places[0]), int(places[-1]) + 1
        with safe_open(path, "pt") as file:
            found = {name: file.get_slice(full)[start:stop] for name, full in names.items()}
            rows = file.get_slice(attention_row)[:, :, ends[start] : ends[stop]].float()
            values: dict[str, Any] = {n: v.float() if v.is_floating_point() else v.long() for n, v in found.items()}
            parts = rows.split(lengths[start:stop].tolist(), dim=-1)  # each (L, H, length)
            values["attention_row"] = torch.stack([F.pad(part, (longest - part.size(-1), 0)) for part in parts])
        gathering.put(places, Observation(**values, training_queries=queries or None, **facts))
        del found, values, rows, parts  # and with them the mapping
    return gathering.observation()
