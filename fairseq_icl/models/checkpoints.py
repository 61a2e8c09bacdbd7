"""Checkpoint files as data: read without running code, described, and told apart (base or fine-tuned)."""

import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_icl.compat.models import CHECKPOINT_CLASSES, without_initialisation
from fairseq_icl.errors import UserError

POSITIONS = ("max_target_positions", "tokens_per_sample")
SIZES = dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), 1 << 17)
SIZES |= {"decoder_ffn_embed_dim": 1 << 20, "decoder_layers": 1 << 10, "decoder_attention_heads": 1 << 12}
SIZES |= dict.fromkeys(POSITIONS, 1 << 20)
"""The largest numbers that are believed: far above every published model, far below what fills a memory."""
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_fast", "gelu_accurate", "tanh", "linear", "swish")
MAX_TEXT = 10_000
BASE_REFERENCE = "base"
"""Key of a fine-tuned checkpoint's task state that names the checkpoint it was trained from."""


def is_hugging_face(path: str | Path) -> bool:
    """Whether `path` is a folder with a config.json (and no fairseq checkpoint), as a Hugging Face model is."""
    return (Path(path) / "config.json").is_file() and not (Path(path) / "model.pt").is_file()


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a fairseq checkpoint; tensors stay on disk (memory-mapped) until they are used."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; check --pretrained, --base-model or --path")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the checkpoint is empty; download or copy it again")
    try:
        known = torch.serialization.get_safe_globals()  # which torch forgets at the end of the context
        with torch.serialization.safe_globals([kind for kind in CHECKPOINT_CLASSES if kind not in known]):
            # Files older than torch 1.6 are not zip files and cannot be mapped.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        text = " ".join(str(error).split())
        offender = "asked for " + text.split("GLOBAL ")[1].split()[0] if "GLOBAL " in text else text[:100]
        raise UserError(
            f"{path}: refused: it is not a plain checkpoint (corrupt, or it asks to run code of its own); "
            f"use the original file of the model [{offender}]"
        ) from error
    except Exception as error:  # a damaged pickle can make the unpickler stumble in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: truncated or corrupt checkpoint; download or copy it again [{reason}]") from error
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"{path}: not a fairseq checkpoint (it has no 'model' entry)")
    weights = state["model"]
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise UserError(f"{path}: its 'model' is no mapping from names to tensors; use the original file of the model")
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_sparse or tensor.is_quantized:
            raise UserError(f"{path}: {name[:80]} is no plain tensor; use the original file of the model")
        # A view that repeats one number a billion times is small on disk.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: {name[:80]} claims more values than the file holds; use the original file")
    return state


def base_reference(state: dict[str, Any]) -> dict[str, Any] | None:
    """{"path", "sha256"} of the base if `state` is one of our fine-tuned checkpoints, else None."""
    task_state = state.get("task_state")
    reference = task_state.get(BASE_REFERENCE) if isinstance(task_state, dict) else None
    if reference is None:
        return None
    if not isinstance(reference, dict) or not all(isinstance(reference.get(key), str) for key in ("path", "sha256")):
        raise UserError("the fine-tuned checkpoint does not name its base by path and sha256: it was altered")
    if "${" in reference["path"] or not reference["path"].isprintable():
        raise UserError(f"the fine-tuned checkpoint names a strange base ({reference['path'][:80]}): it was altered")
    return reference


def saved_model_options(state: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The options the model was built with, from an `args` Namespace or a `cfg` tree, whichever is there."""
    if state.get("args") is not None:
        if not isinstance(state["args"], Namespace):
            raise UserError(f"{path}: its 'args' are no options but {type(state['args']).__name__}; use another copy")
        return vars(state["args"])
    cfg = state.get("cfg")
    if cfg is None:
        raise UserError(f"{path}: neither 'args' nor 'cfg' in the checkpoint, so its architecture is unknown")
    try:
        content: Any = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else cfg
    except Exception as error:  # a tree that was not made by OmegaConf
        raise UserError(f"{path}: its 'cfg' cannot be read ({type(error).__name__}); use another copy") from error
    model = content.get("model") if isinstance(content, dict) else None
    if isinstance(model, Namespace):
        return dict(vars(model))
    if not isinstance(model, dict):
        raise UserError(f"{path}: its 'cfg' has no section 'model', so its architecture is unknown")
    return model


def language_model_config(state: dict[str, Any], path: str | Path) -> TransformerLanguageModelConfig:
    """fairseq's `transformer_lm` configuration for the checkpoint; options unknown to it are left aside."""
    config = TransformerLanguageModelConfig()
    options = saved_model_options(state, path)
    if "decoder_embed_dim" not in options:
        raise UserError(f"{path}: not a decoder-only transformer checkpoint (no decoder_embed_dim among its options)")
    for name in config.__dataclass_fields__:
        if name in options and not name.startswith("_"):
            setattr(config, name, _checked(name, options[name], getattr(config, name), path))
    config.decoder_input_dim = options.get("decoder_input_dim") or config.decoder_embed_dim
    config.decoder_output_dim = options.get("decoder_output_dim") or config.decoder_embed_dim
    for name in ("add_bos_token", "tpu", "checkpoint_activations"):
        setattr(config, name, False)
    for name in ("dropout", "attention_dropout", "activation_dropout", "relu_dropout", "decoder_layerdrop"):
        setattr(config, name, 0.0)  # the authors fine-tune without, whatever pretraining had (docs/protocol.md)
    config.tokens_per_sample = options.get("tokens_per_sample") or 2048
    config.max_target_positions = options.get("max_target_positions") or config.tokens_per_sample
    for name in POSITIONS:
        if isinstance(getattr(config, name), str):  # an interpolation that was never resolved
            setattr(config, name, 2048)
    _check_sizes(config, state.get("model"), path)
    return config


def dense_options(shape: Mapping[str, int], positions: int) -> dict[str, Any]:
    """fairseq's options of a dense language model: pre-norm, gelu, sinusoidal positions, tied embeddings."""
    return {
        "decoder_layers": shape["layers"],
        **dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), shape["width"]),
        "decoder_ffn_embed_dim": shape["ffn"],
        "decoder_attention_heads": shape["heads"],
        "decoder_normalize_before": True,
        "share_decoder_input_output_embed": True,
        "decoder_learned_pos": False,
        "activation_fn": "gelu",
        "tokens_per_sample": positions,
        "max_target_positions": positions,
    }


def build_model(
    config: TransformerLanguageModelConfig, dictionary: Dictionary, seed: int | None
) -> TransformerLanguageModel:
    """fairseq's model with its random initialisation from `seed`; None: with whatever is in memory."""
    vocabulary = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with without_initialisation() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        return TransformerLanguageModel.build_model(config, vocabulary)


def _checked(name: str, value: Any, default: Any, path: str | Path) -> Any:
    """An option's value if it is of the kind that fairseq's default for it is."""
    kinds: tuple[type, ...] = (str, int, float, bool, list, tuple, dict)  # of enumerations, and without a default
    if isinstance(default, bool):
        kinds = (bool, int)
    elif isinstance(default, int | float):
        kinds = (int, float, str) if name in POSITIONS else (int, float)
    elif isinstance(default, str):
        kinds = (str, int, float, bool) if default.startswith("${") else (str,)
    if value is None or (isinstance(value, kinds) and len(str(value)) <= MAX_TEXT):
        return default if value is None and isinstance(default, int | float) else value
    raise UserError(f"{path}: its option {name} is {str(value)[:40]!r}; use the original file of the model")


def _check_sizes(config: TransformerLanguageModelConfig, weights: Any, path: str | Path) -> None:
    """Every size is one that a model can have and the weights in the file do have: nothing larger is ever made."""
    for name, high in SIZES.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
            raise UserError(f"{path}: {name}={str(value)[:40]}: must be a whole number from 1 to {high:,}")
    if config.decoder_embed_dim % config.decoder_attention_heads:
        raise UserError(f"{path}: {config.decoder_attention_heads} heads do not divide {config.decoder_embed_dim}")
    if config.adaptive_softmax_cutoff or config.adaptive_input or config.character_embeddings:
        raise UserError(f"{path}: adaptive or character embeddings are not supported; use a model with plain ones")
    if str(config.activation_fn) not in ACTIVATIONS:
        raise UserError(f"{path}: activation_fn={str(config.activation_fn)[:40]}: choose from {', '.join(ACTIVATIONS)}")
    if not weights:  # nothing to compare with: a shape, not yet a model
        return
    names = {name.removeprefix("decoder."): tensor for name, tensor in weights.items()}
    numbers = {match[1] for name in names if (match := re.match(r"layers\.(\d{1,9})\.", name))}
    if numbers and len(numbers) != config.decoder_layers:
        raise UserError(f"{path}: names {config.decoder_layers} layers, its weights have {len(numbers)}")
    table = names.get("embed_tokens.weight")
    if table is not None and (table.dim() != 2 or table.shape[1] != config.decoder_input_dim):
        shape = tuple(table.shape)
        raise UserError(f"{path}: names a width of {config.decoder_input_dim}, its embeddings have the shape {shape}")
    inner, wanted = names.get("layers.0.fc1.weight"), (config.decoder_ffn_embed_dim, config.decoder_embed_dim)
    if inner is not None and tuple(inner.shape) != wanted:
        raise UserError(f"{path}: names a feed-forward layer of {wanted}, its weights have {tuple(inner.shape)}")


def is_finite(weights: Tensor) -> bool:
    """Whether no value is NaN or infinite; in one pass and without a mask in memory."""
    return not weights.numel() or all(bool(end.isfinite()) for end in torch.aminmax(weights))  # NaN if any value is
