"""Command-line overrides -> one plain, checked configuration, by Hydra from the package's YAML files.

The settings of settings.py are keys of the configuration without standing in a YAML file: they are put into Hydra's
store as the group `settings`.
"""

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
from fairseq_icl.files import PACKAGE
from fairseq_icl.settings import SETTINGS, check_reading, nearest

FOLDER = PACKAGE / "config"
CONFIG_NAME = "replicate"
GRID = ("seed", "permutation", "init")
"""Settings of which a run may have several values; null is what the paper says."""
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
            result += ["model=checkpoint", f"model.path={quoted(value)}"]
            continue
        if key.split(".")[0] in ("vary", "variants"):  # mappings that Hydra would not let grow
            override = f"++{override}"
        if key in ("data", "out") and value and value[0] not in "'\"$":
            override = f"{key}={quoted(value)}"
        result.append(override)
    return result


def _is_path(model: str) -> bool:
    """Whether `model=` names files instead of a YAML file of config/model."""
    known = (FOLDER / "model" / f"{model}.yaml").is_file()
    return model.endswith(".pt") or "/" in model or (not known and Path(model).is_dir())


def quoted(text: str) -> str:
    """`text` as a Hydra string: paths may hold spaces, commas and brackets."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def first_of_each(overrides: Sequence[str]) -> list[str]:
    """A sweep's overrides with the first value of each swept one: what its first job runs."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise UserError(f"{error}") from error
    result = []
    for override, text in zip(parsed, overrides, strict=True):
        if override.is_sweep_override():
            text = f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
        result.append(text)
    return result


def compose_configuration(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of one run (`overrides` in Hydra's syntax)."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
            return plain(compose(CONFIG_NAME, overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error


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
    if values["model"]["name"] is None:
        path = Path(values["model"]["path"]).resolve()
        values["model"]["name"] = (path if path.is_dir() else path.parent).name or "model"
    check(values)
    return dict(values)


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
    "quiet": (bool,),
    "dry_run": (bool,),
    "model": (dict,),
}
"""The keys of replicate.yaml that are no settings, and what they may hold."""
MODEL_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "path": (str,),
    "bpe": (str, type(None)),
    "tokenizer": (str, type(None)),
    "random": (bool,),
    "shape": (dict, type(None)),
}


def check(values: dict[str, Any]) -> None:
    """Refuse keys that nobody reads and values of the wrong kind, before anything is planned."""
    for key, value in values.items():
        if key in SETTINGS:
            for single in value if isinstance(value, list) and key in GRID else [value]:
                if single is not None and not (key == "seed" and single == "first"):
                    SETTINGS[key].check(single)
        else:
            _check_kind(key, value, KINDS)
    for key, value in values["model"].items():
        _check_kind(f"model.{key}", value, {f"model.{name}": kinds for name, kinds in MODEL_KINDS.items()})
    check_reading(values["reading"])
    if isinstance(values["lr_scale"], bool) or not 0 <= values["lr_scale"] < float("inf"):
        raise UserError(f"lr_scale={values['lr_scale']}: must be a number of at least 0")
    if re.search(r"[/\\\x00]", values["model"]["name"]) or values["model"]["name"].startswith("."):
        raise UserError(f"model.name={values['model']['name']}: is part of file names; no / and no dot in front")


def _check_kind(key: str, value: Any, kinds: dict[str, tuple[type, ...]]) -> None:
    if key not in kinds:
        raise UserError(f"{key}: unknown key; {nearest(key, [*kinds, *SETTINGS])}")
    if not isinstance(value, kinds[key]):
        words = {str: "a text", list: "a list", dict: "a mapping", bool: "true or false", type(None): "null"}
        allowed = " or ".join(words.get(kind, "a number") for kind in kinds[key])
        raise UserError(f"{key}={value}: must be {allowed}")


def explain(error: Exception) -> str:
    """Hydra's message without its hints about the developer's environment."""
    message = str(error).split("Config search path")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Set the environment", "full_key", "object_type"))]
    return " ".join(lines) + " (fairseq-icl replicate --help shows the settings)"
