"""Half precision, also without a GPU: fairseq's fp16 and bf16 on the CPU, and gradients behind a loss scale."""

from types import ModuleType
from typing import Any

import torch
from fairseq import trainer, utils
from fairseq.distributed import utils as distributed_utils
from fairseq.optim import FP16Optimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from torch import Tensor, nn

from fairseq_icl.errors import UserError


def train_in_half_precision_without_cuda() -> None:
    """Let fairseq's FP16Optimizer and its skipping of overflows work on the CPU.

    The optimizer asks CUDA for the device of its flat fp32 copy (fairseq/optim/fp16_optimizer.py), and after an
    overflow the trainer puts a zero on the GPU (fairseq/trainer.py, train_step), if there is one or not.
    """
    build = FP16Optimizer.build_fp32_params.__func__

    def build_fp32_params(cls: Any, args: Any, params: Any, flatten: bool = True) -> Any:
        if not flatten or params[0].is_cuda:
            return build(cls, args, params, flatten)
        flat = nn.Parameter(torch.cat([parameter.detach().float().flatten() for parameter in params]))
        flat.grad = torch.zeros_like(flat)
        return {params[0].device.index: flat}

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        made = torch.tensor(*args, **kwargs)
        if not torch.cuda.is_available():
            made.cuda = lambda *_, **__: made  # type: ignore[method-assign]
        return made

    FP16Optimizer.build_fp32_params = classmethod(build_fp32_params)
    trainer.torch = ModuleType("torch")  # for fairseq's trainer alone
    vars(trainer.torch).update(vars(torch), tensor=tensor)


def clip_on_the_cpu_beside_a_gpu() -> None:
    """Let a model on the CPU learn where there is a GPU: fairseq puts the gradient's norm on that, whatever learns."""
    original = utils.clip_grad_norm_

    def clip_grad_norm_(params: Any, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        params = [params] if isinstance(params, Tensor) else list(params)
        gradients = [parameter.grad for parameter in params if parameter.grad is not None]
        if not gradients or gradients[0].is_cuda or not torch.cuda.is_available():
            return original(params, max_norm, aggregate_norm_fn)
        norm = torch.stack([torch.norm(gradient, p=2, dtype=torch.float32) for gradient in gradients]).norm()
        if max_norm > 0:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    utils.clip_grad_norm_ = clip_grad_norm_


def tell_lost_loss_scale() -> None:
    """One clear line where no loss scale is small enough; fairseq would write a crash.pt and a traceback."""
    original = DynamicLossScaler.check_overflow

    def check_overflow(self: Any, grad_norm: Any) -> None:
        try:
            original(self, grad_norm)
        except FloatingPointError as error:
            raise UserError(
                f"the gradient overflows fp16 at every loss scale down to {self.min_loss_scale:g}; lower the learning "
                "rate, or use precision=bf16 or fp32"
            ) from error

    DynamicLossScaler.check_overflow = check_overflow


def true_gradients(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[list[Tensor | None], float]:
    """(gradients, factor): `optimizer` will step with factor * gradients; changing them in place changes the step.

    In fp32 these are the parameters' own gradients and 1. fairseq's fp16 optimizers keep loss-scaled gradients and
    apply the scale, the average and --clip-norm as one pending factor; the plain one steps with fp32 copies. None of
    that can be asked for, so it is read from their private attributes.
    """
    factor = float(getattr(optimizer, "_multiply_factor", 1.0))
    masters = getattr(optimizer, "fp32_params", None)
    if masters is None:
        return [parameter.grad for parameter in parameters], factor
    optimizer._sync_fp16_grads_to_fp32()
    copies: dict[int, Tensor] = {}  # of each fp16 parameter
    if optimizer.has_flat_params:
        for device, flat in masters.items():  # in which they lie in parameter order
            halves = [half for half in optimizer.fp16_params if half.device.index == device]
            copies |= zip(map(id, halves), flat.grad.split([half.numel() for half in halves]), strict=True)
    else:
        copies |= {id(half): full.grad for half, full in zip(optimizer.fp16_params, masters, strict=True)}
    return [copies[id(parameter)] for parameter in parameters], factor


def loss_scale(optimizer: Any) -> float:
    """What fairseq multiplies the loss with before `backward`: 1, or the scale of fp16 or of mixed precision."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale() if hasattr(scaler, "get_scale") else scaler.loss_scale)


def gather_without_cuda() -> None:
    """Let several processes validate without GPUs: fairseq's `all_gather_list` always takes CUDA buffers."""
    original = distributed_utils.all_gather_list

    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        if torch.cuda.is_available():
            return original(data, group, max_size)
        group = distributed_utils.get_global_group() if group is None else group
        gathered = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(gathered, data, group=group)
        return gathered

    distributed_utils.all_gather_list = all_gather_list
