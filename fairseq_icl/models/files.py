"""A model as files: a fairseq checkpoint, also of random weights, with dictionary and tokenizer, or a HF folder."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders import build_bpe
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.tokenizer import tokenize_line

from fairseq_icl.errors import UserError
from fairseq_icl.files import DEMO_MODEL, sha256_of
from fairseq_icl.models.checkpoints import (
    build_model,
    dense_options,
    is_hugging_face,
    language_model_config,
    read_checkpoint,
)
from fairseq_icl.models.hugging_face import HFModel, read_folder
from fairseq_icl.prompts import Encode, Writing

KNOWN_SHARE = 0.9
"""Share of a tokenizer's pieces that its own dictionary must hold; another model's holds far fewer."""
TOKENIZER_FILES = {
    "gpt2": {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"},
    "sentencepiece": {"sentencepiece_model": "sentencepiece.bpe.model"},
}
"""The flags of fairseq's tokenizers and the names their files have beside a published checkpoint."""
POSITIONS = 2048
"""Longest prompt of the dense language models."""


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are."""

    name: str
    checkpoint: Path
    """The weights: a fairseq checkpoint, or a Hugging Face folder."""
    dictionary: Path | None = None
    """dict.txt; a Hugging Face folder has none."""
    bpe: str | None = None
    tokenizer: Mapping[str, Path] = field(default_factory=dict)
    """fairseq's options for the tokenizer's files."""
    hugging_face: HFModel | None = None
    """The folder that dictionary and tokenizer come from, if it is one of Hugging Face."""

    @property
    def source(self) -> Path | HFModel:
        """What `load_decoder` reads the weights from."""
        return self.hugging_face if self.hugging_face and self.checkpoint.is_dir() else self.checkpoint

    def options(self) -> dict[str, Any]:
        """What fairseq's task must be told to use this model."""
        if self.dictionary is None:
            return {"base_model": str(self.checkpoint)}
        named = {"base_model": str(self.checkpoint), "dict": str(self.dictionary), "bpe": self.bpe}
        return named | {name: str(path) for name, path in self.tokenizer.items()}

    @cached_property
    def sha256(self) -> str:
        """Hash of the checkpoint; of a Hugging Face folder's config, tokenizer and weights."""
        return self.source.sha256 if isinstance(self.source, HFModel) else sha256_of(self.checkpoint)

    def load_dictionary(self) -> Dictionary:
        """The model's dictionary."""
        if self.hugging_face is not None:
            return self.hugging_face.dictionary
        return load_dictionary(self.dictionary or self.checkpoint.parent / "dict.txt")

    @cached_property
    def writing(self) -> Writing:
        """How the model wants its text written: tokenizer, special symbols, number of positions."""
        if self.hugging_face is not None:
            return self.hugging_face.writing
        dictionary = self.load_dictionary()
        encode = line_encoder(dictionary, self._load_bpe())
        positions = POSITIONS  # of random weights that are not made yet
        if self.checkpoint.exists():
            found = language_model_config(read_checkpoint(self.checkpoint), self.checkpoint)
            positions = found.max_target_positions
        bos, eos, unknown, newline = dictionary.bos(), dictionary.eos(), dictionary.unk(), tuple(encode("\n"))
        newline = () if unknown in newline else newline
        return Writing(
            encode, positions, bos, separator=(eos,), line_break=(eos,), unknown=unknown, eos=eos, newline=newline
        )

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token, for people to read; joined it is about the text that was encoded."""
        return [self._spelled(token) for token in tokens]

    @cached_property
    def _spelled(self) -> Callable[[int], str]:
        folder, dictionary = self.hugging_face, self.load_dictionary()
        if folder is not None:
            return cache(lambda token: folder.decode([token]))
        if not self.bpe:  # its symbols are words
            return lambda token: f" {dictionary[token]}"
        if self.bpe == "sentencepiece":  # whose own way back would lose the space in front of a word
            return lambda token: dictionary[token].replace("\u2581", " ")
        bpe = self._load_bpe()
        return cache(lambda token: bpe.decode(dictionary[token]))

    def _load_bpe(self) -> Any:
        return load_bpe(self.bpe, **{name: str(path) for name, path in self.tokenizer.items()})


def find_files(
    path: str | Path,
    *,
    name: str | None = None,
    bpe: str | None = "auto",
    tokenizer: str | Path | None = None,
    dictionary: str | Path | None = None,
    tokenizer_files: Mapping[str, str | Path | None] | None = None,
) -> ModelFiles:
    """The files of the model at `path`: a checkpoint, a folder with model.pt, a Hugging Face folder, or "demo".

    Dictionary and tokenizer are looked for beside the checkpoint, or in the folder `tokenizer`; single files can be
    named in `dictionary` and `tokenizer_files`. `bpe="auto"` takes the tokenizer whose files are there.
    """
    checkpoint = DEMO_MODEL if str(path) == "demo" else Path(path)
    if is_hugging_face(checkpoint):
        given = [bpe if bpe != "auto" else None, tokenizer, dictionary, *(tokenizer_files or {}).values()]
        if any(given):
            raise UserError(
                f"{checkpoint}: a Hugging Face folder has its own dictionary and tokenizer; leave out "
                f"{next(filter(None, given))} (bpe, dict, tokenizer)"
            )
        return ModelFiles(name or checkpoint.resolve().name, checkpoint, hugging_face=read_folder(checkpoint))
    checkpoint = checkpoint / "model.pt" if checkpoint.is_dir() else checkpoint
    if not checkpoint.is_file():
        raise UserError(f"{checkpoint}: no such checkpoint; give the path of a model.pt, or of a model's folder")
    beside = Path(tokenizer) if tokenizer else checkpoint.parent
    bpe = find_tokenizer(beside) if bpe == "auto" else bpe
    if bpe is not None and bpe not in TOKENIZER_FILES:
        raise UserError(f"bpe={bpe}: not a tokenizer known here; choose from {', '.join(TOKENIZER_FILES)}")
    name = name or ("demo" if checkpoint == DEMO_MODEL else checkpoint.resolve().parent.name) or "model"
    named, usual = tokenizer_files or {}, TOKENIZER_FILES.get(bpe or "", {})
    found = {flag: Path(named.get(flag) or beside / file) for flag, file in usual.items()}
    return ModelFiles(name, checkpoint, Path(dictionary or beside / "dict.txt"), bpe, found)


def find_tokenizer(folder: Path) -> str:
    """The name of the tokenizer whose files lie in the folder."""
    for name, files in TOKENIZER_FILES.items():
        if all((folder / file).is_file() for file in files.values()):
            return name
    wanted = " or ".join(f"{' and '.join(files.values())} ({name})" for name, files in TOKENIZER_FILES.items())
    raise UserError(f"{folder}: no tokenizer files; put {wanted} there, or name the folder that has them (tokenizer)")


def line_encoder(dictionary: Dictionary, bpe: Any | None) -> Encode:
    """line -> ids of its pieces, by what `load_bpe` returns, in the dictionary, without EOS."""
    _check_match(dictionary, bpe)

    @lru_cache(maxsize=4096)  # label words and shared inputs recur
    def encode(line: str) -> tuple[int, ...]:
        pieces = line if bpe is None else bpe.encode(line)
        return tuple(dictionary.index(piece) for piece in tokenize_line(pieces))

    return lambda line: list(encode(line))


def load_dictionary(path: str | Path) -> Dictionary:
    """The dictionary in a fairseq dict.txt."""
    if not Path(path).is_file():
        raise UserError(
            f"{path}: no such file; put the dict.txt that came with the model there, or name it (--dict) or its folder "
            "(model.tokenizer=FOLDER)"
        )
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # fairseq raises a bare Exception for a wrong encoding
        raise UserError(f"{path}: not a fairseq dictionary ({error}); its lines must read TOKEN COUNT") from error


def load_bpe(name: str | None, **files: str | None) -> Any | None:
    """fairseq's tokenizer `name` built from its files (`gpt2_encoder_json=...`); None without a name."""
    if not name:
        return None
    for option, path in files.items():
        flag = f"--{option.replace('_', '-')}"
        if path is None or not Path(path).is_file():
            raise UserError(
                f"{path or flag}: no such file; the tokenizer {name} needs the files that came with the model beside "
                f"the checkpoint, or named ({flag} FILE, or model.tokenizer=FOLDER)"
            )
    options = {"sentencepiece_enable_sampling": False, "sentencepiece_alpha": None} if name == "sentencepiece" else {}
    try:
        return build_bpe(Namespace(bpe=name, **files, **options))
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, OSError) as error:
        named = ", ".join(map(str, files.values()))
        raise UserError(f"{named}: not the files of a {name} tokenizer ({error}); download them again") from error


def _check_match(dictionary: Dictionary, bpe: Any) -> None:
    """Refuse BPE files that do not belong together or to the dictionary: they would turn every text into nonsense."""
    pieces: list[str] = []
    if hasattr(getattr(bpe, "bpe", None), "bpe_ranks"):  # gpt2
        pieces = [str(number) for number in bpe.bpe.encoder.values()]
        if any("".join(pair) not in bpe.bpe.encoder for pair in bpe.bpe.bpe_ranks):
            raise UserError("--gpt2-vocab-bpe has merges that --gpt2-encoder-json does not know; use one model's files")
    elif hasattr(bpe, "sp"):  # sentencepiece
        pieces = [bpe.sp.id_to_piece(number) for number in range(bpe.sp.get_piece_size())]
    known = sum(piece in dictionary for piece in pieces)
    if known < KNOWN_SHARE * len(pieces):
        raise UserError(
            f"the dictionary holds only {known} of the tokenizer's {len(pieces)} pieces: dict.txt and BPE files are of "
            f"different models; use the files that came with the model"
        )


def random_model_options(shape: Mapping[str, int]) -> Namespace:
    """Options of a dense language model, as its checkpoint holds them."""
    return Namespace(arch="transformer_lm_gpt", task="language_modeling", **dense_options(shape, POSITIONS))


def random_model(dictionary: Dictionary, shape: Mapping[str, int], seed: int = 1) -> TransformerLanguageModel:
    """A dense language model with fairseq's random initialisation."""
    return build_model(language_model_config({"args": random_model_options(shape)}, "random"), dictionary, seed)


def save_random_model(path: Path, dictionary: Dictionary, shape: Mapping[str, int], seed: int = 1) -> None:
    """A checkpoint of such a model, in half precision as published."""
    # fairseq's marker of decoders with a final layer norm is part of the state.
    state = {name: tensor.half() for name, tensor in random_model(dictionary, shape, seed).state_dict().items()}
    torch.save({"args": random_model_options(shape), "model": state}, path)
