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
from itertools import groupby
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from fairseq_icl.errors import UserError
from fairseq_icl.files import sha256_of
from fairseq_icl.models.checkpoints import dense_options, language_model_config
from fairseq_icl.models.hugging_face import tokenizer
from fairseq_icl.prompts import Writing

CONFIG = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of unsharded weights, the preferred one first; NAME.index.json lists the shards of sharded ones."""
FAIRSEQ_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate", "tanh": "tanh", "linear": "linear"}
TRAINED_ON_EOS = ("opt",)
"""Families whose texts begin with EOS, whatever old files say."""


@dataclass(frozen=True)
class HFModel:
    """A model in a Hugging Face folder; token ids are rows of the decoder's embedding matrix throughout."""

    folder: Path
    family: str
    """transformers' model_type; "dense" for a dense LM in XGLM's form."""
    shape: dict[str, int]
    """Layers, width, heads, feed-forward width (ffn) and vocabulary."""
    positions: int
    """Number of positions the model was trained for."""
    tokens: tuple[int, int, int | None]
    """BOS, EOS and padding as config.json has them, not yet rows of the embedding matrix."""
    fairseq_config: TransformerLanguageModelConfig | None = None
    """Of a model that fairseq's own decoder runs, dropout off; None for one that transformers runs."""

    @cached_property
    def vocabulary(self) -> tokenizer.Vocabulary:
        """Tokenizer and dictionary."""
        return tokenizer.read_vocabulary(self.folder, self.family, self.shape["vocabulary"], *self.tokens)

    @property
    def dictionary(self) -> Dictionary:
        """fairseq's dictionary: symbol i belongs to row i of the embedding matrix."""
        return self.vocabulary.dictionary

    @property
    def bos(self) -> int:
        """The token that a prompt begins with. For OPT and XGLM that is `</s>`."""
        return self.dictionary.bos()

    @property
    def separator(self) -> tuple[int, ...]:
        """What stands between two demonstrations: EOS where the model was trained so, the line break elsewhere."""
        return self.vocabulary.separator

    def encode_line(self, text: str) -> list[int]:
        """Token ids of the text, without special ones; names of special tokens in it are read as plain text."""
        return [self.vocabulary.row_of[token] for token in self.vocabulary.encode_text(text)]

    @cached_property
    def writing(self) -> Writing:
        """How the model wants its text written. Line breaks stay what they are unless it never saw any."""
        encode = lru_cache(maxsize=4096)(lambda text: tuple(self.encode_line(text)))
        eos, newline = self.dictionary.eos(), self.vocabulary.newline
        unknown = self.dictionary.unk() if self.dictionary.unk_word in tokenizer.UNKNOWN_WORDS else None
        line_break = (eos,) if self.family in tokenizer.TRAINED_WITH_EOS else None
        return Writing(
            lambda text: list(encode(text)), self.positions, self.bos, self.separator, line_break, unknown, eos, newline
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; those without a token of the tokenizer are shown by their symbol."""
        order, known, parts = self.vocabulary.order, self.vocabulary.known, []
        for is_token, run in groupby(map(int, ids), key=lambda row: order[row] in known):
            if is_token:
                parts.append(self.vocabulary.decode_text([order[row] for row in run]))
            else:
                parts += [self.dictionary[row] for row in run]
        return "".join(parts)

    def weight_files(self) -> list[Path]:
        """The file with the weights, or an index and its shards by name; a UserError if one is missing."""
        for name in WEIGHT_FILES:
            if (self.folder / name).is_file():
                return [self.folder / name]
            index = self.folder / f"{name}.index.json"
            if index.is_file():
                return [index, *_shards(index)]
        raise UserError(f"{self.folder}: no {' or '.join(WEIGHT_FILES)} in it, nor their shards; download the weights")

    @cached_property
    def sha256(self) -> str:
        """Hash over config.json, the tokenizer's files, the index and all weights, in this order, with their names."""
        total = hashlib.sha256()
        for path in (self.folder / CONFIG, *tokenizer.tokenizer_files(self.folder), *self.weight_files()):
            total.update(f"{path.name} {sha256_of(path)}\n".encode())
        return total.hexdigest()


def read_folder(path: str | Path) -> HFModel:
    """The model in the folder, its config.json checked: what is not understood or not implemented is refused."""
    config = Path(path) / CONFIG
    if not config.is_file():
        raise UserError(f"{config}: no such file; give the folder of a Hugging Face model")
    values = read_json(config)
    if values.get("quantization_config") is not None:
        raise UserError(f"{config}: quantised weights are not supported; use the original folder of the model")
    found = _xglm(values, config) if values.get("model_type") == "xglm" else _of_transformers(config)
    rows = found.shape["vocabulary"]
    for name, token in (("bos", found.tokens[0]), ("eos", found.tokens[1])):
        if token >= rows:
            said = f"{name}_token_id={token} is not among the {rows} tokens (vocab_size)"
            raise UserError(f"{config}: {said}; get the model's own file")
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


def _of_transformers(path: Path) -> HFModel:
    from fairseq_icl.models.transformers_lm import positions_of, read_config

    config = read_config(path.parent)
    text, family = config.get_text_config(), str(config.model_type)
    if config.is_encoder_decoder or not getattr(text, "num_hidden_layers", None):
        raise UserError(f"{path}: model_type={family!r} is no decoder-only language model; use one that is")
    bos, eos, pad = (_token(getattr(text, f"{name}_token_id")) for name in ("bos", "eos", "pad"))
    first = eos if bos is None or family in TRAINED_ON_EOS else bos
    first, last = (bos if first is None else first), (bos if eos is None else eos)  # one may stand in for the other
    if first is None or last is None:
        raise UserError(f"{path}: neither bos_token_id nor eos_token_id in it; add the id a text begins with")
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    layers, width, heads, rows = (int(getattr(text, name)) for name in names)
    inner = [getattr(text, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")]
    ffn = int(next(filter(None, inner), 4 * width))
    shape = {"layers": layers, "width": width, "heads": heads, "ffn": ffn, "vocabulary": rows}
    return HFModel(path.parent, family, shape, positions_of(config), (first, last, pad))


def _xglm(values: Mapping[str, Any], path: Path) -> HFModel:
    """XGLM itself, or one of the dense LMs that circulate in its form; their special tokens are the last four."""
    defaults = {"num_layers": 24, "d_model": 1024, "attention_heads": 16, "ffn_dim": 4096, "vocab_size": 256008}
    sizes = {key: values.get(key) or default for key, default in (defaults | {"max_position_embeddings": 2048}).items()}
    for key, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"{path}: {key}={size!r} is not a positive number; get the model's own file")
    layers, width, heads, ffn, rows, positions = sizes.values()
    activation = str(values.get("activation_function", "gelu"))
    if activation not in FAIRSEQ_ACTIVATIONS:
        raise UserError(f"{path}: activation_function={activation!r} is not implemented; use another model")
    if width % heads:
        raise UserError(f"{path}: a width of {width} cannot be cut into {heads} heads; get the model's own file")
    shape = {"layers": layers, "width": width, "heads": heads, "ffn": ffn, "vocabulary": rows}
    options = dense_options(shape, positions) | {
        "activation_fn": FAIRSEQ_ACTIVATIONS[activation],
        "no_scale_embedding": not values.get("scale_embedding", True),
        "share_decoder_input_output_embed": bool(values.get("tie_word_embeddings", True)),
    }
    config = language_model_config({"args": Namespace(**options)}, path)
    bos, pad, eos = (_token(values.get(f"{name}_token_id", n)) for n, name in enumerate(("bos", "pad", "eos")))
    # Another padding id would blank out a position in transformers: it zeroes that row of the sinus table.
    if (bos, eos) == (rows - 4, rows - 2) and pad in (0, 1, rows - 3):
        return HFModel(path.parent, "dense", shape, positions, (rows - 4, rows - 2, rows - 3), config)
    if (bos, pad, eos) != (0, 1, 2):
        raise UserError(
            f"{path}: bos, pad and eos token ids {bos}, {pad}, {eos} are neither XGLM's (0, 1, 2) nor a dense "
            f"LM's (the last four, {rows - 4} to {rows - 1}); get the model's own file"
        )
    return HFModel(path.parent, "xglm", shape, positions, (2, 2, 1), config)
