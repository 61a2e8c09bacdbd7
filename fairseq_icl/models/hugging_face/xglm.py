"""The weights of XGLM, or of a dense LM in its form, tensor by tensor, into fairseq's decoder in fp32.

Files are mapped into memory, not read, and mapped anew every 32 MB: pages that were read count as this process's
memory until then. So the peak is the fp32 weights, the largest tensor and little more.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel
from torch import Tensor

from fairseq_icl.compat.models import without_initialisation
from fairseq_icl.errors import UserError
from fairseq_icl.models.hugging_face import HFModel
from fairseq_icl.models.hugging_face.weights import opened

MAPPED = 32 * 2**20
"""Bytes that are read from a mapped file before it is mapped anew."""
UNUSED = r"model\.embed_positions\.weights?|(?:model|decoder)\.mevo_layer\..*"
"""The sinus table, and an unused layer of the 4.5B model."""

Keep = Callable[[str], bool]


def load_decoder(
    model: HFModel, dictionary: Dictionary, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> TransformerDecoder:
    """fairseq's decoder with all weights of the folder."""
    with without_initialisation():
        decoder = build_decoder(model, dictionary)
    load_weights(decoder, model, dtype=dtype, device=device)
    return decoder


def build_decoder(model: HFModel, dictionary: Dictionary) -> TransformerDecoder:
    """fairseq's decoder with its random initialisation from torch's generator."""
    vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    decoder: TransformerDecoder = TransformerLanguageModel.build_model(model.fairseq_config(), vocabulary).decoder
    return decoder


@torch.no_grad()
def load_weights(
    decoder: TransformerDecoder,
    model: HFModel,
    keep: Keep = lambda name: True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Copy weights of the folder into `decoder`, those whose parameter name (`layers.0.fc1.weight`) `keep` accepts.

    A tensor that is unknown, missing, of the wrong shape or not finite is a UserError.
    """
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
        low, high = torch.aminmax(tensor)  # both are NaN if any value is
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{file}: {name} holds NaN or infinite weights; get a sound copy of the model")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{model.weight_files()[0]}: no weights for {next(iter(missing))}{more}; download it again")


def _tensors(model: HFModel, keep: Keep) -> Iterator[tuple[str, Tensor, Path]]:
    """(decoder parameter, tensor in the file's precision, file) for every weight that `keep` accepts."""
    for path in model.weight_files():
        if path.suffix == ".json":
            continue
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
