"""What one setting (ZSL, ICL or FT) showed on n examples, in memory and as a file.

In a file (safetensors) tensors are named SETTING.FIELD (`icl.attention_output`) after the fields of `Observation`.
Rows of attention have no padding there: `SETTING.attention_row` is (layers, heads, sum of query lengths), one example
after the other; `query_length` tells where each ends.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically

ACTIVATIONS = ("attention_output", "attention_row", "query_vector", "context_row", "depth_scores", "top_logprobs")
PRECISIONS = {"half": torch.float16, "single": torch.float32}
FORMAT = "fairseq_icl observations 1"
QUERIES = "training_queries"


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
    context_row: Tensor | None = None  # (n, L, P) scores over the context, summed over the heads
    label_prior: Tensor | None = None  # (n, C) log of the options' mean probability on inputs without content
    demonstration_logprob: Tensor | None = None
    """(n,) mean log-probability of the tokens that fine-tuning on the example would score (ZSL and FT, if wanted)"""
    depth_scores: Tensor | None = None  # (n, L, C) of the model cut after each layer; the last is option_logprobs
    top_tokens: Tensor | None = None  # (n, K) the most likely next tokens where the label (of option 0) begins
    top_logprobs: Tensor | None = None  # (n, K) their log-probabilities, largest first
    training_queries: Mapping[int, Tensor] | None = None
    """Of a fine-tuned model: row of the train file -> query vectors (L, tokens, d) recorded before learning from it."""
    method: str = "none"
    """How the model was fine-tuned."""
    init: str = "pretrained"
    """What was kept of its checkpoint."""
    precision: str = "fp32"
    """In which the model computed it; the tensors here are fp32, of values that this precision has."""

    def __len__(self) -> int:
        return len(self.row)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that hold one entry per example, by name; what was not observed is left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def take(self, index: Tensor | Sequence[int]) -> "Observation":
        """The chosen examples, in that order."""
        chosen = torch.as_tensor(index, dtype=torch.long)
        taken: dict[str, Any] = {name: value[chosen] for name, value in self.tensors().items()}
        return replace(self, **taken)


def concatenate(observations: Sequence[Observation]) -> Observation:
    """Observations of the same setting joined; rows and options are filled up to the largest."""
    columns = max(part.attention_row.size(-1) for part in observations)
    options = max(part.option_logprobs.size(-1) for part in observations)
    joined: dict[str, Any] = {}
    for name in observations[0].tensors():
        values = [getattr(part, name) for part in observations]
        if name == "attention_row":
            values = [F.pad(value, (columns - value.size(-1), 0)) for value in values]
        if name in ("option_logprobs", "depth_scores"):
            values = [F.pad(value, (0, options - value.size(-1)), value=-torch.inf) for value in values]
        joined[name] = torch.cat(values)
    return replace(observations[0], **joined)


def save_observations(
    path: str | Path, settings: Mapping[str, Observation], example: Tensor | None = None, precision: str = "single"
) -> None:
    """Write the observations of some settings; `example` (n,) are the positions in the validation set.

    Activations may be in half precision, which is what the authors recorded.
    """
    first = next(iter(settings.values()))
    tensors = {"example": (torch.arange(len(first)) if example is None else example).int()}
    described = {
        name: {"method": seen.method, "init": seen.init, "precision": seen.precision} for name, seen in settings.items()
    }
    for setting, seen in settings.items():
        for name, value in (seen.tensors() | {"attention_row": _without_padding(seen)}).items():
            kind = value.dtype if value.is_floating_point() else torch.int32
            kind = PRECISIONS[precision] if name in ACTIVATIONS else kind
            tensors[f"{setting}.{name}"] = value.to(kind).contiguous()
        for row, queries in (seen.training_queries or {}).items():
            tensors[f"{setting}.{QUERIES}.{row}"] = queries.to(PRECISIONS[precision]).contiguous()
    metadata = {"format": FORMAT, "settings": json.dumps(described)}

    def save(unfinished: Path) -> None:
        try:
            save_file(tensors, unfinished, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    write_atomically(path, save)


def load_observations(path: str | Path) -> tuple[Tensor, dict[str, Observation]]:
    """(example, observations by setting) of a file that `save_observations` wrote."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path}: not a file of observations of this version")
            described = json.loads(metadata["settings"])
            # Copies: what stays mapped would change, or end the process (SIGBUS), with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is not a dict
            example = tensors.pop("example").long()
            return example, {name: _rebuilt(name, facts, tensors) for name, facts in described.items()}
    except (OSError, SafetensorError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: damaged, or not a file of observations ({error})") from error


def _rebuilt(setting: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Observation:
    """One setting's observation out of the tensors of a file."""
    values: dict[str, Any] = {}
    queries: dict[int, Tensor] = {}
    for full_name, tensor in tensors.items():
        owner, name, *row = full_name.split(".")
        if owner == setting:
            value = tensor.float() if tensor.is_floating_point() else tensor.long()
            if name == QUERIES:
                queries[int(row[0])] = value
            else:
                values[name] = value
    values["attention_row"] = _with_padding(values["attention_row"], values["query_length"])
    if len({len(value) for value in values.values()}) > 1:
        raise ValueError("its tensors are of different numbers of examples")
    return Observation(**values, training_queries=queries or None, **facts)


def _without_padding(observation: Observation) -> Tensor:
    lengths = observation.query_length.tolist()
    return torch.cat([row[..., -length:] for row, length in zip(observation.attention_row, lengths, strict=True)], -1)


def _with_padding(rows: Tensor, lengths: Tensor) -> Tensor:
    longest = int(lengths.max())
    parts = rows.split(lengths.tolist(), dim=-1)  # each (L, H, length)
    return torch.stack([F.pad(part, (longest - part.size(-1), 0)) for part in parts])
