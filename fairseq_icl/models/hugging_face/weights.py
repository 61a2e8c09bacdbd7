"""The weights of a Hugging Face folder, tensor by tensor, into a fairseq decoder in fp32.

Files are mapped into memory, not read, and mapped anew every 32 MB: pages that were read count as this process's
memory until then. So the peak is the fp32 weights, the largest tensor and little more.
"""

import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairseq_icl.compat import without_initialisation
from fairseq_icl.errors import UserError
from fairseq_icl.models.hugging_face import HFModel, read_folder, read_json
from fairseq_icl.models.hugging_face.names import Cut, Sizes, translate
from fairseq_icl.models.rotary_lm import RotaryDecoder

MAPPED = 32 * 2**20
"""Bytes that are read from a mapped file before it is mapped anew."""
PRECISIONS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EMBEDDINGS, OUTPUT = "embed_tokens.weight", "output_projection.weight"

Keep = Callable[[str], bool]
Content = tuple[list[str], Callable[[str], Tensor]]
"""Names of the tensors in a file, and a function that reads one."""


def load_decoder(folder: str | Path | HFModel, dictionary: Dictionary | None = None) -> FairseqDecoder:
    """The decoder with all weights of the folder, in fp32: fairseq's `TransformerDecoder`, or a `RotaryDecoder`.

    `dictionary` must be the folder's own (`HFModel.dictionary`), which is used when it is not given.
    """
    model = _as_model(folder)
    with without_initialisation():
        decoder = build_decoder(model, dictionary)
    load_weights(decoder, model)
    return decoder


def build_decoder(folder: str | Path | HFModel, dictionary: Dictionary | None = None) -> FairseqDecoder:
    """The folder's decoder with random weights from torch's generator: fairseq's initialisation, or normal(0, 0.02)."""
    model = _as_model(folder)
    dictionary = model.dictionary if dictionary is None else dictionary
    if dictionary != model.dictionary:
        raise UserError(
            f"{model.folder}: the dictionary ({len(dictionary):,} symbols) is not the one of this folder "
            f"({len(model.dictionary):,}); leave out --dict"
        )
    if model.rotary is not None:
        return RotaryDecoder(model.rotary, dictionary)
    vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return TransformerLanguageModel.build_model(model.fairseq_config(), vocabulary).decoder


@torch.no_grad()
def load_weights(decoder: FairseqDecoder, folder: str | Path | HFModel, keep: Keep = lambda name: True) -> None:
    """Copy weights of the folder into `decoder`, those whose parameter name (`layers.0.fc1.weight`) `keep` accepts.

    A tensor that is unknown, missing, of the wrong shape or not finite is a UserError.
    """
    model = _as_model(folder)
    # With tied matrices this has one name for both, the embedding's.
    missing = {name: parameter for name, parameter in decoder.named_parameters() if keep(name)}
    for name, tensor, file in _tensors(model, keep):
        parameter = missing.pop(name, None)
        if parameter is None:
            raise UserError(
                f"{file}: it holds {name} twice, or config.json has no such layer; get the model's own files"
            )
        if parameter.shape != tensor.shape:
            raise UserError(
                f"{file}: {name} has the shape {tuple(tensor.shape)}, config.json says {tuple(parameter.shape)}; "
                "use weights and config.json of one model"
            )
        parameter.copy_(tensor)
        low, high = torch.aminmax(parameter)  # both are NaN if any value is
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{file}: {name} holds NaN or infinite weights; get a sound copy of the model")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{model.weight_files()[0]}: no weights for {next(iter(missing))}{more}; download it again")


def tensors(folder: str | Path | HFModel, keep: Keep = lambda name: True) -> Iterator[tuple[str, Tensor]]:
    """(decoder parameter, tensor in the file's precision) for every weight that `keep` accepts.

    A tensor may be a view of the mapped file: use it before asking for the next. The shapes are not checked here.
    """
    for name, tensor, _ in _tensors(_as_model(folder), keep):
        yield name, tensor


def _tensors(model: HFModel, keep: Keep) -> Iterator[tuple[str, Tensor, Path]]:
    """`tensors` with the file that each is in; an unknown name in a file is a UserError."""
    rotary, options = model.rotary, model.options or {}
    sizes = Sizes(model.pad, rotary.attention_heads if rotary else options["decoder_attention_heads"])
    for source in _files(model):
        for name in source.names:
            targets, cut = _translate(model, name, source.path)
            if model.tied and targets == (OUTPUT,):
                _check_tied(model, source.read(name), source.path, name)
                continue
            if not any(map(keep, targets)):
                continue
            tensor = source.read(name)
            if tensor.dtype not in PRECISIONS:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise UserError(f"{source.path}: {name} is {kind}: quantised; use the original weights of the model")
            parts = cut(tensor, sizes)
            if len(parts) != len(targets):
                raise UserError(f"{source.path}: {name} has the shape {tuple(tensor.shape)}; get the model's own file")
            for target, part in zip(targets, parts, strict=True):
                if keep(target):
                    yield target, part, source.path
            del tensor, parts, part


def _translate(model: HFModel, name: str, file: Path) -> tuple[tuple[str, ...], Cut]:
    known = translate(model.family, name)
    if known is None:
        raise UserError(f"{file}: tensor {name!r} is unknown in {model.family} models; use the model's own weights")
    return known


def _check_tied(model: HFModel, output: Tensor, file: Path, name: str) -> None:
    """Older files store a tied matrix twice; two different ones contradict config.json."""
    for source in _files(model):
        for other in source.names:
            if _translate(model, other, source.path)[0] == (EMBEDDINGS,):
                if not torch.equal(source.read(other), output):
                    raise UserError(
                        f"{file}: {name} is not the embedding matrix, though config.json ties them "
                        "(tie_word_embeddings); use weights and config.json of one model"
                    )
                return


class _WeightFile:
    """The tensors of one mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _refuse_pointer(path)
        self._open = _open_safetensors if path.suffix == ".safetensors" else _open_pickle
        self._content: Content | None = self._open(path)
        self._used = 0
        self.names = sorted(self._content[0])

    def read(self, name: str) -> Tensor:
        """One tensor, a view of the mapped file."""
        if self._content is None or self._used > MAPPED:
            self._content = None  # unmapped before it is mapped again
            self._content, self._used = self._open(self.path), 0
        tensor = self._content[1](name)
        self._used += tensor.numel() * tensor.element_size()
        return tensor


def _files(model: HFModel) -> Iterator[_WeightFile]:
    """The weight files; a UserError if a shard lacks a tensor that the index promises."""
    paths = model.weight_files()
    promised: dict[str, str] = {}
    if paths[0].suffix == ".json":
        promised = read_json(paths[0])["weight_map"]
        paths = paths[1:]
    for path in paths:
        file = _WeightFile(path)
        if promised:
            absent = {name for name, shard in promised.items() if shard == path.name} - set(file.names)
            if absent:
                raise UserError(f"{path}: it lacks {min(absent)}, which the index says is in it; download it again")
        yield file


def _open_safetensors(path: Path) -> Content:
    try:
        file = safe_open(path, framework="pt")
        return list(file.keys()), file.get_tensor
    except (SafetensorError, OSError, ValueError) as error:
        raise _broken(path, error) from error


def _open_pickle(path: Path) -> Content:
    try:
        # Files older than torch 1.6 are not zip files and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: refused: it is not a plain file of weights (corrupt, or it asks to run code of its own); "
            "use the model's safetensors"
        ) from error
    except Exception as error:  # a damaged pickle can make the unpickler stumble in any way
        raise _broken(path, error) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: not a file of named tensors; use the model's safetensors")
    return list(state), state.__getitem__


def _refuse_pointer(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise UserError(f"{path}: a git-lfs pointer instead of the weights; run `git lfs pull` in the folder")


def _broken(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return UserError(f"{path}: truncated or corrupt; download it again [{reason}]")


def _as_model(folder: str | Path | HFModel) -> HFModel:
    return folder if isinstance(folder, HFModel) else read_folder(folder)
