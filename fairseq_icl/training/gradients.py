"""Gradient control: the l2 norm of each layer's gradient at each update, watched, limited and passed on to the record.

The task calls `GradientControl.before_step` when an update's gradient is final (averaged, and clipped by fairseq's own
--clip-norm) and the optimizer has not used it yet, and `after_update` when it has. It serves every criterion alike.
"""

import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import pandas as pd
import torch
from fairseq.logging import metrics
from fairseq.optim import AMPOptimizer, FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer
from torch import Tensor, nn

from fairseq_icl.compat.half_precision import true_gradients
from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import DTYPES, PretrainedLM
from fairseq_icl.observing.probe import attention_modules
from fairseq_icl.results.gradient_record import (
    GradientRecorder,
    Update,
    checked_record,
    heatmap_matrix,
    trained_parameters,
)
from fairseq_icl.settings import SETTINGS, Settings, equal_step_size
from fairseq_icl.training.norms import StepSizes, WholeLayers, is_plain_sgd, norms_of

SampleInfo = tuple[list[int], float, int]  # file rows of an update, its loss in nats summed over tokens, sample size
Limits: TypeAlias = list[float] | pd.DataFrame  # per layer; or by step: demonstration and norms (list, one per layer)


class LowRank:
    """LoRA: W + B A for every trained matrix W, A (rank, d) with orthonormal rows drawn at random and fixed, B from 0.

    A step of gradient descent on B is G A^T, G the gradient of W: so W moves by G A^T A (G itself if A has d rows).
    """

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.seed = rank, seed
        self._rows: dict[int, Tensor] = {}

    def project(self, optimizer: FairseqOptimizer, gradients: Sequence[Tensor | None]) -> None:
        """Make the gradients of matrices those of their low rank, in place."""
        if not is_plain_sgd(optimizer):
            raise UserError("train_parameters=lora: needs plain gradient descent (--optimizer sgd, no momentum)")
        for place, gradient in enumerate(gradients):
            if gradient is not None and gradient.dim() == 2 and self.rank < gradient.size(1):
                rows = self.rows(place, gradient.size(1)).to(gradient)
                gradient.copy_(gradient @ rows.T @ rows)

    def rows(self, place: int, width: int) -> Tensor:
        """A of the trained parameter number `place`, (rank, width)."""
        if place not in self._rows:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + place)
            drawn = torch.randn(width, self.rank, generator=generator, dtype=torch.float64)
            self._rows[place] = torch.linalg.qr(drawn)[0].T
        return self._rows[place]


class GradientControl:
    """Logs `gnorm_layer_l`, applies --layer-clip and --layer-step, keeps the record, and names what is not finite."""

    def __init__(
        self,
        decoder: Any,
        clip: str = "none",
        limits: Limits | None = None,
        recorder: GradientRecorder | None = None,
        step_size: float | None = None,
        whole_layers: WholeLayers | None = None,
        low_rank: LowRank | None = None,
    ) -> None:
        """`clip` and `limits` (of `layer_limits`) bound each layer's gradient; `recorder` keeps norms and steps.

        `step_size` is the relative size |dW| / |W| that every layer's step gets; None: what the learning rate gives.
        `whole_layers` looks at the gradients of all parameters of a layer, for the record. `low_rank` is LoRA's.
        """
        self.clip, self.whole_layers, self.low_rank = clip, whole_layers, low_rank
        self.num_layers, self.trained = len(decoder.layers), trained_parameters(decoder)
        self.limits: Limits = [] if limits is None else limits
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.recorder = recorder if is_first else None
        self.compares_rows = recorder is not None or not isinstance(self.limits, list)
        self.steps = StepSizes(decoder, step_size) if self.recorder is not None or step_size is not None else None
        self._norms_so_far = [0.0] * len(self.trained)
        self._made: Update | None = None

    def before_step(
        self, optimizer: FairseqOptimizer, update_num: int, sample_info: SampleInfo, *, last: bool = True
    ) -> None:
        """Log, then limit the gradients with which `optimizer` is about to step.

        An update of several steps, each of other layers (`sequential_step`), is logged as one, with its `last` step.
        """
        gradients, factor = true_gradients(optimizer, [parameter for _, _, parameter in self.trained])
        if self.low_rank is not None:
            self.low_rank.project(optimizer, gradients)
        norms = norms_of(gradients, factor)  # one a trained parameter
        if isinstance(optimizer, AMPOptimizer) and not all(map(math.isfinite, norms)):
            return  # an overflow of mixed precision: fairseq lowers its scale and repeats the update
        self._check_norms(norms, sample_info[0])
        layer_norms = self._by_layer(norms)
        parts = [sample_info]
        if self.compares_rows and torch.distributed.is_initialized():
            parts *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, sample_info)
        rows, losses, sizes = zip(*parts, strict=True)  # of all processes, in their order
        demonstration = ",".join(str(row) for part in rows for row in part)
        self._norms_so_far = [one + other for one, other in zip(self._norms_so_far, norms, strict=True)]
        if last:
            for layer, norm in enumerate(self._by_layer(self._norms_so_far)):
                metrics.log_scalar(f"gnorm_layer_{layer}", norm, priority=410, round=4)
            self._made = Update(update_num, demonstration, self._norms_so_far, sum(losses), sum(sizes))
            self._norms_so_far = [0.0] * len(self.trained)
        if self.clip != "none":
            limits = self._limits_at(update_num, demonstration)
            for (layer, _, _), gradient in zip(self.trained, gradients, strict=True):
                limit, norm = limits[layer], layer_norms[layer]
                if gradient is not None and self.clip == "max":  # each component to +-limit
                    gradient.clamp_(-limit / factor, limit / factor)
                elif gradient is not None and norm > limit:
                    gradient.mul_(limit / norm)
            norms = norms_of(gradients, factor)
        if self.steps is not None:
            self.steps.before_step(optimizer, gradients, norms, last=last)

    def after_update(self) -> None:
        """Record the update, of which the optimizer has just taken the last step."""
        if self.steps is not None and self._made is not None:
            updates, weights = self.steps.after_update()
            if self.recorder is not None:
                whole = None if self.whole_layers is None else self.whole_layers.norms
                self.recorder.add(replace(self._made, updates=updates, weights=weights, whole_layers=whole))
        self._made = None

    def watching(self, optimizer: FairseqOptimizer, *, first: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a batch; `first`: it is the first of its update."""
        return nullcontext() if self.whole_layers is None else self.whole_layers.watching(optimizer, first=first)

    def begins_update(self) -> bool:
        """Whether a batch is the first of an update: fairseq threw all gradients away, as after an overflow in fp16."""
        return all(parameter.grad is None for _, _, parameter in self.trained)

    def check_finite(self, optimizer: FairseqOptimizer, loss: float, rows: list[int]) -> None:
        """Right after backward: a UserError that names layers and demonstrations if loss or gradient is not finite.

        fairseq itself stops before `before_step` then, without a name. In fp16 overflows of the gradient are part of
        finding the loss scale, and fairseq's business alone; the loss itself is computed in fp32 and not scaled.
        """
        if isinstance(optimizer, AMPOptimizer):
            return
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is NaN or infinite at demonstration {', '.join(map(str, rows))} (row of the train file): "
                "numbers overflow in the model; if it is the first one take another checkpoint (or precision, in "
                "fp16), else lower --lr"
            )
        if getattr(optimizer, "scaler", None) is None:
            self._check_norms(norms_of([parameter.grad for _, _, parameter in self.trained]), rows)

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

    def _check_norms(self, norms: list[float], rows: list[int]) -> None:
        """Refuse gradients that are not finite."""
        pairs = zip(self.trained, norms, strict=True)
        bad = sorted({layer for (layer, _, _), norm in pairs if not math.isfinite(norm)})
        if bad:
            layers = f"layer {bad[0]}" if len(bad) == 1 else f"layers {bad[0]}-{bad[-1]}"
            raise UserError(
                f"the gradient of {layers} is NaN or infinite at demonstration {', '.join(map(str, rows))} (row of the "
                "train file); lower --lr or set --clip-norm"
            )


def check_precision(precision: str, model: nn.Module, optimizer: FairseqOptimizer) -> None:
    """Refuse a configuration, written by hand, in which model, optimizer and the setting `precision` do not agree."""
    dtype = next(model.parameters()).dtype
    has_masters = isinstance(optimizer, FP16Optimizer | MemoryEfficientFP16Optimizer)
    if dtype != DTYPES[precision] or (precision != "fp32" and not has_masters):
        raise UserError(f"precision={precision}: fairseq's own fp16 and bf16 say otherwise; make them agree")


def choose_what_learns(model: PretrainedLM, settings: Settings) -> str:
    """Freeze all but what the settings let learn: in words "4 tensors, layers 28 to 29, 0.9 million parameters"."""
    is_lora = settings.train_parameters == "lora"  # key and value projections in a random subspace (gradients.py)
    parts = SETTINGS["train_parameters"].default if is_lora else settings.train_parameters
    model.freeze_all_but(parts, biases=not is_lora and settings.biases == "trained")
    if settings.softmax_gradient == "stopped":
        for module in attention_modules(model.decoder):
            for name, parameter in module.named_parameters():
                if name.startswith(("q_", "k_")):  # before the softmax: q_proj, k_proj, q_norm, k_norm
                    parameter.requires_grad_(False)
        if not model.trained_names:
            raise UserError(
                f"softmax_gradient=stopped: leaves nothing to learn of train_parameters={settings.train_parameters}; "
                "add self_attn.v_proj"
            )
    names = model.trained_names
    layers = sorted({int(found[1]) for name in names if (found := re.search(r"\.layers\.(\d+)\.", name))})
    number = sum(model.get_parameter(name).numel() for name in names)
    place = f"layers {', '.join(map(str, layers))}" if layers else "outside the layers"
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        place = f"layers {layers[0]} to {layers[-1]}"
    size = f"{number / 1e6:.1f} million" if number >= 100_000 else f"{number:,}"
    return f"{len(names)} tensors, {place}, {size} parameters"


def gradient_control(
    decoder: Any,
    settings: Settings,
    recorder: GradientRecorder | None = None,
    limits: pd.DataFrame | None = None,
    *,
    linearized: bool = False,
) -> GradientControl:
    """The control that the settings ask for; `limits` is a record that stands for layer_clip_value."""
    bounds = layer_limits(settings.layer_clip, settings.layer_clip_value, decoder, limits)
    # A linearized model has gradients of what learns alone.
    whole = WholeLayers(decoder) if settings.gradient_norms == "all" and not linearized else None
    low_rank = LowRank(settings.lora_rank, settings.seed) if settings.train_parameters == "lora" else None
    return GradientControl(decoder, settings.layer_clip, bounds, recorder, equal_step_size(settings), whole, low_rank)


def layer_limits(clip: str, value: str | None, decoder: Any, record: pd.DataFrame | None = None) -> Limits:
    """The limits that layer_clip_value, or the `record` of the method that it names, gives: by layer, or by step."""
    if clip == "none":
        if value is not None:
            raise UserError("layer_clip_value: no effect without layer_clip=norm or layer_clip=max")
        return []
    if value is None:
        raise UserError(f"layer_clip={clip}: needs layer_clip_value (a value, one per layer, or from:FILE)")
    if value.startswith("from:") or record is not None:
        if clip != "norm":
            raise UserError(f"layer_clip={clip}: a record holds norms; use layer_clip=norm with it")
        table = checked_record(value.removeprefix("from:"), decoder) if record is None else record
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
