"""A training checkpoint of the demo model -> the shipped one: configuration and fp16 weights."""

from pathlib import Path
from typing import Any

import torch
from fairseq.tasks.language_modeling import LanguageModelingConfig
from omegaconf import OmegaConf


def export_checkpoint(source: Path, target: Path) -> None:
    """Write a checkpoint's configuration and weights, as if trained with fairseq's stock language-modelling task.

    The pretraining task and criterion are left behind, so that stock fairseq loads the model without any plugin; so are
    the folders of the machine it was trained on.
    """
    state = torch.load(source, weights_only=True)
    cfg: dict[str, Any] = state["cfg"]
    task = OmegaConf.to_container(OmegaConf.structured(LanguageModelingConfig), enum_to_str=True)
    trained = cfg["task"]
    sizes = {key: trained[key] for key in ("tokens_per_sample", "max_target_positions", "add_bos_token")}
    cfg["task"] = {**task, "_name": "language_modeling", "data": ".", **sizes}
    cfg["criterion"] = {"_name": "cross_entropy", "sentence_avg": False}
    cfg["common"]["user_dir"] = None
    cfg["checkpoint"]["save_dir"] = "checkpoints"
    target.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half() for name, value in state["model"].items()}
    # fairseq's loader will not do without the last two; neither holds optimizer state.
    kept = {"optimizer_history": state["optimizer_history"], "extra_state": {}}
    torch.save({"cfg": cfg, "model": weights, **kept}, target)
