"""Command-line overrides -> one plain, checked configuration, by Hydra from the package's YAML files.

The settings of settings.py are keys of the configuration without standing in a YAML file: they are put into Hydra's
store as the group `settings`.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_icl.errors import UserError
from fairseq_icl.fetching import HUB, split_name
from fairseq_icl.files import PACKAGE, read_yaml
from fairseq_icl.settings import SETTINGS, check_reading, nearest

FOLDER = PACKAGE / "config"
CONFIG_NAME = "replicate"
MODEL_FILE = (".yaml", ".yml")
GRID = ("seed", "permutation", "init")
"""Settings of which a run may have several values; null is what the paper says."""
NO_TRAINING = {"authors": "layer-norms", "paper": "untrained"}
"""Reading -> what init=no-training, the second paper's baseline, means in it."""
FROM_PAPER = (*GRID, "num_demonstrations", "lr")
LISTS = ("dataset", "datasets", "method", "init", "seed", "permutation", "plugins", "tables")
DEMO = {"data": "demo", "paper": "demo", "datasets": "[demo_sentiment,demo_subjectivity]"}
BARE_LIST = re.compile(rf"(?P<key>{'|'.join(LISTS)})=(?P<values>[^\[\]{{}}'\"()]+,[^\[\]{{}}'\"()]+)")


def register_settings() -> None:
    """Make every setting a key of Hydra's configuration."""
    # null: not said. Differences between code and paper follow the reading, some others the paper's settings.
    defaults = {
        name: None if known.is_reading or name in FROM_PAPER else known.default for name, known in SETTINGS.items()
    }
    ConfigStore.instance().store(name="settings", node={**defaults, "init": ["pretrained"]}, provider="fairseq_icl")


register_settings()


def friendly(overrides: Sequence[str], *, sweep: bool) -> list[str]:
    """Overrides as people type them -> as Hydra wants them.

    `seed=1,2,3` is a list unless a sweep is asked for (-m), `model=PATH` names a checkpoint or a folder, and `dataset=`
    means `datasets=`: the folder dataset/ makes Hydra take the former for a choice of one file.
    """
    result = []
    if "model=demo" in overrides:  # the shipped model comes with its data
        given = {override.partition("=")[0] for override in overrides}
        result += [f"{key}={value}" for key, value in DEMO.items() if not {key, key.removesuffix("s")} & given]
    for override in overrides:
        if not sweep and (match := BARE_LIST.fullmatch(override)):
            override = f"{match['key']}=[{match['values']}]"
        override = re.sub(r"^dataset=", "datasets=", override)
        key, _, value = override.partition("=")
        if key == "model" and "," not in value and _is_path(value):
            result.append("model=checkpoint")
            if value.endswith(MODEL_FILE):  # a path given as well must not hide the file, nor the file the path
                result.append(f"model.file={quoted(value)}")
            if not value.endswith(MODEL_FILE) or not any(word.startswith("model.path=") for word in overrides):
                result.append(f"model.path={quoted(value)}")
            continue
        if key.split(".")[0] in ("vary", "variants"):  # mappings that Hydra would not let grow
            override = f"++{override}"
        if key in ("data", "out") and value and value[0] not in "'\"$" and value != "null":
            override = f"{key}={quoted(value)}"
        result.append(override)
    return result


def _is_path(model: str) -> bool:
    """Whether `model=` names files instead of a YAML file of config/model."""
    known = (FOLDER / "model" / f"{model}.yaml").is_file()
    named = model.endswith((".pt", *MODEL_FILE)) or "/" in model or model.startswith(HUB)
    return named or (not known and Path(model).is_dir())


def quoted(text: str) -> str:
    """`text` as a Hydra string: paths may hold spaces, commas and brackets."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def first_of_each(overrides: Sequence[str]) -> list[str]:
    """A sweep's overrides with the first value of each swept one: what its first job runs."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        swept = [next(iter(one.sweep_string_iterator())) if one.is_sweep_override() else None for one in parsed]
    except (HydraException, ValueError, RecursionError) as error:
        raise UserError(explain(error)) from error
    result = []
    for override, text, first in zip(parsed, overrides, swept, strict=True):
        result.append(text if first is None else f"{override.get_key_element()}={first}")
    return result


def compose_configuration(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of one run (`overrides` in Hydra's syntax)."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
            config = compose(CONFIG_NAME, overrides=list(overrides))
    # The last three: a group that is no word (model=3), numbers of thousands of digits, brackets nested without end.
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise UserError(explain(error)) from error
    if added := [text for text in overrides if re.match(r"\+\+?hydra\.(?!launcher\.)", text)]:
        raise UserError(f"{added[0]}: not a key of Hydra's; only those of hydra.launcher can be added")
    return plain(config)


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, with what Hydra itself needs left out and names filled in."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise UserError(f"{missing[0]} is missing: give {missing[0]}=VALUE")
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    values.pop("hydra", None)
    if isinstance(values.get("model"), dict):
        values["model"] = with_model_file(values["model"])
    check(values)
    return dict(values)


def with_model_file(model: dict[str, Any]) -> dict[str, Any]:
    """The model with what a YAML file of the user's says of it (model=FILE.yaml, or a path that names one).

    What the command says beside the file counts before what the file says.
    """
    path = model.get("path")
    file = model.pop("file", None) or (path if isinstance(path, str) and path.endswith(MODEL_FILE) else None)
    if file is None:
        return model
    if not isinstance(file, str):
        raise UserError(f"model.file={file}: must be a text, the path of a model's YAML file")
    said = read_yaml(Path(file))
    if not isinstance(said, dict) or not isinstance(said.get("path"), str):
        raise UserError(f"{file}: not a model's YAML file; it needs at least the line path: CHECKPOINT_OR_FOLDER")
    for key in said:
        if key not in MODEL_KINDS:
            raise UserError(f"{file}: unknown key {key}; {nearest(str(key), MODEL_KINDS)}")
    unsaid = read_yaml(FOLDER / "model" / "checkpoint.yaml") | {"path": file}
    given = {key: value for key, value in model.items() if value != unsaid.get(key)}
    return {**model, **said, **given}


KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "paper": (str,),
    "data": (str,),
    "out": (str,),
    "plugins": (list,),
    "datasets": (str, list),
    "method": (str, list),
    "lr_scale": (int, float),
    "reading": (str,),
    "variants": (dict,),
    "vary": (dict,),
    "audit": (bool,),
    "plain": (bool,),
    "skip": (list,),
    "published_settings": (dict,),
    "tables": (list,),
    "workers": (int,),
    "launcher": (str,),
    "share": (str, type(None)),
    "slurm": (dict,),
    "quiet": (bool,),
    "dry_run": (bool,),
    "model": (dict,),
}
"""The keys of replicate.yaml that are no settings, and what they may hold."""
MODEL_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str, type(None)),
    "path": (str,),
    "bpe": (str, type(None)),
    "tokenizer": (str, type(None)),
    "archive": (str, type(None)),
    "beside": (dict,),
    "random": (bool,),
    "shape": (dict, type(None)),
    "learning_rates": (dict,),
}
SLURM_KINDS: dict[str, tuple[type, ...]] = {
    "partition": (str, type(None)),
    "time": (int, float, type(None)),
    "memory": (int, float, type(None)),
    "cpus": (int,),
    "gpus": (int,),
    "jobs": (int, type(None)),
    "options": (list,),
    "wait": (bool,),
}
LAUNCHERS = ("local", "slurm")
WORDS = {str: "a text", list: "a list", dict: "a mapping", bool: "true or false", type(None): "null"}
MAX_PATH, MAX_NAME, MAX_SCALE = 4095, 255, 1e12
"""Longest path and longest name in one, in bytes, as Linux has them; and what a learning rate is at most scaled by."""


def check(values: dict[str, Any]) -> None:
    """Refuse keys that nobody reads, keys left out, and values of the wrong kind, before anything is planned.

    A model without a name gets that of its folder.
    """
    _check_kinds(values, KINDS, "")
    _check_kinds(values["model"], MODEL_KINDS, "model.")
    _check_kinds(values["slurm"], SLURM_KINDS, "slurm.")
    check_processes(values)
    for key in GRID:
        if values[key] == []:
            raise UserError(f"{key}=[]: give at least one value, or leave the setting out")
    for key, known in SETTINGS.items():
        for single in values[key] if isinstance(values[key], list) and key in GRID else [values[key]]:
            if key == "init" and single == "no-training":
                continue
            if single != values[key] or not (single is None or (key == "seed" and single == "first")):
                known.check(single)
    check_reading(values["reading"])
    check_scale(values["lr_scale"])
    for module in values["plugins"]:
        if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
            raise UserError(f"plugins={module}: must be a list of names of modules, such as [my_package.metrics]")
    model = values["model"]
    for text in (values["data"], values["out"], model["path"], model["tokenizer"] or ""):
        if "\0" in text or len(os.fsencode(text)) > MAX_PATH or any(len(part) > MAX_NAME for part in Path(text).parts):
            raise UserError(f"{text[:80]}...: not a path; give one of a file or folder")
    if model["name"] is None:
        model["name"] = _name_of(model["path"]) or "model"
    check_name("model.name", model["name"])
    for name, file in model["beside"].items():
        check_name("model.beside", str(name))
        if not isinstance(file, dict) or not all(isinstance(file.get(key), str) for key in ("url", "sha256")):
            raise UserError(f"model.beside.{name}: must have url and sha256")
    if not values["name"].strip() or not values["name"].isprintable():
        raise UserError("name: must be a text that is not empty, in one line")
    if not values["out"].strip():
        raise UserError("out=: give the folder for the results")


def _name_of(path: str) -> str:
    """What a model without a name is called: its folder's name, or that of its repository on the hub."""
    if path.startswith(HUB):
        return split_name(path)[0].rpartition("/")[2]
    place = Path(path).resolve()
    return (place if place.is_dir() else place.parent).name


def check_processes(values: dict[str, Any]) -> None:
    """Refuse numbers of processes and what cannot go together."""
    slurm = values["slurm"]
    ranges: dict[str, tuple[Any, float, float]]
    ranges = {"workers": (values["workers"], 1, 1000), "slurm.jobs": (slurm["jobs"], 1, 1000)}
    ranges |= {"slurm.cpus": (slurm["cpus"], 1, 1024), "slurm.gpus": (slurm["gpus"], 0, 1)}
    ranges |= {"slurm.time": (slurm["time"], 5, 1e6), "slurm.memory": (slurm["memory"], 0.1, 1e5)}
    for key, (value, low, high) in ranges.items():
        if value is not None and (isinstance(value, bool) or not low <= value <= high):
            raise UserError(f"{key}={str(value)[:80]}: must be a number from {low:g} to {high:g}")
    if values["launcher"] not in LAUNCHERS:
        raise UserError(f"launcher={values['launcher'][:80]}: {nearest(values['launcher'], LAUNCHERS)}")
    if values["workers"] > 1 and (values["launcher"] != "local" or values["share"] is not None):
        raise UserError("workers: neither with launcher=slurm (slurm.jobs=N) nor with share")
    if slurm["partition"] is not None and not re.fullmatch(r"[\w.,-]+", slurm["partition"]):
        raise UserError(f"slurm.partition={slurm['partition'][:80]}: must be a partition's name (sinfo shows them)")
    for option in slurm["options"]:
        if not isinstance(option, str) or not re.fullmatch(r"-[^\s'\"]+", option):
            raise UserError(f"slurm.options={str(option)[:80]}: must be options of sbatch, each like --account=lab")


def check_name(key: str, name: str) -> None:
    """Refuse a name that cannot be part of a file's name."""
    if not name.strip() or re.search(r"[/\\]", name) or name.startswith(".") or not name.isprintable():
        raise UserError(f"{key}={name[:80]}: is part of file names; no /, no dot in front, nothing that does not print")
    if len(name.encode()) > MAX_NAME // 2:
        raise UserError(f"{key}={name[:80]}...: is part of file names; at most {MAX_NAME // 2} bytes")


def check_scale(value: Any) -> None:
    """Refuse a factor on the learning rate that is no number from 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SCALE:
        raise UserError(f"lr_scale={str(value)[:80]}: must be a number of at least 0")


def _check_kinds(values: dict[str, Any], kinds: dict[str, tuple[type, ...]], prefix: str) -> None:
    """Every key is known, none is missing, and each holds what `kinds` allow; settings have checks of their own."""
    settings = {} if prefix else SETTINGS
    for key, value in values.items():
        if key not in kinds and key not in settings:
            raise UserError(f"{prefix}{key}: unknown key; {nearest(key, [*kinds, *settings])}")
        allowed = kinds.get(key, (object,))
        if not isinstance(value, allowed) or (isinstance(value, bool) and allowed == (int, float)):
            words = " or ".join(dict.fromkeys(WORDS.get(kind, "a number") for kind in allowed))
            raise UserError(f"{prefix}{key}={str(value)[:80]}: must be {words}")
    if missing := [key for key in (*kinds, *settings) if key not in values]:
        raise UserError(f"{prefix}{missing[0]}: is missing; leave it in, it has a default")


def explain(error: Exception) -> str:
    """Hydra's message without its hints about the developer's environment."""
    message = str(error).split("Config search path")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Set the environment", "full_key", "object_type"))]
    return " ".join(lines) + " (fairseq-icl replicate --help shows the settings)"
