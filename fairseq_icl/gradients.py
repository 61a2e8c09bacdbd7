"""Gradient control and record: the l2 norm of each layer's gradient at each update, watched, limited and stored.

The task calls `GradientControl.before_step` when an update's gradient is final (averaged, and clipped by fairseq's own
--clip-norm) and the optimizer has not used it yet. It serves every criterion alike.
"""

import math
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.optim import AMPOptimizer, FairseqOptimizer
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.gradient_record import GradientRecorder, heatmap_matrix, read_gradient_record, read_layer_norms

__all__ = ["GradientControl", "heatmap_matrix", "read_gradient_record", "true_gradients"]

SampleInfo = tuple[list[int], float, int]
"""What an update was made of: file rows of its demonstrations, loss in nats summed over tokens, sample size."""
FROM_FILE = "from:"


class GradientControl:
    """Logs `gnorm_layer_l`, applies --layer-clip, keeps --record-gradients, and names what is not finite."""

    def __init__(self, cfg: Any, decoder: nn.Module) -> None:
        """`cfg`: the task's, of which `layer_clip`, `layer_clip_value` and `record_gradients` are read."""
        self.num_layers = len(decoder.layers)
        self.trained = [
            (layer, name.removeprefix("self_attn."), parameter)
            for layer, module in enumerate(decoder.layers)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        self.clip = str(cfg.layer_clip)
        self.clip_value = cfg.layer_clip_value
        self.limits = layer_limits(self.clip, self.clip_value, decoder)
        self.compares_rows = bool(cfg.record_gradients) or not isinstance(self.limits, list)
        self.recorder = None
        if cfg.record_gradients and _is_first_process():
            layers, names = [layer for layer, _, _ in self.trained], [name for _, name, _ in self.trained]
            self.recorder = GradientRecorder(Path(cfg.record_gradients), decoder, layers, names)
            # Also at the end of a process that torch.multiprocessing started, where atexit does nothing.
            Finalize(self, self.recorder.flush, exitpriority=1)

    def before_step(
        self, optimizer: FairseqOptimizer, model: nn.Module, update_num: int, sample_info: SampleInfo
    ) -> None:
        """Log, record, then limit the gradients with which `optimizer` is about to step."""
        gradients, factor = true_gradients(optimizer, [parameter for _, _, parameter in self.trained])
        norms = [norm * factor for norm in _norms(gradients)]  # one a trained parameter
        if not all(map(math.isfinite, norms)):
            if isinstance(optimizer, AMPOptimizer):
                return  # an overflow of mixed precision: fairseq lowers its scale and repeats the update
            raise UserError(self._not_finite(norms, sample_info[0]))
        layer_norms = self._by_layer(norms)
        for layer, norm in enumerate(layer_norms):
            metrics.log_scalar(f"gnorm_layer_{layer}", norm, priority=410, round=4)
        rows, loss_sum, sample_size = _gathered(sample_info) if self.compares_rows else sample_info
        demonstration = ",".join(map(str, rows))
        if self.recorder is not None:
            self.recorder.add(update_num, demonstration, norms, loss_sum, sample_size)
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

    def flush(self) -> None:
        """Write what the record still holds back (a record of many steps does, to save time)."""
        if self.recorder is not None:
            self.recorder.flush()

    def _by_layer(self, norms: list[float]) -> list[float]:
        squares = [0.0] * self.num_layers
        for (layer, _, _), norm in zip(self.trained, norms, strict=True):
            squares[layer] += norm * norm
        return [math.sqrt(square) for square in squares]

    def _limits_at(self, update_num: int, demonstration: str) -> list[float]:
        """The limit of each layer at this update."""
        if isinstance(self.limits, list):
            return self.limits
        flag = f"--layer-clip-value {self.clip_value}"
        if update_num not in self.limits.index:
            raise UserError(f"{flag}: has no step {update_num}; record a run over the same demonstrations")
        recorded = self.limits.loc[update_num]
        if recorded["demonstration"] != demonstration:
            raise UserError(
                f"{flag}: step {update_num} was demonstration {recorded['demonstration']} there and is {demonstration} "
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


def true_gradients(optimizer: FairseqOptimizer, parameters: list[nn.Parameter]) -> tuple[list[Tensor | None], float]:
    """(gradients, factor): `optimizer` will step with factor * gradients; changing them in place changes the step.

    In fp32 these are the parameters' own gradients and 1. fairseq's fp16 optimizers keep loss-scaled gradients and
    apply the scale, the average and --clip-norm as one pending factor; the plain one steps with fp32 copies.
    """
    factor = float(getattr(optimizer, "_multiply_factor", 1.0))
    masters = getattr(optimizer, "fp32_params", None)
    if masters is None:
        return [parameter.grad for parameter in parameters], factor
    optimizer._sync_fp16_grads_to_fp32()
    if optimizer.has_flat_params:
        copies = _slices_of_flat(optimizer.fp16_params, masters)
    else:
        copies = {id(half): full.grad for half, full in zip(optimizer.fp16_params, masters, strict=True)}
    return [copies[id(parameter)] for parameter in parameters], factor


def _slices_of_flat(halves: list[nn.Parameter], masters: dict[Any, nn.Parameter]) -> dict[int, Tensor]:
    """id of an fp16 parameter -> its part of the flat fp32 gradient, which lies in parameter order on each device."""
    copies, offsets = {}, dict.fromkeys(masters, 0)
    for half in halves:
        device = half.device.index
        copies[id(half)] = masters[device].grad[offsets[device] : offsets[device] + half.numel()]
        offsets[device] += half.numel()
    return copies


def layer_limits(clip: str, value: str | None, decoder: nn.Module) -> Any:
    """The limits that --layer-clip-value gives: a list with one a layer, or a table step -> (demonstration, norms)."""
    if clip == "none":
        if value is not None:
            raise UserError("--layer-clip-value: no effect without --layer-clip norm or --layer-clip max")
        return []
    if value is None:
        raise UserError(f"--layer-clip {clip}: needs --layer-clip-value (a value, one per layer, or from:FILE)")
    if value.startswith(FROM_FILE):
        if clip != "norm":
            raise UserError(f"--layer-clip {clip}: a record holds norms; use --layer-clip norm with from:FILE")
        return read_layer_norms(value.removeprefix(FROM_FILE), decoder)
    try:
        values = [float(part) for part in value.split(",")]
    except ValueError as error:
        raise UserError(f"--layer-clip-value {value}: not a number, a comma list of numbers, or from:FILE") from error
    if not all(0 < number < math.inf for number in values):
        raise UserError(f"--layer-clip-value {value}: limits must be positive")
    if len(values) not in (1, len(decoder.layers)):
        raise UserError(
            f"--layer-clip-value {value}: {len(values)} values for {len(decoder.layers)} layers; give one, or one each"
        )
    return values * len(decoder.layers) if len(values) == 1 else values


def _norms(gradients: list[Tensor | None]) -> list[float]:
    """l2 norms in fp32, 0 for a parameter without gradient; brought to the CPU together."""
    present = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients if g is not None]
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
