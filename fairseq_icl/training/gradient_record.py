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
                   before any clipping (training/whole_layers.py; missing unless gradient_norms=all): the same in all
                   rows of a step and layer

so that the relative size of a layer's step is root(sum update^2) / root(sum weight^2) over its parameters.

Its file (Parquet) also describes the model (layers, and a few values of every frozen weight), so that a record is not
taken for that of another model.
"""

import json
import math
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.results import GRADIENT_COLUMNS, GRADIENT_METADATA, read_gradient_record

SAMPLED_VALUES = 16
ROWS_WRITTEN_EVERY_STEP = 50_000


def trained_parameters(decoder: Any) -> list[tuple[int, str, torch.nn.Parameter]]:
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
    own = describe(decoder)
    if model.get("layers") != own["layers"]:
        raise UserError(f"{path}: recorded with a model of {model.get('layers')} layers, this one has {own['layers']}")
    recorded = model.get("frozen", {})
    for name in sorted(set(recorded) & set(own["frozen"])):
        if recorded[name] != own["frozen"][name]:
            raise UserError(f"{path}: recorded with another model ({name} differs); record again with this one")
    return table


class GradientRecorder:
    """Collects the norms of each step; with a path it keeps a file up to date, which is whole whenever it is read."""

    def __init__(self, decoder: Any, path: Path | None = None) -> None:
        self.decoder, self.path = decoder, path
        parameters = trained_parameters(decoder)
        self.layers = [layer for layer, _, _ in parameters]
        self.parameters = [name for _, name, _ in parameters]
        self.steps: list[tuple[int, str, list[float], float, int, list[float], list[float], list[float]]] = []
        self._written = 0
        if path is not None:  # also at the end of a process of torch.multiprocessing, where atexit does nothing
            Finalize(self, self.flush, exitpriority=1)

    def add(
        self,
        step: int,
        demonstration: str,
        norms: list[float],
        loss_sum: float,
        sample_size: int,
        updates: Sequence[float],
        weights: Sequence[float],
        whole_layers: Sequence[float] | None = None,
    ) -> None:
        """Take in one step; `norms`, `updates` and `weights` are in the order of the trained parameters.

        `whole_layers` has one norm a layer.
        """
        whole = [math.nan if whole_layers is None else whole_layers[layer] for layer in self.layers]
        if self.path is not None and not self.steps and step > 0:
            self._resume(self.path, step)
        self.steps.append((step, demonstration, norms, loss_sum, sample_size, list(updates), list(weights), whole))
        # Small records are written at every step; large ones when they have grown by a part, and in `flush`.
        rows = len(self.steps) * len(self.layers)
        if rows <= ROWS_WRITTEN_EVERY_STEP or len(self.steps) > 1.1 * self._written:
            self.flush()

    def flush(self) -> None:
        """Write all steps so far, completely or not at all."""
        if self.path is not None and len(self.steps) > self._written:
            self._written = len(self.steps)  # even if it fails: the end of the process is not to try and complain again
            try:
                write_gradient_record(self.path, self.table(), self.decoder)
            except UserError as error:
                raise UserError(f"--record-gradients {error}") from error

    def table(self) -> pd.DataFrame:
        """All steps so far."""
        columns_of_steps = zip(*self.steps, strict=True) if self.steps else [()] * 8
        step, demonstration, norms, loss_sum, sample_size, updates, weights, whole_layers = columns_of_steps
        width, height = len(self.layers), len(self.steps)
        columns = (
            np.repeat(np.array(step, dtype=np.int64), width),
            np.repeat(np.array(demonstration, dtype=object), width),
            np.tile(self.layers, height),
            np.tile(np.array(self.parameters, dtype=object), height),
            np.array(norms, dtype=np.float64).reshape(-1),
            np.repeat(np.array(loss_sum, dtype=np.float64), width),
            np.repeat(np.array(sample_size, dtype=np.int64), width),
            np.array(updates, dtype=np.float64).reshape(-1),
            np.array(weights, dtype=np.float64).reshape(-1),
            np.array(whole_layers, dtype=np.float64).reshape(-1),
        )
        return pd.DataFrame(dict(zip(GRADIENT_COLUMNS, columns, strict=True)))

    def _resume(self, path: Path, step: int) -> None:
        """Keep what an interrupted run recorded before `step`, if this model's record is there."""
        if not path.is_file():
            return
        table, _ = read_gradient_record(path)
        for number, rows in table[table["step"] < step].groupby("step"):
            if rows["parameter"].tolist() != self.parameters or rows["layer"].tolist() != self.layers:
                raise UserError(f"--record-gradients {path}: holds another run; move it away")
            first = rows.iloc[0]
            moved = (rows["update"].tolist(), rows["weight"].tolist(), rows["whole_layer"].tolist())
            norms, loss = rows["norm"].tolist(), first["loss_sum"]
            self.steps.append((int(number), first["demonstration"], norms, loss, first["sample_size"], *moved))


def write_gradient_record(path: Path, table: pd.DataFrame, decoder: Any) -> None:
    """Write a record with the description of its model."""
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    arrow = arrow.replace_schema_metadata({GRADIENT_METADATA: json.dumps(describe(decoder)).encode()})
    write_atomically(path, lambda unfinished: pq.write_table(arrow, unfinished, compression="zstd"))
