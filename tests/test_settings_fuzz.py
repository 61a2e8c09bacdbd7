"""Any key with any value, through Hydra, flags and Python: refused in one line, or understood; nothing in between."""

import copy
import math
import sys
from typing import Any

import pytest
from fairseq import options
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fairseq_icl import build_prompts, load_model
from fairseq_icl import tasks as _tasks  # noqa: F401 - registers the task with fairseq
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.replication import configuration
from fairseq_icl.replication.configuration import (
    GRID,
    RunConfiguration,
    compose_configuration,
    each_of,
    friendly,
    plain,
)
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.report.tables import check_tables
from fairseq_icl.settings import READINGS, SETTINGS, Settings

WORDS = sorted({choice for known in SETTINGS.values() for choice in known.choices} | {"paper", "authors", "first"})
MISSPELT = [
    "bogus",
    "num_demonstration",
    "learning_rate",
    "Lr",
    "model.nme",
    "hydra.bogus",
    "vary.lr.x",
    "",
    " ",
    "a b",
]
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 0.5, 2**32, 10**400, 1e308, -0.0])
TEXTS = st.text(max_size=12) | st.sampled_from(WORDS) | st.sampled_from(["abc", "3", "0-2", "null", "true", "${lr}"])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2), max_leaves=4
)
FOR_HYDRA = [
    *SETTINGS,
    *RunConfiguration.model_fields,
    *MISSPELT,
    "dataset",
    "variants.x",
    "vary.lr",
    "variants.x.init",
    "model.name",
]
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # of tests that take long for each case
BASE = ["experiment=demo", "num_demonstrations=4", "seed=3", "lr=0.1"]


def assert_understood(chosen: Settings) -> None:
    """Every setting has its type and is inside its choices and bounds."""
    for name, known in SETTINGS.items():
        value = getattr(chosen, name)
        if value is None:
            assert known.optional, name
            continue
        assert type(value) is known.kind, (name, value)
        assert not known.choices or value in known.choices, (name, value)
        if known.kind is not str:
            assert math.isfinite(value)
            assert known.low is None or value >= known.low
            assert known.high is None or value <= known.high


def assert_told(error: UserError) -> None:
    """One line of readable length."""
    assert str(error).strip()
    assert len(str(error).splitlines()) == 1, str(error)
    assert len(str(error)) < 2500


@given(
    reading=st.sampled_from(READINGS) | SCALARS,
    changes=st.dictionaries(st.sampled_from([*SETTINGS, *MISSPELT]) | st.text(max_size=8), VALUES, max_size=3),
)
@settings(max_examples=900)
@example(reading="authors", changes={"lr": 10**5000})
@example(reading=["authors"], changes={})
def test_python(reading: Any, changes: dict[str, Any]):
    changes.pop("reading", None)
    try:
        chosen = Settings.of(reading, **changes)
    except UserError as error:
        assert_told(error)
        return
    assert_understood(chosen)
    for name, value in changes.items():
        if value is not None:  # None: not said
            kept = getattr(chosen, name)
            same = kept == value or (SETTINGS[name].kind is str and kept == str(value).removesuffix(".0"))
            assert same, (name, value, kept)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("demo")


@given(changes=st.dictionaries(st.sampled_from([*SETTINGS, "k", "reading", "data", "bogus"]), VALUES, max_size=2))
@settings(max_examples=100)
def test_prompts_in_python(model: Model, changes: dict[str, Any]):
    try:
        prompts = build_prompts(model, "demo_sentiment", **{"k": 2, "limit": 2, **changes})
    except UserError as error:
        assert_told(error)
        return
    assert_understood(prompts.settings)


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """What Hydra composes before overrides of values are put over it: the slow part, once."""
    seen = []
    original = configuration.plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration, "plain", lambda config: (seen.append(config), original(config))[1])
        compose_configuration(BASE)
    return seen[0]


def as_override(value: Any) -> str:
    """A value as it might be typed: as Hydra writes it, or simply its text."""
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_override(inner)}' for key, inner in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "9" * 5000 if isinstance(value, int) and abs(value) > 10**4000 else str(value)


def run_planned(config: dict[str, Any]) -> None:
    """Plan the run, and look at every setting of every cell."""
    check_tables(config["tables"])
    for cell in expand(config):
        assert_understood(cell.settings)
        for name in SETTINGS:
            if name in GRID and config[name] is not None and config[name] != "first":
                wanted = config[name] if isinstance(config[name], list) else [config[name]]
                assert getattr(cell.settings, name) in wanted, name
            elif not cell.variant and config[name] is not None and (name != "lr" or cell.settings.lr is not None):
                plain_run = cell.method != "none" or SETTINGS[name].affects != ("training",)
                given_values = config[name] if isinstance(config[name], list) else [config[name]]
                is_text = SETTINGS[name].kind is str
                expected = [str(value) if is_text and value is not None else value for value in given_values]
                assert not plain_run or name == "lr" or getattr(cell.settings, name) in expected, name


@given(sign=st.sampled_from(["", "", "", "+", "++", "~"]), key=st.sampled_from(FOR_HYDRA), value=VALUES)
@settings(max_examples=600)
@example(sign="~", key="lr", value=None)
@example(sign="", key="tables", value=[["a"]])
@example(sign="", key="demonstrations", value=3.0)
@example(sign="", key="layer_clip_value", value=[None])
@example(sign="", key="vary", value={"3": [1]})
@example(sign="", key="variants", value={"3": {"lr": 1}})
def test_hydra_values(composed: DictConfig, sign: str, key: str, value: Any):
    """Without composing anew: Hydra's parser and merge, then our checks and the plan."""
    config = copy.deepcopy(composed)
    word = f"{sign}{key}" if sign == "~" else f"{sign}{key}={as_override(value)}"
    try:
        (overrides, *_) = each_of(friendly([word]))
        try:
            parsed = OverridesParser.create().parse_overrides(overrides)
            ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
        except (HydraException, OmegaConfBaseException):
            return  # compose_configuration tells these
        understood = plain(config)
        run_planned(understood)
    except UserError as error:
        assert_told(error)


@given(key=st.sampled_from([*FOR_HYDRA, "model", "experiment"]) | st.text(max_size=5), value=VALUES)
@settings(max_examples=20, phases=NO_SHRINKING)
@example(key="model", value=3)
@example(key="model", value=[None])
@example(key="seed", value=[None])
@example(key="+hydra.bogus", value=1)
@example(key="lr", value="9" * 5000)
@example(key="lr", value="[" * 600 + "]" * 600)
@example(key="data", value="x" * 300)
@example(key="dataset", value="x" * 300)
@example(key="model", value="/a\0b/model.pt")
def test_hydra_whole(key: str, value: Any):
    try:
        for words in each_of(friendly([*BASE, f"{key}={as_override(value)}"])):
            run_planned(compose_configuration(words))
    except UserError as error:
        assert_told(error)


def parsed_flags(*words: str) -> Any:
    """What fairseq's parser makes of a command line with our task."""
    task = ["--task", "demonstration_prompting", "--dataset", "sst2", "--arch", "pretrained_lm", "--optimizer", "sgd"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fairseq-train"])
        parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, ["DATA", *task, "--criterion", "layer_causal_ce", *words])


@given(key=st.sampled_from([*SETTINGS, "reading", "bogus"]), value=VALUES)
@settings(max_examples=450)
@example(key="num_demonstrations", value="abc")
@example(key="lr", value="abc")
@example(key="lr", value="[]")
@example(key="lr", value=10**400)
@example(key="lr", value=[10**400])
@example(key="lr", value="1/0")
@example(key="clip_norm", value=-1)
def test_flags(key: str, value: Any):
    try:
        arguments = parsed_flags(f"--{key.replace('_', '-')}={as_override(value)}")
    except UserError as error:
        assert_told(error)
        return
    given_settings = {name: getattr(arguments, name, None) for name in SETTINGS}
    rates = given_settings.pop("lr")
    for rate in rates if isinstance(rates, list) else [rates]:
        assert_understood(Settings.of(str(arguments.reading), lr=rate, **_texts(given_settings)))
    assert key != "bogus"


def _texts(values: dict[str, Any]) -> dict[str, Any]:
    """fairseq's enumerations as the texts they are."""
    return {
        name: str(value) if SETTINGS[name].choices and value is not None else value for name, value in values.items()
    }
