"""Command-line overrides -> one plain configuration, by Hydra from the package's YAML files."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_icl.errors import UserError

FOLDER = Path(__file__).parent.parent / "config"
CONFIG_NAME = "replicate"
LISTS = ("dataset", "datasets", "method", "init", "seed", "permutation", "plugins", "tables")
DEMO = {"data": "demo", "paper": "demo", "datasets": "[demo_sentiment,demo_subjectivity]"}
BARE_LIST = re.compile(rf"(?P<key>{'|'.join(LISTS)})=(?P<values>[^\[\]{{}}'\"()]+,[^\[\]{{}}'\"()]+)")


def friendly(overrides: Sequence[str], *, sweep: bool) -> list[str]:
    """Overrides as people type them -> as Hydra wants them.

    `seed=1,2,3` is a list unless a sweep is asked for (-m), `model=PATH/model.pt` names a checkpoint, and `dataset=`
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
        if key == "model" and (value.endswith(".pt") or "/" in value) and "," not in value:
            result += ["model=checkpoint", f"model.path={quoted(value)}"]
            continue
        if key.split(".")[0] in ("vary", "variants"):  # mappings that Hydra would not let grow
            override = f"++{override}"
        if key in ("data", "out") and value and value[0] not in "'\"$":
            override = f"{key}={quoted(value)}"
        result.append(override)
    return result


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
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    values.pop("hydra", None)
    if values["model"]["name"] is None:
        values["model"]["name"] = Path(values["model"]["path"]).resolve().parent.name or "model"
    return values


def explain(error: Exception) -> str:
    """Hydra's message without its hints about the developer's environment."""
    message = str(error).split("Config search path")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Set the environment", "full_key", "object_type"))]
    return " ".join(lines) + " (fairseq-icl replicate --help shows the settings)"
