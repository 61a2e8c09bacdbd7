"""A Hugging Face folder as a model: config.json, weights and tokenizer (see `tokenizer`).

The config is checked when the folder is opened, weights and tokenizer are read when they are needed; nothing is
converted on disk. transformers reads the config, but for XGLM: its XGLM lets no other code attend, and the papers'
dense LMs circulate in its form. These two run on fairseq's decoder, which represents them exactly, all others as
transformers runs them (`models.transformers_lm`).
"""

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import language_model_config
from fairseq_icl.models.hugging_face.tokenizer import Vocabulary, read_vocabulary, tokenizer_files
from fairseq_icl.prompts import Writing

CONFIG = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of unsharded weights, the preferred one first; NAME.index.json lists the shards of sharded ones."""
UNKNOWN_WORDS = ("<unk>", "[UNK]")
TRAINED_WITH_EOS = ("dense", "xglm")
"""Families whose training texts had no line breaks, but one EOS where a line ended."""
FAIRSEQ_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate", "tanh": "tanh", "linear": "linear"}
TRAINED_ON_EOS = ("opt",)
"""Families whose texts begin with EOS, whatever old files say."""


@dataclass(frozen=True)
class HFModel:
    """A model in a Hugging Face folder; token ids are rows of the decoder's embedding matrix throughout."""

    folder: Path
    family: str
    """transformers' model_type; "dense" for a dense LM in XGLM's form."""
    vocab_size: int
    positions: int
    """Number of positions the model was trained for."""
    tokens: tuple[int, int, int | None]
    """BOS, EOS and padding as config.json has them, not yet rows of the embedding matrix."""
    sizes: dict[str, int]
    """Layers, width, heads and feed-forward width."""
    options: dict[str, Any] | None = None
    """Options of fairseq's `TransformerLanguageModelConfig`; None for a model that transformers runs."""

    @property
    def is_fairseqs(self) -> bool:
        """Whether fairseq's own decoder runs it; otherwise transformers' code does."""
        return self.options is not None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Tokenizer and dictionary."""
        with_eos = self.family in TRAINED_WITH_EOS
        return read_vocabulary(self.folder, self.family, self.vocab_size, *self.tokens, separator_is_eos=with_eos)

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
        return self.sizes | {"vocabulary": self.vocab_size}

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
        return language_model_config({"args": Namespace(**(self.options or {}))}, self.folder / CONFIG)


def read_folder(path: str | Path) -> HFModel:
    """The model in the folder, its config.json checked: what is not understood or not implemented is refused.

    Weights and tokenizer are opened when something asks for them.
    """
    folder = Path(path)
    config = folder / CONFIG
    if not config.is_file():
        raise UserError(f"{config}: no such file; give the folder of a Hugging Face model")
    values = read_json(config)
    if values.get("quantization_config") is not None:
        raise UserError(f"{config}: quantised weights are not supported; use the original folder of the model")
    found = _xglm(values, config) if values.get("model_type") == "xglm" else _of_transformers(config)
    for name, token in zip(("bos", "eos"), found.tokens, strict=False):
        if token is not None and token >= found.vocab_size:
            raise UserError(
                f"{config}: {name}_token_id={token} is not among the {found.vocab_size} tokens (vocab_size); get the "
                "model's own file"
            )
    return found


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


def _token(value: Any) -> int | None:
    """A token id, the first one of a list of them; None for null and for -1, which some files say instead."""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _first_and_last(path: Path, bos: int | None, eos: int | None) -> tuple[int, int]:
    """(BOS, EOS), of which one may stand in for the other."""
    first, last = (eos if bos is None else bos), (bos if eos is None else eos)
    if first is None or last is None:
        raise UserError(f"{path}: neither bos_token_id nor eos_token_id in it; add the id a text begins with")
    return first, last


def _of_transformers(path: Path) -> HFModel:
    from fairseq_icl.models.transformers_lm import positions_of, read_config

    config = read_config(path.parent)
    text, family = config.get_text_config(), str(config.model_type)
    if config.is_encoder_decoder or not getattr(text, "num_hidden_layers", None):
        raise UserError(f"{path}: model_type={family!r} is no decoder-only language model; use one that is")
    bos, eos = _first_and_last(path, _token(text.bos_token_id), _token(text.eos_token_id))
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    layers, width, heads = (int(getattr(text, name)) for name in names)
    inner = [getattr(text, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")]
    shape = {"layers": layers, "width": width, "heads": heads, "ffn": int(next(filter(None, inner), 4 * width))}
    bos = eos if family in TRAINED_ON_EOS else bos
    tokens = (bos, eos, _token(text.pad_token_id))
    return HFModel(path.parent, family, int(text.vocab_size), positions_of(config), tokens, shape)


def _size(values: Mapping[str, Any], key: str, default: int, path: Path) -> int:
    value = values.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: {key}={value!r} is not a positive number; get the model's own file")
    return value


def _xglm(values: Mapping[str, Any], path: Path) -> HFModel:
    """XGLM itself, or one of the dense LMs that circulate in its form; their special tokens are the last four."""
    defaults = {"num_layers": 24, "d_model": 1024, "attention_heads": 16, "ffn_dim": 4096}
    layers, width, heads, ffn = (_size(values, key, default, path) for key, default in defaults.items())
    rows, positions = _size(values, "vocab_size", 256008, path), _size(values, "max_position_embeddings", 2048, path)
    activation = str(values.get("activation_function", "gelu"))
    if activation not in FAIRSEQ_ACTIVATIONS:
        raise UserError(f"{path}: activation_function={activation!r} is not implemented; use another model")
    if width % heads:
        raise UserError(f"{path}: a width of {width} cannot be cut into {heads} heads; get the model's own file")
    options = {
        "decoder_embed_dim": width,
        "decoder_input_dim": width,
        "decoder_output_dim": width,
        "max_target_positions": positions,
        "tokens_per_sample": positions,
        "decoder_normalize_before": True,
        "decoder_ffn_embed_dim": ffn,
        "decoder_layers": layers,
        "decoder_attention_heads": heads,
        "activation_fn": FAIRSEQ_ACTIVATIONS[activation],
        "decoder_learned_pos": False,
        "no_scale_embedding": not values.get("scale_embedding", True),
        "share_decoder_input_output_embed": bool(values.get("tie_word_embeddings", True)),
    }
    shape = {"layers": layers, "width": width, "heads": heads, "ffn": ffn}
    bos, pad, eos = (
        _token(values.get(f"{name}_token_id", default)) for name, default in (("bos", 0), ("pad", 1), ("eos", 2))
    )
    # Another padding id would blank out a position in transformers: it zeroes that row of the sinus table.
    if (bos, eos) == (rows - 4, rows - 2) and pad in (0, 1, rows - 3):
        return HFModel(path.parent, "dense", rows, positions, (rows - 4, rows - 2, rows - 3), shape, options)
    if (bos, pad, eos) != (0, 1, 2):
        raise UserError(
            f"{path}: bos, pad and eos token ids {bos}, {pad}, {eos} are neither XGLM's (0, 1, 2) nor a dense "
            f"LM's (the last four, {rows - 4} to {rows - 1}); get the model's own file"
        )
    return HFModel(path.parent, "xglm", rows, positions, (2, 2, 1), shape, options)
