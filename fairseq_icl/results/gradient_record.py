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
from itertools import chain
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
        name: [list(parameter.shape), parameter.detach().flatten()[:16].half().tolist()]
        for name, parameter in decoder.named_parameters()
        if not parameter.requires_grad
    }
    # Through JSON, as the file stores it: NaN or infinity of a half overflow compare equal to themselves as text.
    return {"layers": len(decoder.layers), "frozen": {name: json.dumps(values) for name, values in frozen.items()}}


def checked_record(path: str, decoder: Any) -> pd.DataFrame:
    """The record in a file, which must have been made with this model."""
    table, model = read_gradient_record(path)
    layers, frozen = describe(decoder).values()
    if model.get("layers") != layers:
        raise UserError(f"{path}: recorded with a model of {model.get('layers')} layers, this one has {layers}")
    for name, values in sorted(model.get("frozen", {}).items()):
        if values != frozen.get(name, values):
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
    whole_layers: Sequence[float] | None = None  # one a layer, if they were looked at


class GradientRecorder:
    """Collects the norms of each update; with a path it keeps a file up to date, which is whole whenever it is read."""

    def __init__(self, decoder: Any, path: Path | None = None) -> None:
        self.decoder, self.path = decoder, path
        parameters = trained_parameters(decoder)
        self.layers = [layer for layer, _, _ in parameters]
        self.parameters = [name for _, name, _ in parameters]
        self._updates: list[tuple[Sequence[Any], ...]] = []  # GRADIENT_COLUMNS of each one's rows
        self._written = 0
        if path is not None:  # also at the end of a process of torch.multiprocessing, where atexit does nothing
            Finalize(self, self.flush, exitpriority=1)

    def add(self, update: Update) -> None:
        """Take in one update."""
        if self.path is not None and not self._updates and update.step > 0:
            self._resume(self.path, update.step)
        width, whole = len(self.layers), update.whole_layers
        first = [update.step] * width, [update.demonstration] * width, self.layers, self.parameters, update.norms
        then = [update.loss_sum] * width, [update.sample_size] * width, update.updates, update.weights
        last = [math.nan if whole is None else whole[layer] for layer in self.layers]
        self._updates.append((*first, *then, last))
        # Small records are written at every step; large ones when they have grown by a part, and in `flush`.
        if len(self._updates) * width <= ROWS_WRITTEN_EVERY_STEP or len(self._updates) > 1.1 * self._written:
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
        columns = ([*chain.from_iterable(parts)] for parts in zip(*self._updates, strict=True))
        return pd.DataFrame(dict(zip(GRADIENT_COLUMNS, columns, strict=False)), columns=GRADIENT_COLUMNS)

    def _resume(self, path: Path, step: int) -> None:
        """Keep what an interrupted run recorded before `step`, if this model's record is there."""
        if not path.is_file():
            return
        table, _ = read_gradient_record(path)
        for _, rows in table[table["step"] < step].groupby("step"):
            if rows["parameter"].tolist() != self.parameters or rows["layer"].tolist() != self.layers:
                raise UserError(f"--record-gradients {path}: holds another run; move it away")
            self._updates.append(tuple(rows[name].tolist() for name in GRADIENT_COLUMNS))


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
