from pathlib import Path

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.catalogue import FOLDER, dataset_names, fill, find_spec, load_spec
from fairseq_icl.prompts.readers import read_split
from tests.prompts.samples import CHOICE, SENTIMENT, spec_of, write_jsonl

PAPERS_SIX = {"sst2", "sst5", "mr", "subj", "agnews", "cb"}


def test_catalogue_holds_the_papers_datasets_and_twelve_more() -> None:
    assert len(dataset_names()) == 18
    assert set(dataset_names()) > PAPERS_SIX


HUB = {"repo": "a/b", "revision": "c", "files": {"train": "x.jsonl", "valid": "y.jsonl"}}


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
    with pytest.raises(UserError, match=f"dataset {wrong}: unknown; did you mean .*{right}"):
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
        ("a: &a [*a]", r"bad.yaml:1: .*aliases"),
        ("version: 1\nsource: x\nversion: 2", r"bad.yaml:3: .*the key 'version' stands twice"),
        ("version: 1\noptions:\n  from: a\n  from: b", r"bad.yaml:4: .*the key 'from' stands twice"),
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
        ({"templat": "x"}, "templat: unknown key; did you mean template?"),
        ({"version": 0}, "version=0: input should be greater than or equal to 1"),
        ({"hub": {"repo": "a/b"}}, "hub.revision: is missing"),
        ({"hub": HUB | {"files": {"train": "x.jsonl"}}}, "hub: files must name the file of train and that of valid"),
        ({"hub": HUB | {"files": {"train": "../x.jsonl", "valid": "y.jsonl"}}}, "is not the path of a file"),
        ({"hub": HUB | {"sha256": {"train": "abc"}}}, "hub.sha256.train: 'abc' is not a sha256"),
        ({"hub": HUB | {"branch": "main"}}, "hub.branch: unknown key; choose from files"),
        ({"rows": {"test": {"count": 1}}}, "rows.test=test: input should be 'train' or 'valid'"),
        ({"rows": {"train": {"sha256": "0" * 64}}}, "rows.train.count: is missing"),
        ({"rows": {"train": {"count": 2, "single": {2: "0" * 64}}}}, "rows.train: single must be a mapping"),
        ({"rows": {"train": {"count": 2, "single": {1: "0"}}}}, "rows.train.single.1: '0' is not a sha256"),
        ({"version": True}, "version=True: must be a whole number"),
        ({"fields": "text"}, "fields: must be a list of texts"),
        ({"fields": []}, "fields: must be a list of texts"),
        ({"label_words": [True, False]}, "label_words: must be a list of texts .quote words"),
        ({"label_words": ["one"]}, "at least two words"),
        ({"label_words": ["a", "a"]}, "'a' stands twice"),
        ({"label_names": ["a", "b", "c"]}, "label_names has 3 entries for 2 labels"),
        ({"template": "{txt}"}, "template uses {txt}, which is not among fields"),
        ({"template": "{option}"}, "template uses {option}, which is not among fields"),
        ({"template": 3}, "template=3: must be a text"),
        ({"template": " "}, "template=: must be a text that is not empty"),
        ({"template": "Review: { text }"}, "template has a { that belongs to no {field}; write {name} without spaces"),
        ({"template": "{text} {0}"}, "template has a { that belongs to no {field}"),
        ({"template": "{text} {}"}, "template has a { that belongs to no {field}"),
        ({"template": "{text}}"}, "template has a } that belongs to no {field}"),
        ({"template": "Review: Sentiment:"}, "template names no field, so all inputs would be alike; use {text}"),
        ({"options": {"from": "x"}}, "either label_words .* or options"),
        ({"splits": {"test": "test"}}, "splits.test=test: input should be 'train' or 'valid'"),
        ({"splits": ["train"]}, "splits=.*: must be a mapping"),
        ({"splits": {"train": "../train"}}, "'../train' is part of file names"),
        ({"splits": {"train": ".."}}, "'..' is part of file names"),
        ({"label_words": ["\ud83d\ude00", "b"]}, "label_words: holds half a character; write it as it is"),
        ({"cut": {"other": "_"}}, "cut.other: not among fields"),
        ({"papers": {"x": 3}}, "papers.x=3: must be a mapping"),
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
        ({}, "options.from: is missing"),
        ({"from": []}, "options.from: must be a list of texts"),
        ({"from": ["one"]}, "at least two fields"),
        ({"from": "a", "form": "x"}, "options.form: unknown key; did you mean from"),
        ("x", "options=x: must be a mapping"),
        ({"from": ["a", "b"], "label": "{c}"}, "options.label uses {c}"),
        ({"from": ["a", "b"], "label": "{ option }"}, "options.label has a { that belongs to no {field}"),
    ],
)
def test_wrong_options_are_named(options: object, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("{", r"\{")):
        spec_of(CHOICE, options=options)


@pytest.mark.parametrize("key", ["version", "source", "fields", "template", "label_words"])
def test_missing_key_is_an_error(key: str) -> None:
    with pytest.raises(UserError, match=r"^sample.yaml: "):
        spec_of({name: value for name, value in SENTIMENT.items() if name != key})


def test_a_yaml_beside_the_data_is_found_and_takes_no_name_of_the_catalogue(tmp_path: Path) -> None:
    assert find_spec("sst2", tmp_path) == load_spec("sst2")
    own = "{version: 7, source: me, fields: [a], template: '{a}:', label_words: [x, y]}"
    for name in ("sst2", "mine"):
        (tmp_path / f"{name}.yaml").write_text(own)
    assert find_spec("mine", tmp_path) == load_spec(str(tmp_path / "mine.yaml"))
    assert "mine" in dataset_names(tmp_path)
    (tmp_path / "mine.yaml").write_text(own.replace("{version", "{name: '..', version"))
    with pytest.raises(UserError, match=r"mine.yaml: '..' is part of file names"):
        find_spec("mine", tmp_path)
    for source in ("sst2", str(tmp_path / "sst2.yaml")):
        with pytest.raises(UserError, match=r"sst2.yaml: sst2 is another dataset's name in the catalogue"):
            find_spec(source, tmp_path)
    shipped = (FOLDER / "sst2.yaml").read_text()
    (tmp_path / "sst2.yaml").write_text(shipped.replace("0.0005", "0.01"))  # the same prompts, another published rate
    assert find_spec("sst2", tmp_path).papers["deutch2024"]["learning_rate"] == 0.01


def test_fingerprint_follows_what_decides_the_prompts_and_nothing_else() -> None:
    spec = spec_of(SENTIMENT)
    assert spec_of(SENTIMENT, note="x", papers={"a": {"k": 1}}, source="y").fingerprint == spec.fingerprint
    for change in ({"template": "{text}"}, {"label_words": ["a", "b"]}, {"version": 2}, {"cut": {"text": "_"}}):
        assert spec_of(SENTIMENT, **change).fingerprint != spec.fingerprint


def test_columns_are_the_top_level_fields_each_once() -> None:
    assert load_spec("arc_easy").columns == ("question", "choices", "answerKey")
    assert load_spec("winogrande").columns == ("sentence", "option1", "option2", "answer")


CHOICES = {"text": ["sun", "moon"], "label": ["A", "B"]}
# One row in the field names of the Hugging Face version; its gold input and label text.
EXAMPLES = {
    "sst2": ({"sentence": "fine ", "label": 1}, "Sentence: fine  Label:", " Positive"),
    "sst5": ({"text": "so so", "label": 2}, "Sentence: so so Label:", " neutral"),
    "mr": ({"text": "dull", "label": 0}, "Review: dull Sentiment:", " Negative"),
    "subj": ({"text": "he left", "label": 0}, "Input: he left Type:", " objective"),
    "agnews": (
        {"text": "Goal!", "label": 1},
        "Classify the news articles into the categories of World, Sports, Business, and Technology. "
        "Article: Goal! Answer:",
        " Sports",
    ),
    "cb": (
        {"premise": "It rains.", "hypothesis": "it is wet", "label": 2},
        "It rains. Question: it is wet. True, False, or Neither? Answer:",
        " Neither",
    ),
    "trec": ({"text": "Who ?", "coarse_label": 3, "fine_label": 9}, "Question: Who ? Type:", " Person"),
    "rte": ({"sentence1": "A.", "sentence2": "B.", "label": 1}, "A. Question: B. True or False? Answer:", " False"),
    "boolq": ({"passage": "P.", "question": "is it", "label": 1}, "P. Question: is it? Answer:", " Yes"),
    "dbpedia": ({"title": "T", "content": " C.", "label": 12}, "Article: T. C. Topic:", " Film"),
    "imdb": ({"text": "ok", "label": 1}, "Review: ok Sentiment:", " Positive"),
    "copa": (
        {"premise": "It fell.", "question": "cause", "choice1": "Wind.", "choice2": "Sun.", "label": 0},
        "It fell. What was the cause? Answer:",
        " Wind.",
    ),
    "hellaswag": ({"ctx": "He", "endings": ["runs.", "sits.", "x", "y"], "label": "1"}, "He", " sits."),
    "arc_easy": (
        {"question": "Hot?", "choices": CHOICES, "answerKey": "A"},
        "Question: Hot? Answer:",
        " sun",
    ),
    "arc_challenge": (
        {"question": "Cold?", "choices": {**CHOICES, "label": ["1", "2"]}, "answerKey": "2"},
        "Question: Cold? Answer:",
        " moon",
    ),
    "openbookqa": (
        {"question_stem": "Light is from the", "choices": CHOICES, "answerKey": "A"},
        "Light is from the",
        " sun",
    ),
    "piqa": (
        {"goal": "Cut it", "sol1": "use a knife", "sol2": "shout", "label": 0},
        "Goal: Cut it Solution:",
        " use a knife",
    ),
    "winogrande": (
        {"sentence": "The _ was late.", "option1": "bus", "option2": "road", "answer": "1"},
        "The bus",
        " was late.",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_dataset_renders_a_row_of_the_hub(tmp_path: Path, name: str) -> None:
    fields, input_text, label_text = EXAMPLES[name]
    write_jsonl(tmp_path / name / "train.jsonl", [fields])
    spec = load_spec(name)
    [row] = read_split(tmp_path, spec, "train")
    rendered = spec.render(row)
    assert rendered[row.gold] == (input_text, label_text)
    assert len(rendered) == len(row.options)


def test_options_of_winogrande_change_the_input_and_share_the_label(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [EXAMPLES["winogrande"][0]])
    spec = load_spec("winogrande")
    [row] = read_split(tmp_path, spec, "train")
    assert spec.render(row) == (("The bus", " was late."), ("The road", " was late."))


def test_braces_in_a_text_are_not_filled_again() -> None:
    assert fill("{a} {b} {} {0} {{a}}", {"a": "{b}", "b": "B"}) == "{b} B {} {0} {{b}}"
