from pathlib import Path

import pytest

from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.prompts.readers import read_split
from fairseq_icl.prompts.render import fill, render
from tests.prompts.samples import write_jsonl

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
    rendered = render(spec, row)
    assert rendered.options[rendered.gold] == (input_text, label_text)
    assert len(rendered.options) == len(row.options)


def test_options_of_winogrande_change_the_input_and_share_the_label(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [EXAMPLES["winogrande"][0]])
    spec = load_spec("winogrande")
    [row] = read_split(tmp_path, spec, "train")
    assert render(spec, row).options == (("The bus", " was late."), ("The road", " was late."))


def test_braces_in_a_text_are_not_filled_again() -> None:
    assert fill("{a} {b} {} {0} {{a}}", {"a": "{b}", "b": "B"}) == "{b} B {} {0} {{b}}"
