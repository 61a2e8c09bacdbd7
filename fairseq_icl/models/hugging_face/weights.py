"""Files of weights, opened without running anything that is in them: safetensors, and pickles of plain tensors.

Those of XGLM, and of a dense LM in its form, go into fairseq's decoder tensor by tensor, in the precision asked for.
Files are mapped into memory, not read, and mapped anew every 32 MB: pages that were read count as this process's memory
until then. So the peak is the weights in that precision, the largest tensor and little more.
"""

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from fairseq.models.transformer import TransformerDecoder
from safetensors import safe_open
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import is_finite
from fairseq_icl.models.hugging_face.folder import HFModel

MASKS = r".*attn\.(?:masked_)?bias|.*inv_freq"
"""Tensors that old files hold and no model reads."""
UNUSED = r"model\.embed_positions\.weights?|(?:model|decoder)\.mevo_layer\..*"
"""The sinus table, and an unused layer of XGLM 4.5B."""
MAPPED = 32 * 2**20
"""Bytes that are read from a mapped file before it is mapped anew."""

Keep = Callable[[str], bool]
"""Whether a parameter of the decoder (`layers.0.fc1.weight`) is taken from the files."""


def check_files(paths: list[Path]) -> None:
    """Refuse files that cannot be opened so, or that hold quantised weights."""
    for path in (path for path in paths if path.suffix != ".json"):
        names, read = opened(path)
        for name in names:
            kind = read(name).dtype
            if not kind.is_floating_point and not re.fullmatch(MASKS, name):
                said = str(kind).removeprefix("torch.")
                raise UserError(f"{path}: {name} is {said}: quantised; use the original weights of the model")


def opened(path: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Names of the tensors in a file, and a function that reads one, as a view of the mapped file."""
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
    except Exception as error:  # a damaged pickle can make the unpickler stumble in any way
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"{path}: truncated or corrupt; download it again [{reason}]") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: not a file of named tensors; use the model's safetensors")
    return list(state), state.__getitem__


@torch.no_grad()
def load_weights(
    decoder: TransformerDecoder, model: HFModel, keep: Keep, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Put the weights of XGLM's folder that `keep` accepts into `decoder`, and insist on completeness."""
    # With tied matrices this has one name for both, the embedding's.
    missing = {name: parameter for name, parameter in decoder.named_parameters() if keep(name)}
    for name, tensor, file in _tensors(model, keep):
        if name == "output_projection.weight" and name not in missing and decoder.share_input_output_embed:
            continue
        parameter = missing.pop(name, None)
        if parameter is None or parameter.shape != tensor.shape or not tensor.is_floating_point():
            wanted = "nothing of that name" if parameter is None else tuple(parameter.shape)
            raise UserError(
                f"{file}: {name} has the shape {tuple(tensor.shape)} of {tensor.dtype}, config.json says {wanted}; "
                "use weights and config.json of one model, not quantised"
            )
        parameter.data = tensor.to(device, dtype, copy=True)
        if not is_finite(tensor):
            raise UserError(f"{file}: {name} holds NaN or infinite weights; get a sound copy of the model")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{model.weight_files()[0]}: no weights for {next(iter(missing))}{more}; download it again")


def _tensors(model: HFModel, keep: Keep) -> Iterator[tuple[str, Tensor, Path]]:
    """(decoder parameter, tensor in the file's precision, file) for every weight that `keep` accepts."""
    for path in (path for path in model.weight_files() if path.suffix != ".json"):
        content, used = opened(path), 0
        for name in sorted(content[0]):
            own = name.removeprefix("model.").replace("lm_head.", "output_projection.")
            if re.fullmatch(UNUSED, name) or not keep(own):
                continue
            if used > MAPPED:
                del content  # unmapped before it is mapped again
                content, used = opened(path), 0
            tensor = content[1](name)
            used += tensor.nbytes
            if model.family == "dense" and own.startswith(("embed_tokens.", "output_projection.")):
                tensor = torch.cat([tensor[-4:], tensor[:-4]])  # four specials come last in the file, first in fairseq
            yield own, tensor, path
            del tensor
