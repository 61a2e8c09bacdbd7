"""The model that a configuration (config/model/*.yaml) names; or, in its place, one of random weights of its shape."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.fetching import HUB, split_name
from fairseq_icl.files import DEMO_MODEL, PACKAGE, read_yaml, write_atomically
from fairseq_icl.models.checkpoints import is_hugging_face, language_model_config, read_checkpoint
from fairseq_icl.models.files import TOKENIZER_FILES, ModelFiles, find_files, load_dictionary, save_random_model
from fairseq_icl.settings import nearest
from fairseq_icl.typed import Typed

FOLDER = PACKAGE / "config"
MODEL_FILE = (".yaml", ".yml")
MAX_PATH, MAX_NAME = 4095, 255  # longest path and longest name in one, in bytes, as Linux has them
SHAPE = {
    "layers": "decoder_layers",
    "width": "decoder_embed_dim",
    "heads": "decoder_attention_heads",
    "ffn": "decoder_ffn_embed_dim",
    "vocabulary": "",
}
"""Keys of a shape, and the options of fairseq that say the same."""
MAX_SHAPE, MAX_WEIGHTS = 1 << 20, 10**12  # larger numbers in a shape are a slip of the finger


class FileBeside(Typed, extra="allow"):
    """A file that has to lie beside a checkpoint."""

    url: str
    sha256: str


class ModelConfiguration(Typed):
    """`model.*`: config/model/*.yaml, or a file of the user's."""

    name: str | None
    path: str
    bpe: str | None
    tokenizer: str | None
    archive: str | None
    beside: dict[str, FileBeside]
    random: bool
    shape: dict[str, Any] | None
    learning_rates: dict[str, Any]


def with_model_file(model: dict[str, Any], file: Any) -> dict[str, Any]:
    """The model with what a YAML file of the user's (model=FILE.yaml) says of it and the command does not."""
    if not isinstance(file, str):
        raise UserError(f"model.file={file}: must be a text, the path of a model's YAML file")
    content = read_yaml(Path(file))
    if not isinstance(content, dict) or not isinstance(content.get("path"), str):
        raise UserError(f"{file}: not a model's YAML file; it needs at least the line path: CHECKPOINT_OR_FOLDER")
    for key in content:
        if key not in ModelConfiguration.model_fields:
            raise UserError(f"{file}: unknown key {key}; {nearest(str(key), ModelConfiguration.model_fields)}")
    defaults = read_yaml(FOLDER / "model" / "checkpoint.yaml") | {"path": file}
    given = {key: value for key, value in model.items() if value != defaults.get(key)}
    return {**model, **content, **given}


def name_model(model: dict[str, Any]) -> None:
    """Give a model without a name that of its folder or repository; one that no file can have is refused."""
    if model["name"] is None and model["path"].startswith(HUB):
        model["name"] = split_name(model["path"])[0].rpartition("/")[2] or "model"
    elif model["name"] is None:
        path = Path(model["path"]).resolve()
        model["name"] = (path if path.is_dir() else path.parent).name or "model"
    for key, name in (("model.name", model["name"]), *(("model.beside", name) for name in model["beside"])):
        if not name.strip() or re.search(r"[/\\]|^[.=+@-]", name) or not name.isprintable():
            allowed = "no /, none of . = + - @ in front, only what prints"
            raise UserError(f"{key}={name[:80]}: is part of file names and tables; {allowed}")
        if len(name.encode()) > MAX_NAME // 2:
            raise UserError(f"{key}={name[:80]}...: is part of file names; at most {MAX_NAME // 2} bytes")


def find_model(config: dict[str, Any], folder: Path, *, make: bool = True) -> ModelFiles:
    """The files that a model configuration names; a random stand-in is made in `folder` unless `make` is False."""
    if config["bpe"] is not None and config["bpe"] not in TOKENIZER_FILES:
        raise UserError(f"model.bpe={config['bpe']}: {nearest(config['bpe'], TOKENIZER_FILES)}")
    checkpoint = DEMO_MODEL if config["path"] == "demo" else Path(config["path"])
    beside = Path(config["tokenizer"]) if config["tokenizer"] else None
    if config["random"]:
        dictionary = (beside or checkpoint.parent) / "dict.txt"
        checkpoint = make_stand_in(config, folder, dictionary, make=make)
        beside = dictionary.parent
    elif not checkpoint.exists():
        fetch = f" (fairseq-icl fetch model {config['name']} does it)" if config.get("archive") else ""
        place = f"unpack the model there{fetch}, set FAIRSEQ_ICL_MODELS to the folder of your models"
        other = (
            "give model=PATH/model.pt or a Hugging Face folder, or model.random=true for random weights of that shape"
        )
        raise UserError(f"{checkpoint}: no such checkpoint; {place}, {other}")
    if config["random"] and not make:  # only looked at, not made yet
        named = {flag: dictionary.parent / name for flag, name in TOKENIZER_FILES.get(config["bpe"] or "", {}).items()}
        return ModelFiles(config["name"], checkpoint, dictionary, config["bpe"], named)
    is_folder = is_hugging_face(checkpoint)
    if (shape := config["shape"]) is not None and not config["random"] and not is_folder:
        check_shape(shape)
        found = language_model_config(read_checkpoint(checkpoint), checkpoint)
        for key, option in SHAPE.items():
            if option and shape[key] != getattr(found, option):
                has = f"{checkpoint} has {getattr(found, option)}"
                remedy = "leave the shape out, or give model.random=true for random weights"
                raise UserError(f"model.shape.{key}={shape[key]}: {has}; {remedy}")
    bpe = None if is_folder else config["bpe"]  # the folder has its own tokenizer
    files = find_files(checkpoint, name=config["name"], bpe=bpe, tokenizer=beside)
    for path in (files.dictionary, *files.tokenizer.values()):
        if path is not None and not path.is_file():
            beside_it = "put the model's dict.txt and tokenizer files there"
            raise UserError(
                f"{path}: no such file; {beside_it}, or name the folder that has them: model.tokenizer=FOLDER"
            )
    return files


def make_stand_in(config: dict[str, Any], folder: Path, dictionary: Path, *, make: bool) -> Path:
    """A checkpoint of the shape with random weights, unless it is there."""
    shape = config["shape"]
    if shape is None:
        raise UserError("model.random=true needs model.shape; choose a model of config/model with a size")
    check_shape(shape)
    symbols = load_dictionary(dictionary)
    # The name says what is in it: another shape, or another dictionary, is another file.
    content = json.dumps([sorted(shape.items()), len(symbols)])
    path = folder / "stand_in" / f"{config['name']}-{hashlib.sha256(content.encode()).hexdigest()[:8]}.pt"
    if make and not path.is_file():
        try:
            write_atomically(path, lambda unfinished: save_random_model(unfinished, symbols, shape))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: cannot be written ({error}); choose another out=DIR") from error
    return path


def check_shape(shape: dict[str, Any]) -> None:
    """Refuse a shape of which something is missing, unknown or no size that a model can have."""
    for key, value in shape.items():
        if key not in SHAPE:
            raise UserError(f"model.shape.{key}: unknown key; {nearest(key, SHAPE)}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_SHAPE:
            raise UserError(f"model.shape.{key}={str(value)[:80]}: must be a whole number from 1 to {MAX_SHAPE - 1:,}")
    if missing := [key for key in SHAPE if key not in shape]:
        raise UserError(f"model.shape.{missing[0]}: is missing; give {', '.join(SHAPE)}")
    if shape["width"] % shape["heads"] or shape["width"] % 2:
        raise UserError(f"model.shape.heads={shape['heads']}: does not divide the width {shape['width']} evenly")
    if shape["layers"] * shape["width"] * (4 * shape["width"] + 2 * shape["ffn"]) > MAX_WEIGHTS:
        raise UserError(f"model.shape: more than {MAX_WEIGHTS:.0e} weights; give a smaller one")


def shape_of(config: dict[str, Any], files: ModelFiles) -> dict[str, int]:
    """Layers, width, heads, feed-forward width and vocabulary: the checkpoint's own, or the configuration's."""
    if files.hugging_face is not None:
        return files.hugging_face.shape
    if not files.checkpoint.is_file():
        return dict(config["shape"])
    found = language_model_config(read_checkpoint(files.checkpoint), files.checkpoint)
    shape = {key: getattr(found, option) for key, option in SHAPE.items() if option}
    return shape | {"vocabulary": len(files.load_dictionary())}
