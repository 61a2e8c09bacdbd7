import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.prompts.readers import find_split, read_split
from tests.prompts.samples import CHOICE, SENTIMENT, spec_of, write_jsonl

SPEC = spec_of(SENTIMENT)
ROWS = [{"text": 'a "quoted", text', "label": 1}, {"text": "caf\u00e9\u0085x", "label": 0}]
EXPECTED = [(0, 'a "quoted", text', 1), (1, "caf\u00e9\u0085x", 0)]


def read(folder: Path, spec: Any = SPEC) -> list[tuple[int, str, int]]:
    return [(row.index, row.texts["text"], row.gold) for row in read_split(folder, spec, "train")]


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a" / "train.jsonl", ROWS)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.tsv").write_text(
        'text\tlabel\na "quoted", text\t1\ncaf\u00e9\u0085x\t0\n', encoding="utf-8"
    )
    (tmp_path / "c").mkdir()
    csv_text = 'label,text\n1,"a ""quoted"", text"\n0,caf\u00e9\u0085x\n'
    (tmp_path / "c" / "train.csv").write_text(csv_text, encoding="utf-8-sig")
    (tmp_path / "d").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d" / "train.parquet")
    for name in "abcd":
        assert read(tmp_path / name) == EXPECTED


def test_parquet_pieces_are_joined_in_order(tmp_path: Path) -> None:
    for i in range(2):
        table = pyarrow.Table.from_pylist(ROWS[i : i + 1])
        (tmp_path / "sample").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, tmp_path / "sample" / f"train-0000{i}-of-00002.parquet")
    assert read(tmp_path) == EXPECTED


@pytest.mark.parametrize(
    "name",
    ["sample/valid.jsonl", "sample_valid.jsonl", "valid.jsonl", "sample/test.jsonl", "sample_test.jsonl", "test.jsonl"],
)
def test_split_is_found_under_our_name_and_the_hub_name(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / name, ROWS)
    assert find_split(tmp_path, spec_of(SENTIMENT, splits={"valid": "test"}), "valid") == [path]


def test_our_split_name_goes_before_the_hub_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sample" / "validation.jsonl", ROWS)
    ours = write_jsonl(tmp_path / "valid.jsonl", ROWS)
    assert find_split(tmp_path, SPEC, "valid") == [ours]


def test_missing_file_and_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no file for the valid split of sample; put sample/valid.* or sample/validation"
    ):
        find_split(tmp_path, SPEC, "valid")
    with pytest.raises(UserError, match="no such folder"):
        find_split(tmp_path / "none", SPEC, "valid")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "not a JSON object"),
        ('{"text": "x", "label": 1, "text": "y"}', "not JSON .the key 'text' stands twice"),
        ('{"text": "x", "label": 1, "other": {"a": 1, "a": 2}}', "not JSON .the key 'a' stands twice"),
        ('{"label": 1}', "field 'text' is missing; the row has label"),
        ('{"text": "x"}', "field 'label' is missing"),
        ('{"text": 3, "label": 1}', "field 'text' is int, not text"),
        ('{"text": null, "label": 1}', "field 'text' is NoneType, not text"),
        ('{"text": "\\ud800", "label": 1}', "half a surrogate pair"),
        ('{"text": "x", "label": 2}', "unknown label '2'; it must be 0 to 1"),
        ('{"text": "x", "label": "great"}', "unknown label 'great'; it must be 0 to 1"),
        ('{"text": "x", "label": [1]}', "unknown label"),
        ('{"text": "x", "label": 0.5}', "unknown label '0.5'"),
        ('{"text": "x", "label": -1}', "no label .-1.; use a labelled split"),
        ('{"text": "x", "label": null}', "no label"),
        ('{"text": "x", "label": ""}', "no label"),
    ],
)
def test_bad_row_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"text": "fine", "label": 0}}\n\n{line}\n')
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b"", "no rows"),
        ("train.tsv", b"text\tlabel\n", "no rows"),
        ("train.csv", b"", "no rows"),
        ("train.jsonl", b'{"text": "\xff"}', r"jsonl:1: not UTF-8"),
        ("train.csv", b"text,label\n\xff,1\n", "not UTF-8"),
        ("train.csv", b'text,label\nx,0\n"open,1\n', r"csv:3: not CSV"),
        ("train.csv", b"text,label\nx,0,1\n", r"csv:2: 3 columns, but the header has 2"),
        ("train.tsv", b"text\tlabel\nx\n", r"tsv:2: 1 columns, but the header has 2"),
        ("train.tsv", b"text\tlabels\nx\t1\n", r"tsv:2: field 'label' is missing; the row has text, labels"),
        ("train.parquet", b"PAR1", "not a readable Parquet file"),
        ("train.parquet", b"", "not a readable Parquet file"),
    ],
)
def test_bad_file_is_reported(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_parquet_without_the_field_is_reported(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"other": ["x"]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"parquet:1: field 'text' is missing"):
        read(tmp_path)


@pytest.mark.parametrize(("label", "gold"), [(1, 1), ("1", 1), (1.0, 1), ("pos", 1), ("neg", 0), (True, 1)])
def test_label_may_be_number_text_or_name(tmp_path: Path, label: object, gold: int) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"text": "x", "label": label}])
    spec = spec_of(SENTIMENT, label_names=["neg", "pos"] if not isinstance(label, bool) else ["false", "true"])
    assert read(tmp_path, spec) == [(0, "x", gold)]


def test_names_that_are_numbers_exclude_counting_from_zero(tmp_path: Path) -> None:
    spec = spec_of(SENTIMENT, label_names=["1", "2"])
    write_jsonl(tmp_path / "train.jsonl", [{"text": "x", "label": "2"}, {"text": "x", "label": 1}])
    assert [gold for _, _, gold in read(tmp_path, spec)] == [1, 0]
    write_jsonl(tmp_path / "train.jsonl", [{"text": "x", "label": "0"}])
    with pytest.raises(UserError, match="unknown label '0'; it must be 1, 2"):
        read(tmp_path, spec)


def test_options_of_a_row_come_with_their_names(tmp_path: Path) -> None:
    choices = {"text": ["red", "blue", "green"], "label": ["A", "B", "C"]}
    write_jsonl(tmp_path / "train.jsonl", [{"question": "?", "choices": choices, "answer": "C"}])
    [row] = read_split(tmp_path, spec_of(CHOICE), "train")
    assert (row.options, row.gold) == (("red", "blue", "green"), 2)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"text": ["red", "blue"], "label": ["A", "B", "C"]}, "3 names in 'choices.label' for 2 options"),
        ({"text": ["red"], "label": ["A"]}, "must be a list of two or more texts"),
        ({"text": "red", "label": ["A"]}, "must be a list of two or more texts"),
        ({"label": ["A"]}, "field 'choices.text' is missing"),
        ("red", "field 'choices.text' is missing"),
    ],
)
def test_bad_options_are_reported(tmp_path: Path, choices: object, message: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"question": "?", "choices": choices, "answer": "A"}])
    with pytest.raises(UserError, match=message):
        read_split(tmp_path, spec_of(CHOICE), "train")


def test_cut_needs_its_mark(tmp_path: Path) -> None:
    row = {"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}
    write_jsonl(tmp_path / "train.jsonl", [row])
    with pytest.raises(UserError, match="no '_' to cut it at"):
        read_split(tmp_path, load_spec("winogrande"), "train")


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    text = "\n".join(["\ufeff" + json.dumps(ROWS[0]), "", "  ", json.dumps(ROWS[1])])
    (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
    assert read(tmp_path) == EXPECTED
