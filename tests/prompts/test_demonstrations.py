"""Which rows are demonstrations: drawn, balanced, or named in a file."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_icl.errors import UserError
from fairseq_icl.files import read_yaml
from fairseq_icl.prompts.sampling import demonstration_rows, read_rows, shuffled
from fairseq_icl.settings import Settings
from tests.prompts.samples import CHOICE, spec_of, write_jsonl, write_sentiment
from tests.prompts.test_build import build

CLASSES = ("bad", "fair", "good")


def rows_of(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 12), st.integers(0, 5))
def test_balanced_draws_have_as_many_of_each_class_and_follow_the_shuffle(golds: list[int], k: int, seed: int) -> None:
    settings = Settings(num_demonstrations=k, seed=seed, demonstrations="balanced")
    available = Counter(golds)
    if (
        sum(min(available[label], k // 3) for label in range(3)) < 3 * (k // 3)
        or sum(available[label] > k // 3 for label in range(3)) < k % 3
    ):
        with pytest.raises(UserError, match="too few rows with the label"):
            demonstration_rows(golds, CLASSES, settings)
        return
    rows = demonstration_rows(golds, CLASSES, settings)
    counts = Counter(golds[row] for row in rows)
    assert len(set(rows)) == len(rows) == k
    assert max(counts[label] for label in range(3)) - min(counts[label] for label in range(3)) <= 1
    order = shuffled(len(golds), seed)
    assert rows == [row for row in order if row in rows]
    for label in range(3):  # the first ones of each class
        own = [row for row in order if golds[row] == label]
        assert [row for row in rows if golds[row] == label] == own[: counts[label]]


def test_rows_of_a_file_are_taken_in_its_order(tmp_path: Path) -> None:
    file = rows_of(tmp_path / "rows.txt", "5  # the clearest one\n\n# more:\n0\n7\n3\n")
    write_sentiment(tmp_path)
    prompts = build(tmp_path, num_demonstrations=4, demonstrations=file)
    assert prompts.context_rows == (5, 0, 7, 3)
    assert [sequence.row for sequence in prompts.finetuning] == [5, 0, 7, 3]
    fewer = build(tmp_path, num_demonstrations=2, demonstrations=file, seed=9)
    assert fewer.context_rows == (5, 0)
    moved = build(tmp_path, num_demonstrations=4, demonstrations=file, permutation=1)
    assert sorted(moved.context_rows) == [0, 3, 5, 7]
    assert moved.context_rows != (5, 0, 7, 3)


def test_balanced_prompts_show_every_class_alike(tmp_path: Path) -> None:
    rows = [{"text": f"train{i}", "label": int(i < 3)} for i in range(30)]
    write_sentiment(tmp_path)
    write_jsonl(tmp_path / "sample_train.jsonl", rows)
    prompts = build(tmp_path, num_demonstrations=6, demonstrations="balanced")
    assert sum(row < 3 for row in prompts.context_rows) == 3
    assert sum(row < 3 for row in build(tmp_path, num_demonstrations=6).context_rows) < 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1\ntwo\n", "rows.txt:2: 'two' is not a row number"),
        ("1\n-2\n", "rows.txt:2: '-2' is not a row number"),
        ("1\n4\n1\n", "rows.txt:3: row 1 is there twice"),
        ("1\n12\n", "row 12, but the train file has rows 0-11"),
        ("1\n2\n", "2 rows, but 3 demonstrations are asked for; give num_demonstrations=2"),
        ("", "0 rows, but 3"),
    ],
)
def test_mistakes_in_a_file_are_told_with_their_line(tmp_path: Path, text: str, told: str) -> None:
    write_sentiment(tmp_path)
    with pytest.raises(UserError) as error:
        build(tmp_path, num_demonstrations=3, demonstrations=rows_of(tmp_path / "rows.txt", text))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_told_with_the_choices(tmp_path: Path) -> None:
    write_sentiment(tmp_path)
    with pytest.raises(UserError, match=r"demonstrations=balancd: cannot be read.*first, balanced, or a text file"):
        build(tmp_path, demonstrations="balancd")


def test_options_of_their_own_have_no_classes_to_balance(tmp_path: Path) -> None:
    row = {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answer": "B"}
    for split in ("train", "valid"):
        write_jsonl(tmp_path / f"sample_{split}.jsonl", [row] * 3)
    with pytest.raises(UserError, match="no classes to balance"):
        build(tmp_path, spec_of(CHOICE), num_demonstrations=2, demonstrations="balanced")


def test_devices_pipes_and_folders_are_no_files_of_row_numbers(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        with pytest.raises(UserError, match=f"{place}: not a file but a folder, a device or a pipe"):
            read_rows(place)
        with pytest.raises(UserError, match=f"{place}: not a file but a folder, a device or a pipe"):
            read_yaml(place)
