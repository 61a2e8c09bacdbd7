"""What the config.json of a Hugging Face folder says: by transformers' own reading, or for XGLM by our own.

transformers' XGLM lets no other code attend, and the papers' dense LMs circulate in its form: these two run on
fairseq's decoder, which represents them exactly. All others run as transformers runs them (`models.transformers_lm`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError

FAIRSEQ_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate", "tanh": "tanh", "linear": "linear"}
TRAINED_ON_EOS = ("opt",)
"""Families whose texts begin with EOS, whatever old files say."""


@dataclass(frozen=True)
class Architecture:
    """What config.json says. Token ids are those of the file, not yet rows of the embedding matrix."""

    family: str
    """transformers' model_type; "dense" for a dense LM in XGLM's form."""
    vocab_size: int
    positions: int
    bos: int
    eos: int
    pad: int | None
    shape: dict[str, int]
    """Layers, width, heads and feed-forward width."""
    options: dict[str, Any] | None = None
    """Options of fairseq's `TransformerLanguageModelConfig`; None for a model that transformers runs."""


def read_architecture(values: Mapping[str, Any], path: Path) -> Architecture:
    """The architecture in the content of the config.json at `path`; a UserError names what cannot be run."""
    if values.get("quantization_config") is not None:
        raise UserError(f"{path}: quantised weights are not supported; use the original folder of the model")
    found = _xglm(values, path) if values.get("model_type") == "xglm" else _of_transformers(path)
    for name in ("bos", "eos"):
        if getattr(found, name) >= found.vocab_size:
            raise UserError(
                f"{path}: {name}_token_id={getattr(found, name)} is not among the {found.vocab_size} tokens "
                "(vocab_size); get the model's own file"
            )
    return found


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


def _of_transformers(path: Path) -> Architecture:
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
    return Architecture(family, int(text.vocab_size), positions_of(config), bos, eos, _token(text.pad_token_id), shape)


def _size(values: Mapping[str, Any], key: str, default: int, path: Path) -> int:
    value = values.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: {key}={value!r} is not a positive number; get the model's own file")
    return value


def _xglm(values: Mapping[str, Any], path: Path) -> Architecture:
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
        return Architecture("dense", rows, positions, rows - 4, rows - 2, rows - 3, shape, options)
    if (bos, pad, eos) != (0, 1, 2):
        raise UserError(
            f"{path}: bos, pad and eos token ids {bos}, {pad}, {eos} are neither XGLM's (0, 1, 2) nor a dense "
            f"LM's (the last four, {rows - 4} to {rows - 1}); get the model's own file"
        )
    return Architecture("xglm", rows, positions, 2, 2, 1, shape, options)
