"""Raw observations in a safetensors file, for those who want more than the metrics.

Tensors are named SETTING.FIELD (`icl.attention_output`) after the fields of `Observation`. Activations are in half
precision, which is what the authors recorded, unless asked for otherwise. Rows of attention have no padding:
`SETTING.attention_row` is (layers, heads, sum of query lengths), one example after the other; `query_length` tells
where each ends.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.observe.observation import Observation

ACTIVATIONS = ("attention_output", "attention_row", "query_vector", "context_row")
PRECISIONS = {"half": torch.float16, "single": torch.float32}


def save_activations(
    path: str | Path, example: Tensor, settings: Mapping[str, Observation], precision: str = "half"
) -> None:
    """Write the observations of all settings; `example` (n,) are the positions in the validation set."""
    path = Path(path)
    tensors = {"example": example.int()}
    for setting, observation in settings.items():
        for name, value in vars(observation).items():
            if name == "attention_row":
                value = _without_padding(observation)
            if value is not None:
                kind = value.dtype if value.is_floating_point() else torch.int32
                kind = PRECISIONS[precision] if name in ACTIVATIONS else kind
                tensors[f"{setting}.{name}"] = value.to(kind).contiguous()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            save_file(tensors, Path(folder) / path.name)
            os.chmod(Path(folder) / path.name, 0o644)  # safetensors makes files that only their owner can read
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error


def load_activations(path: str | Path) -> tuple[Tensor, dict[str, Observation]]:
    """(example, observations by setting) of a file that `save_activations` wrote."""
    tensors = load_file(path)
    example = tensors.pop("example").long()
    fields: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        setting, field = name.split(".")
        fields.setdefault(setting, {})[field] = tensor.float() if tensor.is_floating_point() else tensor.long()
    for values in fields.values():
        values["attention_row"] = _with_padding(values["attention_row"], values["query_length"])
    return example, {setting: Observation(**values) for setting, values in fields.items()}


def _without_padding(observation: Observation) -> Tensor:
    lengths = observation.query_length.tolist()
    return torch.cat([row[..., -length:] for row, length in zip(observation.attention_row, lengths, strict=True)], -1)


def _with_padding(rows: Tensor, lengths: Tensor) -> Tensor:
    longest = int(lengths.max())
    parts = rows.split(lengths.tolist(), dim=-1)  # each (L, H, length)
    return torch.stack([torch.nn.functional.pad(part, (longest - part.size(-1), 0)) for part in parts])
