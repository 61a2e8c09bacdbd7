"""The record of gradients and steps: what every layer's gradient was at each update, and how far it moved the weights.

The record is a tidy table, one row for a step, a layer and a parameter:

    step           number of the update, from 0
    demonstration  file row of the demonstration behind the update; several are joined by commas
    layer          decoder layer, from 0
    parameter      name inside the layer, "self_attn." left out: k_proj.weight, v_proj.bias, ...
    norm           l2 norm after division by sample_size and after --clip-norm, before --layer-clip
    loss_sum       loss of the update in nats, summed over tokens (and layers, in layer-causal training)
    sample_size    what the gradient was divided by: the number of scored tokens
    update         l2 norm of the change that the update made, |dW|
    weight         l2 norm of the parameter before it, |W|
    whole_layer    l2 norm of the gradient of all parameters of the layer, frozen ones too, summed over tokens and
                   before any clipping (training/norms.py; missing unless gradient_norms=all): the same in all
                   rows of a step and layer

so that the relative size of a layer's step is root(sum update^2) / root(sum weight^2) over its parameters.

Its file (Parquet) also describes the model (layers, and a few values of every frozen weight), so that a record is not
taken for that of another model.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically

if TYPE_CHECKING:
    from torch import nn

FIRST_COLUMNS = ("step", "demonstration", "layer", "parameter", "norm", "loss_sum", "sample_size")
GRADIENT_COLUMNS = (*FIRST_COLUMNS, "update", "weight", "whole_layer")
READ_COLUMNS = (GRADIENT_COLUMNS, FIRST_COLUMNS, (*FIRST_COLUMNS, "update", "weight"))
"""Those of a record, and of records made before steps, and before whole layers, were looked at."""
GRADIENT_METADATA = b"fairseq_icl_gradients"
SAMPLED_VALUES = 16
ROWS_WRITTEN_EVERY_STEP = 50_000


def trained_parameters(decoder: Any) -> "list[tuple[int, str, nn.Parameter]]":
    """(layer, name, parameter) of everything in the layers that learns."""
    return [
        (layer, name.removeprefix("self_attn."), parameter)
        for layer, module in enumerate(decoder.layers)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def describe(decoder: Any) -> dict[str, Any]:
    """What tells models apart: the number of layers, and of every frozen weight its shape and first values."""
    frozen = {
        name: [list(parameter.shape), parameter.detach().flatten()[:SAMPLED_VALUES].half().tolist()]
        for name, parameter in decoder.named_parameters()
        if not parameter.requires_grad
    }
    # Through JSON, as the file stores it: NaN or infinity of a half overflow compare equal to themselves as text.
    return {"layers": len(decoder.layers), "frozen": {name: json.dumps(values) for name, values in frozen.items()}}


def checked_record(path: str, decoder: Any) -> pd.DataFrame:
    """The record in a file, which must have been made with this model."""
    table, model = read_gradient_record(path)
    this_model = describe(decoder)
    if model.get("layers") != this_model["layers"]:
        raise UserError(
            f"{path}: recorded with a model of {model.get('layers')} layers, this one has {this_model['layers']}"
        )
    recorded = model.get("frozen", {})
    for name in sorted(set(recorded) & set(this_model["frozen"])):
        if recorded[name] != this_model["frozen"][name]:
            raise UserError(f"{path}: recorded with another model ({name} differs); record again with this one")
    return table


@dataclass(frozen=True)
class Update:
    """What is recorded of one update; `norms`, `updates` and `weights` have a number for each trained parameter."""

    step: int
    demonstration: str
    norms: Sequence[float]
    loss_sum: float
    sample_size: int
    updates: Sequence[float] = ()
    weights: Sequence[float] = ()
    whole_layers: Sequence[float] | None = None
    """One a layer, if they were looked at."""


class GradientRecorder:
    """Collects the norms of each update; with a path it keeps a file up to date, which is whole whenever it is read."""

    def __init__(self, decoder: Any, path: Path | None = None) -> None:
        self.decoder, self.path = decoder, path
        parameters = trained_parameters(decoder)
        self.layers = [layer for layer, _, _ in parameters]
        self.parameters = [name for _, name, _ in parameters]
        self._before: list[pd.DataFrame] = []
        self._updates: list[Update] = []
        self._written = 0
        if path is not None:  # also at the end of a process of torch.multiprocessing, where atexit does nothing
            Finalize(self, self.flush, exitpriority=1)

    def add(self, update: Update) -> None:
        """Take in one update."""
        if self.path is not None and not self._updates and update.step > 0:
            self._resume(self.path, update.step)
        self._updates.append(update)
        # Small records are written at every step; large ones when they have grown by a part, and in `flush`.
        rows = len(self._updates) * len(self.layers)
        if rows <= ROWS_WRITTEN_EVERY_STEP or len(self._updates) > 1.1 * self._written:
            self.flush()

    def flush(self) -> None:
        """Write all updates so far, completely or not at all."""
        if self.path is not None and len(self._updates) > self._written:
            self._written = len(self._updates)  # even if it fails: the end of the process is not to complain again
            try:
                write_gradient_record(self.path, self.table(), self.decoder)
            except UserError as error:
                raise UserError(f"--record-gradients {error}") from error

    def table(self) -> pd.DataFrame:
        """All updates so far."""
        width, updates = len(self.layers), self._updates
        unknown = dict.fromkeys(self.layers, math.nan)
        whole = [[(update.whole_layers or unknown)[layer] for layer in self.layers] for update in updates]
        columns = (
            np.repeat(np.array([update.step for update in updates], dtype=np.int64), width),
            np.repeat(np.array([update.demonstration for update in updates], dtype=object), width),
            np.tile(self.layers, len(updates)),
            np.tile(np.array(self.parameters, dtype=object), len(updates)),
            np.array([update.norms for update in updates], dtype=np.float64).reshape(-1),
            np.repeat(np.array([update.loss_sum for update in updates], dtype=np.float64), width),
            np.repeat(np.array([update.sample_size for update in updates], dtype=np.int64), width),
            np.array([update.updates for update in updates], dtype=np.float64).reshape(-1),
            np.array([update.weights for update in updates], dtype=np.float64).reshape(-1),
            np.array(whole, dtype=np.float64).reshape(-1),
        )
        table = pd.DataFrame(dict(zip(GRADIENT_COLUMNS, columns, strict=True)))
        return pd.concat([*self._before, table], ignore_index=True) if self._before else table

    def _resume(self, path: Path, step: int) -> None:
        """Keep what an interrupted run recorded before `step`, if this model's record is there."""
        if not path.is_file():
            return
        table, _ = read_gradient_record(path)
        for _, rows in table[table["step"] < step].groupby("step"):
            if rows["parameter"].tolist() != self.parameters or rows["layer"].tolist() != self.layers:
                raise UserError(f"--record-gradients {path}: holds another run; move it away")
            self._before.append(rows)


def read_gradient_record(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(table, description of the model) of a file that --record-gradients or a replication wrote."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; make it with --record-gradients")
    try:
        table = pq.read_table(path)
        described = (table.schema.metadata or {}).get(GRADIENT_METADATA)
        if described is None or tuple(table.column_names) not in READ_COLUMNS:
            raise UserError(f"{path}: not a gradient record; make it with --record-gradients")
        record = table.to_pandas(ignore_metadata=True).reindex(columns=list(GRADIENT_COLUMNS))
        return record, dict(json.loads(described))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a Parquet file, or damaged; make it with --record-gradients") from error


def write_gradient_record(path: Path, table: pd.DataFrame, decoder: Any) -> None:
    """Write a record with the description of its model."""
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    arrow = arrow.replace_schema_metadata({GRADIENT_METADATA: json.dumps(describe(decoder)).encode()})
    write_atomically(path, lambda unfinished: pq.write_table(arrow, unfinished, compression="zstd"))


def heatmap_matrix(record: pd.DataFrame, column: str = "norm") -> np.ndarray:
    """(steps, layers): l2 norm of each layer's whole gradient (or of another column) at each step."""
    groups = record.assign(square=record[column] ** 2).groupby(["step", "layer"])["square"]
    return np.sqrt(groups.sum(min_count=1).unstack("layer").sort_index().to_numpy())


def step_size_matrix(record: pd.DataFrame) -> np.ndarray | None:
    """(steps, layers): relative size |dW| / |W| of each layer's step; None for a record without steps."""
    if record["update"].isna().any():
        return None
    return heatmap_matrix(record, "update") / heatmap_matrix(record, "weight")


def whole_layer_matrix(record: pd.DataFrame) -> np.ndarray | None:
    """(steps, layers): l2 norm of the gradient of all parameters of a layer, summed over tokens; None: not recorded."""
    if record["whole_layer"].isna().any():
        return None
    return record.groupby(["step", "layer"])["whole_layer"].first().unstack("layer").sort_index().to_numpy()
