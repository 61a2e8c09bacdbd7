"""The device that computes: which one, with which rounding, and one clear line where its memory is full."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fairseq_icl.errors import UserError, out_of_memory


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """The device of that name; by default a GPU if there is one.

    From the first GPU on, torch computes products in fp32 as they are asked for: without TF32, which keeps ten bits of
    their factors, and sums up products in half precision in fp32.
    """
    if name == "auto":
        smaller = "name one (cuda:1), and take precision=fp16 or bf16 if the model is too large for it"
        raise UserError(f"device=auto: a model runs on one device and is not spread over several; {smaller}")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device={name}: not a device; give cpu, cuda, or cuda:1 for the second GPU") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"torch sees {count} GPU(s)" if count else "torch sees no GPU"
            raise UserError(f"device={name}: {found} here; check nvidia-smi and CUDA_VISIBLE_DEVICES, or take cpu")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products are then the same in every run
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def present_device(name: str) -> str:
    """The device of that name, or the CPU where there is no such GPU: what was observed there may be read anywhere."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return name if torch.device(name).type == "cuda" and (torch.device(name).index or 0) < count else "cpu"


def describe_device(device: torch.device | str) -> dict[str, object]:
    """What results say of it: its kind and name, and on a GPU whether products were rounded to TF32."""
    if torch.device(device).type != "cuda":
        return {"device": f"cpu {platform.machine()}"}
    forced = os.environ.get("NVIDIA_TF32_OVERRIDE") == "1"
    rounds = bool(torch.backends.cuda.matmul.allow_tf32) or forced
    return {"device": torch.cuda.get_device_name(torch.device(device)), "tf32": rounds}


@contextmanager
def within_memory(doing: str) -> Iterator[None]:
    """One line that says what to change, where a GPU has no memory left for what happens inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{doing}: {out_of_memory(error)}") from error


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Inside, a GPU adds up in the same order in every run, where torch has such a way (attention's backward has)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
