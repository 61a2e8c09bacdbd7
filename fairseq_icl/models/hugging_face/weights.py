"""Files of weights, opened without running anything that is in them: safetensors, and pickles of plain tensors."""

import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairseq_icl.errors import UserError

Content = tuple[list[str], Callable[[str], Tensor]]
"""Names of the tensors in a file, and a function that reads one, as a view of the mapped file."""
MASKS = r".*attn\.(?:masked_)?bias|.*inv_freq"
"""Tensors that old files hold and no model reads."""


def check_files(paths: list[Path]) -> None:
    """Refuse files that cannot be opened so, or that hold quantised weights."""
    for path in paths:
        if path.suffix != ".json":
            names, read = opened(path)
            for name in names:
                kind = read(name).dtype
                if not kind.is_floating_point and not re.fullmatch(MASKS, name):
                    said = str(kind).removeprefix("torch.")
                    raise UserError(f"{path}: {name} is {said}: quantised; use the original weights of the model")


def opened(path: Path) -> Content:
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise UserError(f"{path}: a git-lfs pointer instead of the weights; run `git lfs pull` in the folder")
    try:
        if path.suffix == ".safetensors":
            mapped = safe_open(path, framework="pt")
            return list(mapped.keys()), mapped.get_tensor
        # Files older than torch 1.6 are not zip files and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: refused: it is not a plain file of weights (corrupt, or it asks to run code of its own); "
            "use the model's safetensors"
        ) from error
    except (SafetensorError, Exception) as error:  # a damaged pickle can make the unpickler stumble in any way
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"{path}: truncated or corrupt; download it again [{reason}]") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: not a file of named tensors; use the model's safetensors")
    return list(state), state.__getitem__
