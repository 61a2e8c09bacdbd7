"""Every setting once: checked, explained, part of a reading, and known for what it affects."""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.settings import (
    CONTEXT,
    FINETUNING,
    METRICS,
    OBSERVED,
    PROMPTS,
    QUERIES,
    READING,
    RECORDING,
    SETTINGS,
    TRAINING,
    WEIGHTS,
    Settings,
    nearest,
)

STAGES = {*PROMPTS, WEIGHTS, TRAINING, RECORDING, METRICS}
AUTHORS_AND_PAPER = {
    "position": ("option0", "query"),
    "loss_on": ("all", "label"),
    "finetuning_order": ("drawn", "icl"),
    "finetuning_demonstrations": ("all", "fitting"),
    "biases": ("trained", "frozen"),
    "random_update": ("uniform", "gaussian"),
    "attention_similarity": ("scores", "probabilities"),
    "final_norm": ("lost", "kept"),
    "permutation_zero": ("identity", "drawn"),
    "layer_loss": ("sum", "sum"),
    "layer_causal_point": ("layer", "attention_output"),
    "softmax_gradient": ("kept", "kept"),
    "step_per": ("demonstration", "token"),
}


def test_default_is_what_the_authors_ran():
    assert asdict(Settings()) == {name: known.default for name, known in SETTINGS.items()}
    assert Settings.of("authors") == Settings.of() == Settings()
    for name, (authors, _) in AUTHORS_AND_PAPER.items():
        assert getattr(Settings(), name) == authors == SETTINGS[name].choices[0]


def test_paper_sets_every_difference_at_once():
    paper = asdict(Settings.of("paper"))
    assert {name: paper[name] for name in READING} == {name: value for name, (_, value) in AUTHORS_AND_PAPER.items()}
    assert {name: paper[name] for name in SETTINGS if name not in READING} == {
        name: known.default for name, known in SETTINGS.items() if name not in READING
    }


def test_single_settings_override_the_reading():
    settings = Settings.of("paper", loss_on="all", biases=None)
    assert (settings.loss_on, settings.biases, settings.position) == ("all", "frozen", "query")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_explained_and_affects_something(name: str):
    known = SETTINGS[name]
    assert len(known.help) > 10
    assert known.affects
    assert set(known.affects) <= STAGES
    assert set(known.only_if) <= set(known.affects)
    assert known.check(known.default) == known.default
    assert known.paper is None or known.paper in known.choices


def test_settings_are_the_fields_of_the_class_in_their_order():
    assert list(SETTINGS) == [field.name for field in fields(Settings)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": True}, "lr=True: must be a number"),
        ({"lr": "0.1"}, "lr=0.1: must be a number"),
        ({"lr": float("nan")}, "lr=nan: must be a number"),
        ({"lr": float("inf")}, "lr=inf: must be a number"),
        ({"lr": -0.1}, "lr=-0.1: must be at least 0"),
        ({"clip_norm": -1}, "clip_norm=-1: must be at least 0"),
        ({"clip_norm": None}, "clip_norm=None: must be a number"),
        ({"num_demonstrations": -1}, "num_demonstrations=-1: must be at least 0"),
        ({"num_demonstrations": 3.0}, "num_demonstrations=3.0: must be a whole number"),
        ({"num_demonstrations": "32"}, "num_demonstrations=32: must be a whole number"),
        ({"num_demonstrations": [32]}, r"num_demonstrations=\[32\]: must be a whole number"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"seed": True}, "seed=True: must be a whole number"),
        ({"seed": 2**32}, "seed=4294967296: must be at most"),
        ({"limit": 0}, "limit=0: must be at least 1"),
        ({"permutation": 1000}, "permutation=1000: must be at most 999"),
        ({"switch_fraction": 2}, "switch_fraction=2: must be at most 1"),
        ({"switch_fraction": -0.1}, "switch_fraction=-0.1: must be at least 0"),
        ({"position": "bogus"}, "position=bogus: choose from option0, query, gold"),
        ({"position": 0}, "position=0: choose from option0, query, gold"),
        ({"position": None}, "position=None: choose from option0, query, gold"),
        ({"position": ["query"]}, r"position=\['query'\]: choose from"),
        ({"loss_on": "some"}, "loss_on=some: choose from all, label"),
        ({"train_parameters": ""}, "train_parameters=: must be a text that is not empty"),
        ({"train_parameters": True}, "train_parameters=True: must be a text"),
        ({"layers": "x" * 500}, r"layers=x{80}\.\.\.: must be one \(3\), a range"),
        ({"layers": "3-1\n"}, "layers=3-1: must be a text that is not empty, in one line"),
        ({"lr": 10**400}, "lr=1000.*: must be a number"),
        ({"num_demonstrations": 10**5000}, r"num_demonstrations=\(int\): must be a whole number"),
        ({"train_parameters": "k\nv"}, "train_parameters=k v: must be a text"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(given: dict[str, Any], message: str):
    for make in (Settings, lambda **changes: replace(Settings(), **changes)):
        with pytest.raises(UserError, match=f"^{message}") as caught:
            make(**given)
        assert "\n" not in str(caught.value)


def test_a_long_wrong_value_is_shortened():
    with pytest.raises(UserError) as caught:
        Settings(position="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_numbers_take_the_type_of_the_setting():
    assert isinstance(Settings(lr=1).lr, float)
    assert Settings(lr=1) == Settings(lr=1.0)
    assert Settings(layer_clip_value=0.5).layer_clip_value == "0.5"
    assert Settings(layers=3).layers == "3"


@pytest.mark.parametrize("value", [0.123456789, 1e-7, 12345678, 0.1 + 0.2])
def test_a_limit_typed_as_a_number_keeps_its_value(value: float):
    assert float(Settings(layer_clip_value=value).layer_clip_value) == value


def test_unknown_names_suggest_close_ones():
    with pytest.raises(UserError, match=r"num_demonstration: unknown setting; did you mean num_demonstrations\?"):
        Settings.of(num_demonstration=3)
    with pytest.raises(
        UserError, match="zzz: unknown setting; choose from align_epochs, attention, attention_similarity, biases"
    ):
        Settings.of(zzz=3)
    with pytest.raises(UserError, match="reading=author: choose from authors, paper"):
        Settings.of("author")
    assert nearest("paper", ["papers", "x"]) == "did you mean papers?"


def test_settings_cannot_be_changed_and_can_be_keys():
    settings = Settings()
    with pytest.raises(AttributeError):
        settings.seed = 3
    assert len({settings, Settings(), Settings(seed=2)}) == 2


def test_what_makes_no_difference_to_a_stage_is_put_to_its_default():
    settings = Settings(num_demonstrations=8, limit=60, lr=0.5, position="gold", random_update="gaussian")
    assert settings.relevant_to([QUERIES]) == Settings(limit=60)
    assert settings.relevant_to([CONTEXT]) == Settings(num_demonstrations=8)
    assert settings.relevant_to([TRAINING, RECORDING]) == Settings(lr=0.5, position="gold")
    assert settings.relevant_to([METRICS]) == Settings(random_update="gaussian")
    assert settings.relevant_to(STAGES) == settings
    assert settings.relevant_to([]) == Settings()


def test_the_seed_matters_to_weights_only_where_some_are_random():
    assert Settings(seed=5).relevant_to([WEIGHTS]) == Settings()
    assert Settings(seed=5, init="untrained").relevant_to([WEIGHTS]) == Settings(seed=5, init="untrained")


def test_the_final_norm_matters_only_to_the_baselines_that_can_lose_it():
    for init in SETTINGS["init"].choices:
        kept = Settings(init=init, final_norm="kept").relevant_to([WEIGHTS])
        assert kept.final_norm == ("kept" if init in ("trained-embeddings", "layer-norms") else "lost")


@pytest.mark.parametrize(
    ("switch", "matters"),
    [("none", ()), ("demonstrations", (CONTEXT,)), ("finetuning", (FINETUNING,)), ("both", (CONTEXT, FINETUNING))],
)
def test_switching_matters_where_labels_are_switched(switch: str, matters: tuple[str, ...]):
    settings = Settings(switch_labels=switch, switch_fraction=0.5, switch_seed=9)
    for stage in (CONTEXT, FINETUNING):
        relevant = settings.relevant_to([stage])
        expected = (0.5, 9) if stage in matters else (1.0, None)
        assert (relevant.switch_fraction, relevant.switch_seed) == expected
    assert settings.relevant_to([QUERIES, TRAINING]) == Settings()


def test_zero_shot_does_not_depend_on_demonstrations_nor_on_training():
    settings = Settings(num_demonstrations=8, seed=4, permutation=2, lr=0.5, loss_on="label", switch_labels="both")
    assert settings.relevant_to(OBSERVED["zsl"]) == Settings()
    assert settings.relevant_to(OBSERVED["icl"]).lr is None
    assert settings.relevant_to(OBSERVED["icl"]).loss_on == "all"
    assert settings.relevant_to(OBSERVED["ft"]) == settings
