"""The gradient record: one Parquet file with the l2 norm of every trained parameter of every layer at every step.

Tidy columns, one row for a step, a layer and a parameter:

    step           number of the update, from 0
    demonstration  file row of the demonstration behind the update; several are joined by commas
    layer          decoder layer, from 0
    parameter      name inside the layer, "self_attn." left out: k_proj.weight, v_proj.bias, ...
    norm           l2 norm after division by sample_size and after --clip-norm, before --layer-clip
    loss_sum       loss of the update in nats, summed over tokens (and layers, in layer-causal training)
    sample_size    what the gradient was divided by: the number of scored tokens

The file also describes the model (layers, and a few values of every frozen weight), so that a record is not taken for
that of another model.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from fairseq_icl.errors import UserError

COLUMNS = ("step", "demonstration", "layer", "parameter", "norm", "loss_sum", "sample_size")
METADATA_KEY = b"fairseq_icl_gradients"
SAMPLED_VALUES = 16
ROWS_WRITTEN_EVERY_STEP = 50_000


def read_gradient_record(path: str | Path) -> pd.DataFrame:
    """The table of a file that --record-gradients wrote."""
    return _read(Path(path))[0]


def heatmap_matrix(record: pd.DataFrame) -> np.ndarray:
    """(steps, layers): l2 norm of each layer's whole gradient at each step, the papers' heatmap."""
    squares = record.assign(square=record["norm"] ** 2).groupby(["step", "layer"])["square"].sum()
    return np.sqrt(squares.unstack("layer").sort_index().to_numpy())


def read_layer_norms(path: str | Path, decoder: nn.Module) -> pd.DataFrame:
    """step -> demonstration and norms (list, one a layer), of a record that must have been made with `decoder`."""
    table, model = _read(Path(path))
    own = describe(decoder)
    if model["layers"] != own["layers"]:
        raise UserError(f"{path}: recorded with a model of {model['layers']} layers, this one has {own['layers']}")
    for name in sorted(set(model["frozen"]) & set(own["frozen"])):
        if model["frozen"][name] != own["frozen"][name]:
            raise UserError(f"{path}: recorded with another model ({name} differs); record again with this one")
    steps = table.groupby("step")["demonstration"].first().to_frame()
    return steps.assign(norms=list(heatmap_matrix(table)))


def describe(decoder: nn.Module) -> dict:
    """What tells models apart: the number of layers, and of every frozen weight its shape and first values."""
    frozen = {
        name: [list(parameter.shape), parameter.detach().flatten()[:SAMPLED_VALUES].half().tolist()]
        for name, parameter in decoder.named_parameters()
        if not parameter.requires_grad
    }
    # Through JSON, as the file stores it: NaN or infinity of a half overflow compare equal to themselves as text.
    return {"layers": len(decoder.layers), "frozen": {name: json.dumps(values) for name, values in frozen.items()}}


def _read(path: Path) -> tuple[pd.DataFrame, dict]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; make it with --record-gradients")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file, or damaged; make it with --record-gradients") from error
    described = (table.schema.metadata or {}).get(METADATA_KEY)
    if described is None or tuple(table.column_names) != COLUMNS:
        raise UserError(f"{path}: not a gradient record; make it with --record-gradients")
    return table.to_pandas(ignore_metadata=True), json.loads(described)


@dataclass
class GradientRecorder:
    """Collects steps and keeps the file up to date; whoever reads the file finds it whole."""

    path: Path
    decoder: nn.Module
    layers: list[int]  # layer and name of every recorded norm, in the order in which `add` gets them
    parameters: list[str]
    steps: list[tuple] = field(default_factory=list)
    _written: int = 0

    def add(self, step: int, demonstration: str, norms: list[float], loss_sum: float, sample_size: int) -> None:
        if not self.steps and step > 0:
            self._resume(step)
        self.steps.append((step, demonstration, norms, loss_sum, sample_size))
        # Small records are written at every step; large ones when they have grown by a part, and in `flush`.
        rows = len(self.steps) * len(self.layers)
        if rows <= ROWS_WRITTEN_EVERY_STEP or len(self.steps) > 1.1 * self._written:
            self.flush()

    def flush(self) -> None:
        """Write all steps so far, completely or not at all."""
        if len(self.steps) == self._written:
            return
        metadata = {METADATA_KEY: json.dumps(describe(self.decoder)).encode()}
        table = pa.table(self._columns()).replace_schema_metadata(metadata)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._written = len(self.steps)  # even if it fails: the end of the process is not to try and complain again
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                pq.write_table(table, temporary, compression="zstd")
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"--record-gradients {self.path}: cannot be written ({error.strerror})") from error

    def _columns(self) -> dict[str, np.ndarray]:
        step, demonstration, norms, loss_sum, sample_size = zip(*self.steps, strict=True)
        width, height = len(self.layers), len(self.steps)
        columns = (
            np.repeat(step, width),
            np.repeat(demonstration, width),
            np.tile(self.layers, height),
            np.tile(self.parameters, height),
            np.array(norms, dtype=np.float64).reshape(-1),
            np.repeat(np.array(loss_sum, dtype=np.float64), width),
            np.repeat(sample_size, width),
        )
        return dict(zip(COLUMNS, columns, strict=True))

    def _resume(self, step: int) -> None:
        """Keep what an interrupted run recorded before `step`, if this model's record is there."""
        if not self.path.is_file():
            return
        table, _ = _read(self.path)
        for number, rows in table[table["step"] < step].groupby("step"):
            if rows["parameter"].tolist() != self.parameters or rows["layer"].tolist() != self.layers:
                raise UserError(f"--record-gradients {self.path}: holds another run; move it away")
            first = rows.iloc[0]
            row = (int(number), first["demonstration"], rows["norm"].tolist(), first["loss_sum"], first["sample_size"])
            self.steps.append(row)
