"""A model as files: checkpoint, dictionary and tokenizer, from a model configuration (config/model/*.yaml)."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models.transformer_lm import TransformerLanguageModel
from filelock import FileLock

from fairseq_icl.checkpoints import language_model_config, read_checkpoint
from fairseq_icl.demo import demo_model
from fairseq_icl.encoding import TOKENIZER_FILES, load_dictionary
from fairseq_icl.errors import UserError

POSITIONS = 2048
"""Longest prompt of the dense language models."""


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are."""

    name: str
    checkpoint: Path
    dictionary: Path
    bpe: str | None
    tokenizer: dict[str, Path]
    """fairseq's flags for the tokenizer's files."""

    def flags(self) -> list[str]:
        """What `fairseq-train` must be told to use this model."""
        flags = ["--pretrained", str(self.checkpoint), "--dict", str(self.dictionary)]
        if self.bpe:
            flags += ["--bpe", self.bpe]
        for name, path in self.tokenizer.items():
            flags += [f"--{name.replace('_', '-')}", str(path)]
        return flags


def find_model(config: dict[str, Any], folder: Path, *, make: bool = True) -> ModelFiles:
    """The files that a model configuration names; a random stand-in is made in `folder` unless `make` is False."""
    checkpoint = demo_model() if config["path"] == "demo" else Path(config["path"])
    beside = Path(config["tokenizer"]) if config["tokenizer"] else checkpoint.parent
    dictionary = beside / "dict.txt"
    if not config["random"] and not checkpoint.is_file():
        raise UserError(
            f"{checkpoint}: no such checkpoint; unpack the model there, set FAIRSEQ_ICL_MODELS to the folder of your "
            "models, give model=PATH/model.pt, or model.random=true for random weights of that shape"
        )
    if not dictionary.is_file():
        raise UserError(
            f"{dictionary}: no such file; put the model's dict.txt there, or name the folder that has it and the "
            "tokenizer's files: model.tokenizer=FOLDER"
        )
    if config["random"]:
        checkpoint = folder / "stand_in" / f"{config['name']}.pt"
        if make:
            make_stand_in(checkpoint, dictionary, config["shape"])
    names = TOKENIZER_FILES.get(config["bpe"], {})
    return ModelFiles(
        name=config["name"],
        checkpoint=checkpoint,
        dictionary=dictionary,
        bpe=config["bpe"],
        tokenizer={flag: beside / name for flag, name in names.items()},
    )


def make_stand_in(path: Path, dictionary: Path, shape: dict[str, int] | None) -> None:
    """A checkpoint with random weights, unless it is there; several processes may ask for it at once."""
    if shape is None:
        raise UserError("model.random=true needs model.shape; choose a model of config/model with a size")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.is_file():
                unfinished = path.with_suffix(".unfinished")
                save_random_model(unfinished, load_dictionary(dictionary), shape)
                unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be written ({error}); choose another out=DIR") from error


def save_random_model(path: Path, dictionary: Any, shape: dict[str, int], seed: int = 1) -> None:
    """Random weights of a dense language model's kind: pre-norm, gelu, sinusoidal positions, tied embeddings."""
    options = Namespace(
        arch="transformer_lm_gpt",
        task="language_modeling",
        decoder_layers=shape["layers"],
        decoder_embed_dim=shape["width"],
        decoder_input_dim=shape["width"],
        decoder_output_dim=shape["width"],
        decoder_ffn_embed_dim=shape["ffn"],
        decoder_attention_heads=shape["heads"],
        decoder_normalize_before=True,
        share_decoder_input_output_embed=True,
        decoder_learned_pos=False,
        activation_fn="gelu",
        tokens_per_sample=POSITIONS,
        max_target_positions=POSITIONS,
    )
    both = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TransformerLanguageModel.build_model(language_model_config({"args": options}, path), both)
    # fairseq's marker of decoders with a final layer norm is part of the state; half precision as published.
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    torch.save({"args": options, "model": state}, path)


def shape_of(config: dict[str, Any], files: ModelFiles) -> dict[str, int]:
    """Layers, width, heads, feed-forward width and vocabulary: the checkpoint's own, or the configuration's."""
    if not files.checkpoint.is_file():
        return dict(config["shape"])
    state = read_checkpoint(files.checkpoint)
    found = language_model_config(state, files.checkpoint)
    return {
        "layers": found.decoder_layers,
        "width": found.decoder_embed_dim,
        "heads": found.decoder_attention_heads,
        "ffn": found.decoder_ffn_embed_dim,
        "vocabulary": len(load_dictionary(files.dictionary)),
    }
