"""Checkpoint files as data: read without running code, described, and told apart (base or fine-tuned)."""

import pickle
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import OmegaConf

from fairseq_icl.compat import checkpoint_classes_allowed
from fairseq_icl.errors import UserError

BASE_REFERENCE = "base"
"""Key of a fine-tuned checkpoint's task state that names the checkpoint it was trained from."""


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a fairseq checkpoint; tensors stay on disk (memory-mapped) until they are used.

    Only tensors and the classes allowed in `compat` are unpickled: a checkpoint is foreign data.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; check --pretrained, --base-model or --path")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the checkpoint is empty; download or copy it again")
    try:
        # Checkpoints older than torch 1.6 are not zip files and cannot be mapped.
        with checkpoint_classes_allowed():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: refused: it is not a plain checkpoint (corrupt, or it asks to run code of its own); "
            f"use the original file of the model [{_offender(error)}]"
        ) from error
    except Exception as error:  # a damaged pickle can make the unpickler stumble in any way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path}: truncated or corrupt checkpoint; download or copy it again [{reason}]") from error
    if not isinstance(state, dict) or "model" not in state:
        raise UserError(f"{path}: not a fairseq checkpoint (it has no 'model' entry)")
    return state


def _offender(error: Exception) -> str:
    """What a refused pickle asked for, as torch's message tells it."""
    text = " ".join(str(error).split())
    return "asked for " + text.split("GLOBAL ")[1].split()[0] if "GLOBAL " in text else text[:100]


def base_reference(state: dict[str, Any]) -> dict[str, Any] | None:
    """{"path", "sha256"} of the base if `state` is one of our fine-tuned checkpoints, else None."""
    return (state.get("task_state") or {}).get(BASE_REFERENCE)


def saved_model_options(state: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The options the model was built with, from an `args` Namespace or a `cfg` tree, whichever is there."""
    if state.get("args") is not None:
        return vars(state["args"])
    cfg = state.get("cfg")
    if cfg is None:
        raise UserError(f"{path}: neither 'args' nor 'cfg' in the checkpoint, so its architecture is unknown")
    content: Any = OmegaConf.to_container(cfg) if OmegaConf.is_config(cfg) else cfg
    model = content.get("model") if isinstance(content, dict) else None
    if isinstance(model, Namespace):
        return dict(vars(model))
    if not isinstance(model, dict):
        raise UserError(f"{path}: its 'cfg' has no section 'model', so its architecture is unknown")
    return model


def language_model_config(state: dict[str, Any], path: str | Path) -> TransformerLanguageModelConfig:
    """fairseq's `transformer_lm` configuration for the checkpoint; options unknown to it are left aside.

    Dropout is off: the authors fine-tune without it, whatever the model was pretrained with (docs/protocol.md).
    """
    config = TransformerLanguageModelConfig()
    options = saved_model_options(state, path)
    if "decoder_embed_dim" not in options:
        raise UserError(f"{path}: not a decoder-only transformer checkpoint (no decoder_embed_dim among its options)")
    for name in config.__dataclass_fields__:
        if name in options and not name.startswith("_"):
            setattr(config, name, options[name])
    width = config.decoder_embed_dim
    config.decoder_input_dim = options.get("decoder_input_dim") or width
    config.decoder_output_dim = options.get("decoder_output_dim") or width
    for name in ("add_bos_token", "tpu"):
        setattr(config, name, False)
    for name in ("dropout", "attention_dropout", "activation_dropout", "relu_dropout", "decoder_layerdrop"):
        setattr(config, name, 0.0)
    config.tokens_per_sample = options.get("tokens_per_sample") or 2048
    config.max_target_positions = options.get("max_target_positions") or config.tokens_per_sample
    for name in ("max_target_positions", "tokens_per_sample"):
        if isinstance(getattr(config, name), str):  # an interpolation that was never resolved
            setattr(config, name, 2048)
    config.checkpoint_activations = False
    return config
