from pathlib import Path

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.catalogue import dataset_names, load_spec
from tests.prompts.samples import CHOICE, SENTIMENT, spec_of

PAPERS_SIX = {"sst2", "sst5", "mr", "subj", "agnews", "cb"}


def test_catalogue_holds_the_papers_datasets_and_twelve_more() -> None:
    assert len(dataset_names()) == 18
    assert set(dataset_names()) > PAPERS_SIX


@pytest.mark.parametrize("name", dataset_names())
def test_every_dataset_loads_and_says_whose_template_it_has(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    if name in PAPERS_SIX:
        settings = spec.papers["deutch2024"]
        assert settings["k"] == 32
        assert len(settings["seeds"]) == len(settings["permutations"]) == 3
        assert settings["learning_rate"] > 0
        assert spec.papers["dai2023"]["k"] <= 32
    else:
        assert "our choice" in spec.note
        assert not spec.papers


def test_quoted_words_stay_words() -> None:
    assert load_spec("cb").label_words == ("True", "False", "Neither")
    assert load_spec("boolq").label_words == ("No", "Yes")


@pytest.mark.parametrize(("wrong", "right"), [("sst", "sst2"), ("AGNews", "agnews"), ("arc-easy", "arc_easy")])
def test_unknown_dataset_suggests_close_names(wrong: str, right: str) -> None:
    with pytest.raises(UserError, match=f"{wrong}: unknown dataset; did you mean .*{right}"):
        load_spec(wrong)


def test_unknown_dataset_without_close_name_lists_the_catalogue() -> None:
    with pytest.raises(UserError, match="the catalogue has agnews, arc_challenge"):
        load_spec("zzzzzzzz")


def test_own_yaml_file_is_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{version: 2, source: me, fields: [a], template: '{a}:', label_words: [x, y]}")
    assert load_spec(str(path)).name == "mine"
    assert load_spec(str(path)).version == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\nsource: [", r"bad.yaml:2: not valid YAML"),
        ("- a\n- b", "must be a mapping"),
        ("", "must be a mapping"),
        ("a: &a [*a]", "unknown key a"),
        ("\x00", "not valid YAML"),
    ],
)
def test_bad_yaml_is_reported_with_its_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_spec(str(path))


def test_missing_yaml_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: cannot be read .*; give the path"):
        load_spec(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"templat": "x"}, "unknown key templat; did you mean template?"),
        ({"version": 0}, "version must be a whole number"),
        ({"version": True}, "version must be a whole number"),
        ({"fields": "text"}, "fields must be a list of texts"),
        ({"fields": []}, "fields must be a list of texts"),
        ({"label_words": [True, False]}, "label_words must be a list of texts .quote words"),
        ({"label_words": ["one"]}, "at least two words"),
        ({"label_words": ["a", "a"]}, "'a' stands twice"),
        ({"label_names": ["a", "b", "c"]}, "label_names has 3 entries for 2 labels"),
        ({"template": "{txt}"}, "template uses {txt}, which is not among fields"),
        ({"template": "{option}"}, "template uses {option}, which is not among fields"),
        ({"template": 3}, "template must be a text"),
        ({"options": {"from": "x"}}, "either label_words .* or options"),
        ({"splits": {"test": "test"}}, "splits.test: only train and valid"),
        ({"splits": ["train"]}, "splits must be a mapping"),
        ({"splits": {"train": "../train"}}, "'../train' is part of file names"),
        ({"cut": {"other": "_"}}, "cut.other: not among fields"),
        ({"papers": {"x": 3}}, "papers must be a mapping"),
    ],
)
def test_wrong_key_is_named_with_file_and_remedy(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("{", r"\{").replace("?", r"\?")) as caught:
        spec_of(SENTIMENT, **changes)
    assert str(caught.value).startswith("sample.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "from must be a list of texts"),
        ({"from": ["one"]}, "at least two fields"),
        ({"form": "x"}, "unknown key options.form; did you mean from"),
        ("x", "options must be a mapping"),
        ({"from": ["a", "b"], "label": "{c}"}, "options.label uses {c}"),
    ],
)
def test_wrong_options_are_named(options: object, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("{", r"\{")):
        spec_of(CHOICE, options=options)


@pytest.mark.parametrize("key", ["version", "source", "fields", "template", "label_words"])
def test_missing_key_is_an_error(key: str) -> None:
    with pytest.raises(UserError, match=r"^sample.yaml: "):
        spec_of({name: value for name, value in SENTIMENT.items() if name != key})


def test_columns_are_the_top_level_fields_each_once() -> None:
    assert load_spec("arc_easy").columns == ("question", "choices", "answerKey")
    assert load_spec("winogrande").columns == ("sentence", "option1", "option2", "answer")
