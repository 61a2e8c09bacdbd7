"""A Hugging Face folder as a model: config.json (see `architecture`), weights and tokenizer (see `tokenizer`).

The config is checked when the folder is opened, weights and tokenizer are read when they are needed. Nothing is
converted on disk.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from fairseq_icl.errors import UserError
from fairseq_icl.models.hugging_face.architecture import Architecture, read_architecture
from fairseq_icl.models.hugging_face.tokenizer import Vocabulary, read_vocabulary, tokenizer_files
from fairseq_icl.prompts import Writing

CONFIG = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of unsharded weights, the preferred one first; NAME.index.json lists the shards of sharded ones."""
UNKNOWN_WORDS = ("<unk>", "[UNK]")
TRAINED_WITH_EOS = ("dense", "xglm")
"""Families whose training texts had no line breaks, but one EOS where a line ended."""


@dataclass(frozen=True)
class HFModel:
    """A model in a Hugging Face folder; token ids are rows of the decoder's embedding matrix throughout."""

    folder: Path
    architecture: Architecture

    @property
    def family(self) -> str:
        """transformers' model_type; dense for a dense LM in XGLM's form."""
        return self.architecture.family

    @property
    def is_fairseqs(self) -> bool:
        """Whether fairseq's own decoder runs it; otherwise transformers' code does."""
        return self.architecture.options is not None

    @property
    def positions(self) -> int:
        """Number of positions the model was trained for."""
        return self.architecture.positions

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Tokenizer and dictionary."""
        wanted = self.architecture
        separator_is_eos = wanted.family in TRAINED_WITH_EOS
        return read_vocabulary(
            self.folder, wanted.family, wanted.vocab_size, wanted.bos, wanted.eos, wanted.pad, separator_is_eos
        )

    @property
    def dictionary(self) -> Dictionary:
        """fairseq's dictionary: symbol i belongs to row i of the embedding matrix."""
        return self.vocabulary.dictionary

    @property
    def bos(self) -> int:
        """The token that a prompt begins with. For OPT and XGLM that is `</s>`."""
        return self.dictionary.bos()

    @property
    def eos(self) -> int:
        """The token that ends a text."""
        return self.dictionary.eos()

    @property
    def pad(self) -> int:
        """A token that fills up batches and that no prompt contains."""
        return self.dictionary.pad()

    @property
    def separator(self) -> tuple[int, ...]:
        """What stands between two demonstrations: EOS where the model was trained so, the line break elsewhere."""
        return self.vocabulary.separator

    def encode_line(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens."""
        return self.vocabulary.encode_line(text)

    @cached_property
    def writing(self) -> Writing:
        """How the model wants its text written. Line breaks stay what they are unless it never saw any."""
        encode = lru_cache(maxsize=4096)(lambda text: tuple(self.encode_line(text)))
        eos = (self.eos,)
        return Writing(
            encode=lambda text: list(encode(text)),
            max_positions=self.positions,
            bos=self.bos,
            separator=self.separator,
            line_break=eos if self.family in TRAINED_WITH_EOS else None,
            unknown=self.dictionary.unk() if self.dictionary.unk_word in UNKNOWN_WORDS else None,
            eos=self.eos,
            newline=self.vocabulary.newline,
        )

    @property
    def shape(self) -> dict[str, int]:
        """Layers, width, heads, feed-forward width and vocabulary."""
        return self.architecture.shape | {"vocabulary": self.architecture.vocab_size}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        return self.vocabulary.decode(ids)

    def weight_files(self) -> list[Path]:
        """The file or files with the weights, after their index if there is one; a UserError if one is missing."""
        return weight_files(self.folder)

    @cached_property
    def sha256(self) -> str:
        """Hash over config.json, the tokenizer's files, the index and all weights, in this order, with their names."""
        total = hashlib.sha256()
        for path in (self.folder / CONFIG, *tokenizer_files(self.folder), *self.weight_files()):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{path.name} {digest}\n".encode())
        return total.hexdigest()

    def fairseq_config(self) -> TransformerLanguageModelConfig:
        """fairseq's `transformer_lm` configuration, dropout off, of a model that fairseq's decoder runs."""
        config = TransformerLanguageModelConfig()
        for name in ("add_bos_token", "tpu", "checkpoint_activations"):
            setattr(config, name, False)
        for name in ("dropout", "attention_dropout", "activation_dropout", "relu_dropout", "decoder_layerdrop"):
            setattr(config, name, 0.0)
        for name, value in (self.architecture.options or {}).items():
            setattr(config, name, value)
        return config


def read_folder(path: str | Path) -> HFModel:
    """The model in the folder, its config.json checked: what is not understood or not implemented is refused.

    Weights and tokenizer are opened when something asks for them.
    """
    folder = Path(path)
    config = folder / CONFIG
    if not config.is_file():
        raise UserError(f"{config}: no such file; give the folder of a Hugging Face model")
    values = read_json(config)
    return HFModel(folder, read_architecture(values, config))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object; download it again")
    return values


def weight_files(folder: Path) -> list[Path]:
    """The weights in the folder: one file, or an index and its shards in order of their names."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [index, *_shards(index)]
    raise UserError(f"{folder}: no {' or '.join(WEIGHT_FILES)} in it, nor their shards; download the weights")


def _shards(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index}: it has no weight_map; download it again")
    shards = [index.parent / name for name in sorted(set(names.values()))]
    for shard in shards:
        if shard.parent != index.parent:
            raise UserError(f"{index}: it names {shard.name!r} outside its folder; download the index again")
        if not shard.is_file():
            raise UserError(f"{shard}: this shard of the weights is missing ({len(shards)} in all); download it")
    return shards
