"""Gradient control and record: the l2 norm of each layer's gradient at each update, watched, limited and stored.

The task calls `GradientControl.before_step` when an update's gradient is final (averaged, and clipped by fairseq's own
--clip-norm) and the optimizer has not used it yet. It serves every criterion alike.

The record is a tidy table, one row for a step, a layer and a parameter:

    step           number of the update, from 0
    demonstration  file row of the demonstration behind the update; several are joined by commas
    layer          decoder layer, from 0
    parameter      name inside the layer, "self_attn." left out: k_proj.weight, v_proj.bias, ...
    norm           l2 norm after division by sample_size and after --clip-norm, before --layer-clip
    loss_sum       loss of the update in nats, summed over tokens (and layers, in layer-causal training)
    sample_size    what the gradient was divided by: the number of scored tokens

Its file (Parquet) also describes the model (layers, and a few values of every frozen weight), so that a record is not
taken for that of another model.
"""

import json
import math
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fairseq.logging import metrics
from fairseq.optim import AMPOptimizer, FairseqOptimizer
from torch import Tensor

from fairseq_icl.compat import true_gradients
from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.results import GRADIENT_COLUMNS, GRADIENT_METADATA, heatmap_matrix, read_gradient_record

SampleInfo = tuple[list[int], float, int]
"""What an update was made of: file rows of its demonstrations, loss in nats summed over tokens, sample size."""
Limits: TypeAlias = list[float] | pd.DataFrame
"""Per layer; or by step: demonstration and norms (list, one per layer)."""
FROM_FILE = "from:"
SAMPLED_VALUES = 16
ROWS_WRITTEN_EVERY_STEP = 50_000


class GradientControl:
    """Logs `gnorm_layer_l`, applies --layer-clip, keeps --record-gradients, and names what is not finite."""

    def __init__(
        self, decoder: Any, clip: str = "none", limits: Limits | None = None, recorder: "GradientRecorder | None" = None
    ) -> None:
        """`clip` and `limits` (of `layer_limits`) bound each layer's gradient; `recorder` keeps the norms."""
        self.num_layers = len(decoder.layers)
        self.trained = trained_parameters(decoder)
        self.clip = clip
        self.limits: Limits = [] if limits is None else limits
        self.recorder = recorder if _is_first_process() else None
        self.compares_rows = recorder is not None or not isinstance(self.limits, list)
        self._norms_so_far = [0.0] * len(self.trained)

    def before_step(
        self, optimizer: FairseqOptimizer, update_num: int, sample_info: SampleInfo, *, last: bool = True
    ) -> None:
        """Log, record, then limit the gradients with which `optimizer` is about to step.

        An update may be made of several steps, each of other layers (training/sequential.py): it is logged and
        recorded as one, with its `last` step.
        """
        gradients, factor = true_gradients(optimizer, [parameter for _, _, parameter in self.trained])
        norms = [norm * factor for norm in _norms(gradients)]  # one a trained parameter
        if not all(map(math.isfinite, norms)):
            if isinstance(optimizer, AMPOptimizer):
                return  # an overflow of mixed precision: fairseq lowers its scale and repeats the update
            raise UserError(self._not_finite(norms, sample_info[0]))
        layer_norms = self._by_layer(norms)
        rows, loss_sum, sample_size = _gathered(sample_info) if self.compares_rows else sample_info
        demonstration = ",".join(map(str, rows))
        self._norms_so_far = [one + other for one, other in zip(self._norms_so_far, norms, strict=True)]
        if last:
            for layer, norm in enumerate(self._by_layer(self._norms_so_far)):
                metrics.log_scalar(f"gnorm_layer_{layer}", norm, priority=410, round=4)
            if self.recorder is not None:
                self.recorder.add(update_num, demonstration, self._norms_so_far, loss_sum, sample_size)
            self._norms_so_far = [0.0] * len(self.trained)
        if self.clip != "none":
            limits = self._limits_at(update_num, demonstration)
            for (layer, _, _), gradient in zip(self.trained, gradients, strict=True):
                if gradient is not None:
                    _limit(gradient, self.clip, limits[layer], layer_norms[layer], factor)

    def check_finite(self, optimizer: FairseqOptimizer, loss: float, rows: list[int]) -> None:
        """Right after backward: a UserError that names layers and demonstrations if loss or gradient is not finite.

        fairseq itself stops before `before_step` then, without a name. In fp16 it is its business alone: overflows
        are part of finding the loss scale.
        """
        if isinstance(optimizer, AMPOptimizer) or getattr(optimizer, "scaler", None) is not None:
            return
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is NaN or infinite at {_named(rows)}: numbers overflow in the model; if it is the first one "
                "take another checkpoint, else lower --lr"
            )
        norms = _norms([parameter.grad for _, _, parameter in self.trained])
        if not all(map(math.isfinite, norms)):
            raise UserError(self._not_finite(norms, rows))

    def _by_layer(self, norms: list[float]) -> list[float]:
        squares = [0.0] * self.num_layers
        for (layer, _, _), norm in zip(self.trained, norms, strict=True):
            squares[layer] += norm * norm
        return [math.sqrt(square) for square in squares]

    def _limits_at(self, update_num: int, demonstration: str) -> list[float]:
        """The limit of each layer at this update."""
        if isinstance(self.limits, list):
            return self.limits
        name = f"layer_clip_value={self.limits.attrs['source']}"
        if update_num not in self.limits.index:
            raise UserError(f"{name}: has no step {update_num}; record a run over the same demonstrations")
        recorded = self.limits.loc[update_num]
        if recorded["demonstration"] != demonstration:
            raise UserError(
                f"{name}: step {update_num} was demonstration {recorded['demonstration']} there and is {demonstration} "
                "here; record a run over the same demonstrations in the same order"
            )
        return list(recorded["norms"])

    def _not_finite(self, norms: list[float], rows: list[int]) -> str:
        bad = sorted(
            {layer for (layer, _, _), norm in zip(self.trained, norms, strict=True) if not math.isfinite(norm)}
        )
        layers = f"layer {bad[0]}" if len(bad) == 1 else f"layers {bad[0]}-{bad[-1]}"
        return f"the gradient of {layers} is NaN or infinite at {_named(rows)}; lower --lr or set --clip-norm"


def _named(rows: list[int]) -> str:
    return f"demonstration {', '.join(map(str, rows))} (row of the train file)"


def layer_limits(clip: str, value: str | None, decoder: Any, record: pd.DataFrame | None = None) -> Limits:
    """The limits that layer_clip_value gives: a list with one per layer, or a table step -> (demonstration, norms).

    `record` is a gradient record that stands for the value, where it is the name of a method.
    """
    if clip == "none":
        if value is not None:
            raise UserError("layer_clip_value: no effect without layer_clip=norm or layer_clip=max")
        return []
    if value is None:
        raise UserError(f"layer_clip={clip}: needs layer_clip_value (a value, one per layer, or from:FILE)")
    if value.startswith(FROM_FILE) or record is not None:
        if clip != "norm":
            raise UserError(f"layer_clip={clip}: a record holds norms; use layer_clip=norm with it")
        table = _checked_record(value.removeprefix(FROM_FILE), decoder) if record is None else record
        steps = table.groupby("step")["demonstration"].first().to_frame().assign(norms=list(heatmap_matrix(table)))
        steps.attrs["source"] = value  # named in errors
        return steps
    try:
        values = [float(part) for part in value.split(",")]
    except ValueError as error:
        raise UserError(f"layer_clip_value={value}: not a number, a comma list of numbers, or from:FILE") from error
    if not all(0 < number < math.inf for number in values):
        raise UserError(f"layer_clip_value={value}: limits must be positive")
    if len(values) not in (1, len(decoder.layers)):
        raise UserError(
            f"layer_clip_value={value}: {len(values)} values for {len(decoder.layers)} layers; give one, or one each"
        )
    return values * len(decoder.layers) if len(values) == 1 else values


def _norms(gradients: list[Tensor | None]) -> list[float]:
    """l2 norms in fp32 (or fp64), 0 for a parameter without gradient; brought to the CPU together."""
    present = [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
        if g is not None
    ]
    values = iter(torch.stack(present).tolist() if present else [])
    return [0.0 if gradient is None else next(values) for gradient in gradients]


def _limit(gradient: Tensor, clip: str, limit: float, layer_norm: float, factor: float) -> None:
    """Scale the gradient by the layer's min(1, limit / norm), or clamp each of its components to +-limit."""
    if clip == "max":
        gradient.clamp_(-limit / factor, limit / factor)
    elif layer_norm > limit:
        gradient.mul_(limit / layer_norm)


def _is_first_process() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _gathered(sample_info: SampleInfo) -> SampleInfo:
    """The update's parts of all processes: rows in the order of processes, sums of the rest."""
    if not torch.distributed.is_initialized():
        return sample_info
    parts: list[SampleInfo] = [([], 0.0, 0)] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, sample_info)
    rows, losses, sizes = zip(*parts, strict=True)
    return [row for part in rows for row in part], sum(losses), sum(sizes)


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


def _checked_record(path: str, decoder: Any) -> pd.DataFrame:
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
        self.steps: list[tuple[int, str, list[float], float, int]] = []
        self._written = 0
        if path is not None:  # also at the end of a process of torch.multiprocessing, where atexit does nothing
            Finalize(self, self.flush, exitpriority=1)

    def add(self, step: int, demonstration: str, norms: list[float], loss_sum: float, sample_size: int) -> None:
        """Take in one step; `norms` are in the order of the trained parameters."""
        if self.path is not None and not self.steps and step > 0:
            self._resume(self.path, step)
        self.steps.append((step, demonstration, norms, loss_sum, sample_size))
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
        step, demonstration, norms, loss_sum, sample_size = zip(*self.steps, strict=True) if self.steps else [()] * 5
        width, height = len(self.layers), len(self.steps)
        columns = (
            np.repeat(np.array(step, dtype=np.int64), width),
            np.repeat(np.array(demonstration, dtype=object), width),
            np.tile(self.layers, height),
            np.tile(np.array(self.parameters, dtype=object), height),
            np.array(norms, dtype=np.float64).reshape(-1),
            np.repeat(np.array(loss_sum, dtype=np.float64), width),
            np.repeat(np.array(sample_size, dtype=np.int64), width),
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
            row = (int(number), first["demonstration"], rows["norm"].tolist(), first["loss_sum"], first["sample_size"])
            self.steps.append(row)


def write_gradient_record(path: Path, table: pd.DataFrame, decoder: Any) -> None:
    """Write a record with the description of its model."""
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    arrow = arrow.replace_schema_metadata({GRADIENT_METADATA: json.dumps(describe(decoder)).encode()})
    write_atomically(path, lambda unfinished: pq.write_table(arrow, unfinished, compression="zstd"))
