"""Command-line overrides -> one plain, checked configuration, by Hydra from the package's YAML files.

The settings of settings.py are keys of the configuration without standing in a YAML file: they are put into Hydra's
store as the group `settings`.
"""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, model_validator

from fairseq_icl.errors import UserError
from fairseq_icl.fetching import HUB
from fairseq_icl.files import DEMO_DATA
from fairseq_icl.replication.find_model import (
    FOLDER,
    MAX_NAME,
    MAX_PATH,
    MODEL_FILE,
    ModelConfiguration,
    name_model,
    with_model_file,
)
from fairseq_icl.settings import READING, SETTINGS, check_reading, nearest
from fairseq_icl.typed import Typed, validated

GRID = ("seed", "permutation", "init")  # settings of which the papers have several values; null is what the paper says
NO_TRAINING = {"authors": "layer-norms", "paper": "untrained"}
"""Reading -> what init=no-training, the second paper's baseline, means in it."""
FROM_PAPER = (*GRID, "num_demonstrations", "lr")
LISTS = ("dataset", "datasets", "method", "plugins", "tables")
GROUPS = ("model", "experiment")
DEMO = {"data": "demo", "paper": "demo", "datasets": "[demo_sentiment,demo_subjectivity]"}
OVERRIDE = re.compile(r"(?P<sign>\+{0,2})(?P<key>[^=]*)=(?P<value>.*)", re.DOTALL)
BARE_LIST = re.compile(r"[^\[\]{}'\"()]+,[^\[\]{}'\"()]+")
OTHER_NAMES = {"k": "num_demonstrations", "dataset": "datasets", "cluster": "cluster.kind"}
"""Words that people type, and the keys they mean. (Hydra would take dataset= for a choice of a file in dataset/.)"""


# None: not given. Differences between code and paper follow the reading, some others the paper's settings.
DEFAULTS = {name: known.default for name, known in SETTINGS.items()} | dict.fromkeys((*READING, *FROM_PAPER, "device"))
ConfigStore.instance().store(name="settings", node=DEFAULTS | {"init": ["pretrained"]}, provider="fairseq_icl")


def friendly(overrides: Sequence[str]) -> list[str]:
    """Overrides as people type them (seed=1,2,3 is a list, model=PATH a checkpoint, k=4 a setting) -> as Hydra's."""
    result = []
    if any(override.lstrip("+") == "model=demo" for override in overrides):  # the shipped model comes with its data
        given = {OTHER_NAMES.get(key := override.lstrip("+").partition("=")[0], key) for override in overrides}
        if "data" not in given:
            result += [f"{key}={value}" for key, value in DEMO.items() if key not in given]
        elif not given & {"datasets", "experiment"}:
            raise UserError("model=demo data=DATA: which datasets of the folder? Give dataset=NAME, or experiment=NAME")
    for override in overrides:
        match = OVERRIDE.fullmatch(override)
        if match is None:
            result.append(override)
            continue
        sign, key, value = match["sign"], OTHER_NAMES.get(match["key"], match["key"]), match["value"]
        quoted = (
            "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        )  # paths may hold spaces, commas and brackets
        known = [path.stem for path in (FOLDER / key).glob("*.yaml")] if key in GROUPS else []
        for word in value.split(",") if known and re.fullmatch(r"[\w.,-]+", value) else ():
            if word not in known and not _is_path(word):  # Hydra would offer fairseq's architectures
                also = "" if key != "model" else "; or give a path of a checkpoint or of a folder, or hub:OWNER/NAME"
                raise UserError(f"{key}={word}: unknown {key}; {nearest(word, known)}{also}")
        if key == "model" and "," not in value and _is_path(value):
            result.append("model=checkpoint")
            if value.endswith(MODEL_FILE):  # a path given as well must not hide the file, nor the file the path
                result.append(f"model.file={quoted}")
            if not value.endswith(MODEL_FILE) or not any(word.startswith("model.path=") for word in overrides):
                result.append(f"model.path={quoted}")
            continue
        if BARE_LIST.fullmatch(value) and key in ("train_parameters", "layer_clip_value"):
            value = quoted  # one text with commas; several are given as ["A,B","C"]
        elif BARE_LIST.fullmatch(value) and (key in LISTS or key in SETTINGS):
            value = f"[{value}]"
        elif key in ("data", "out") and value and value[0] not in "'\"$" and value != "null":
            value = quoted
        if key.split(".")[0] in ("vary", "variants") or key.startswith("cluster.options."):
            sign = "++"  # mappings that Hydra would not let grow
        result.append(f"{sign}{key}={value}")
    return result


def _is_path(model: str) -> bool:
    """Whether `model=` names files instead of a YAML file of config/model."""
    known = (FOLDER / "model" / f"{model}.yaml").is_file()
    named = model.endswith((".pt", *MODEL_FILE)) or "/" in model or model.startswith(HUB)
    return named or (not known and Path(model).is_dir())


def each_of(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every run: reading=authors,paper are two (lists of settings, datasets, methods are a grid)."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        values = [list(one.sweep_string_iterator()) if one.is_sweep_override() else None for one in parsed]
    except (HydraException, ValueError, RecursionError) as error:
        raise UserError(explain(error)) from error
    words = [
        [text] if several is None else [f"{one.get_key_element()}={value}" for value in several]
        for one, text, several in zip(parsed, overrides, values, strict=True)
    ]
    return [friendly(chosen) for chosen in itertools.product(*words)]


def compose_configuration(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of one run (`overrides` in Hydra's syntax)."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
            config = compose("replicate", overrides=list(overrides))
    # The last three: a group that is no word (model=3), numbers of thousands of digits, brackets nested without end.
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise UserError(explain(error)) from error
    if added := [text for text in overrides if re.match(r"[+~]*hydra[./]", text)]:
        raise UserError(f"{added[0]}: Hydra's own settings are not for users here; leave it out")
    return plain(config)


LOCAL = "local"
QUEUES = {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub", "sge": "qsub", "htcondor": "condor_submit"}
"""Queueing systems that `cluster=` may name, and the command that submits jobs."""
SCHEDULER = "tcp://"
SHARE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
MAX_SCALE = 1e12  # what a learning rate is at most scaled by


class ClusterSettings(Typed):
    """`cluster=` and `cluster.*`: where workers are started (docs/clusters.md)."""

    kind: str = LOCAL  # local, a queueing system, or the address tcp://HOST:PORT of a running Dask scheduler
    jobs: int = Field(4, ge=1, le=1000)
    cpus: int = Field(4, ge=1, le=1024)
    memory: str = "16GB"
    walltime: int = Field(240, ge=2, le=100_000)
    queue: str | None = None
    account: str | None = None
    interface: str | None = None
    options: dict[str, Any] = {}


class RunConfiguration(Typed):
    """The keys of replicate.yaml that are no settings."""

    name: str = Field(min_length=1)
    paper: str
    data: str
    out: str = Field(min_length=1)
    plugins: list[Any]
    datasets: str | list[Any]
    method: str | list[Any]
    lr_scale: float = Field(ge=0, le=MAX_SCALE, allow_inf_nan=False)
    reading: str
    variants: dict[Any, Any]
    vary: dict[Any, Any]
    audit: bool
    plain: bool
    search_rounds: int = Field(ge=0, le=100)
    skip: list[Any]
    published_settings: dict[Any, Any]
    tables: list[Any]
    average_over: list[Literal["seed", "permutation"]]
    workers: int = Field(ge=1, le=1000)
    cluster: ClusterSettings
    share: str | None
    quiet: bool
    dry_run: bool
    model: ModelConfiguration

    @model_validator(mode="after")
    def _fits_together(self) -> "RunConfiguration":
        for key, text in (("name", self.name), ("out", self.out)):
            if not text.strip() or not text.isprintable():
                raise ValueError(f"{key}: must be a text that is not empty, in one line")
        paths = {"data": self.data, "out": self.out, "model.path": self.model.path}
        for key, text in (paths | {"model.tokenizer": self.model.tokenizer or ""}).items():
            too_long = len(os.fsencode(text)) > MAX_PATH or any(len(part) > MAX_NAME for part in Path(text).parts)
            if "\0" in text or too_long:
                raise ValueError(f"{key}: {text[:80]}...: not a path; give one of a file or folder")
        for module in self.plugins:
            if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
                must = "must be a list of names of modules, such as [my_package.metrics]"
                raise ValueError(f"plugins: {str(module)[:80]}: {must}")
        kind = self.cluster.kind
        if kind not in (LOCAL, *QUEUES) and not kind.startswith(SCHEDULER):
            known = f"local, {', '.join(QUEUES)}, {SCHEDULER}HOST:PORT"
            raise ValueError(f"cluster.kind: {kind[:80]} is none of {known}; {nearest(kind, (LOCAL, *QUEUES))}")
        if self.workers > 1 and (kind != LOCAL or self.share is not None):
            raise ValueError("workers: neither with cluster= (cluster.jobs=N) nor with share=")
        if self.share is not None and share_of(self.share) and kind != LOCAL:
            raise ValueError("share: not with cluster=, which spreads the work itself")
        return self


def share_of(text: str) -> tuple[int, int]:
    """`share=2/8` as numbers."""
    match = SHARE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"share={text[:80]}: must be like 2/8, the second of eight parts")
    return int(match[1]), int(match[2])


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, complete: a model without a name gets that of its folder.

    Keys that nobody reads, keys left out, and values of the wrong kind are refused before anything is planned.
    """
    try:
        if missing := sorted(map(str, OmegaConf.missing_keys(config))):
            raise UserError(f"{missing[0]} is missing: give {missing[0]}=VALUE")
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    values.pop("hydra", None)
    if isinstance(model := values.get("model"), dict):
        path = model.get("path")
        file = model.pop("file", None) or (path if isinstance(path, str) and path.endswith(MODEL_FILE) else None)
        values["model"] = model if file is None else with_model_file(model, file)
    if missing := [key for key in SETTINGS if key not in values]:
        raise UserError(f"{missing[0]}: is missing; leave it in, it has a default")
    known = {*SETTINGS, *RunConfiguration.model_fields}
    if unknown := [key for key in values if key not in known]:
        raise UserError(f"{unknown[0]}: unknown key; {nearest(unknown[0], known)}")
    validated(RunConfiguration, {key: value for key, value in values.items() if key not in SETTINGS})
    for key, setting in SETTINGS.items():
        if values[key] == []:
            raise UserError(f"{key}=[]: give at least one value, or leave the setting out")
        for single in values[key] if isinstance(values[key], list) else [values[key]]:
            if key == "init" and single == "no-training":
                continue
            if single != values[key] or not (single is None or (key == "seed" and single == "first")):
                setting.check(single)
    check_reading(values["reading"])
    name_model(values["model"])
    if values["data"] == "demo":
        values["data"] = str(DEMO_DATA)
    return dict(values)


def explain(error: Exception) -> str:
    """Hydra's message without its hints about the developer's environment."""
    message = str(error).split("Config search path")[0]
    if unknown := re.match(r"Could not override '([^'.]+)'", message):
        known = {*SETTINGS, *RunConfiguration.model_fields, *OTHER_NAMES, "experiment"}
        hint = nearest(unknown[1], known)
        hint = hint if hint.startswith("did") else "fairseq-icl replicate --help lists them"
        return f"{unknown[1]}: no such key or setting; {hint}"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Set the environment", "full_key", "object_type"))]
    return " ".join(lines) + " (fairseq-icl replicate --help shows the settings)"
