"""Which rows a split has, and in which order, is known by a hash that nothing else changes."""

import hashlib
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fairseq_icl.commands import datasets, doctor
from fairseq_icl.prompts import Writing
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import dataset_names, load_spec
from fairseq_icl.prompts.readers import SPLITS, compare_rows, read_split, record_rows
from fairseq_icl.settings import Settings
from tests.prompts.samples import CHOICE, SENTIMENT, encode_words, spec_of, write_jsonl, write_sentiment

ROWS = [{"text": f"row {number} \u0085 ü", "label": number % 2} for number in range(8)]
HASH = hashlib.sha256(
    "".join(f'[["row {n} \\u0085 \\u00fc"],{n % 2}]\n' for n in range(8)).encode()
).hexdigest()  # the line of a row, written out
PAPERS_SIX = {"sst2", "sst5", "mr", "subj", "agnews", "cb"}


def rows_of(folder: Path, content: list[dict[str, Any]] = ROWS, **changes: Any):
    spec = spec_of(SENTIMENT, **changes)
    write_jsonl(folder / "sample_train.jsonl", content)
    return spec, read_split(folder, spec, "train")


def test_the_hash_is_that_of_the_rows_lines(tmp_path):
    assert record_rows(*rows_of(tmp_path)).sha256 == HASH


def test_file_format_names_of_labels_template_and_other_columns_do_not_count(tmp_path):
    named = [{"label": ["neg", "pos"][row["label"]], "text": row["text"], "idx": 7} for row in ROWS]
    changes = {"label_names": ["neg", "pos"], "label_words": ["Bad", "Good"], "template": "{text} =>"}
    assert record_rows(*rows_of(tmp_path, named, **changes)).sha256 == HASH
    (tmp_path / "sample_train.jsonl").unlink()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "sample_train.parquet")
    spec = spec_of(SENTIMENT)
    assert record_rows(spec, read_split(tmp_path, spec, "train")).sha256 == HASH


@pytest.mark.parametrize(
    "other",
    [
        ROWS[::-1],
        ROWS[:-1],
        [*ROWS[:-1], {"text": ROWS[-1]["text"], "label": 0}],
        [*ROWS[:-1], {"text": "", "label": 1}],
    ],
)
def test_order_number_texts_and_labels_count(tmp_path, other):
    assert record_rows(*rows_of(tmp_path, other)).sha256 != HASH


def test_options_of_each_row_count(tmp_path):
    hashes = set()
    for options in (["a", "b"], ["a", "c"]):
        row = {"question": "q", "choices": {"text": options, "label": ["A", "B"]}, "answer": "B"}
        write_jsonl(tmp_path / "sample_train.jsonl", [row])
        spec = spec_of(CHOICE)
        hashes.add(record_rows(spec, read_split(tmp_path, spec, "train")).sha256)
    assert len(hashes) == 2


def known(**train: Any) -> dict[str, Any]:
    return {"rows": {"train": {"count": 8, **train}}}


def test_rows_are_compared_with_as_much_as_is_known(tmp_path):
    spec, rows = rows_of(tmp_path)
    single = {5: record_rows(spec, [rows[5]]).sha256}

    def likeness(content: list[dict[str, Any]] = ROWS, **changes: Any) -> str | None:
        spec, rows = rows_of(tmp_path, content, **changes)
        compared = compare_rows(tmp_path, spec, "train", rows)
        return None if compared is None else compared.likeness

    assert likeness() is None  # nothing is known
    assert likeness(**known()) == "unknown"
    assert likeness(ROWS[:-1], **known()) == "other"
    assert likeness(**known(sha256=HASH)) == "same"
    assert likeness(ROWS[::-1], **known(sha256=HASH)) == "other"
    assert likeness(**known(single=single)) == "fitting"
    assert likeness(ROWS[::-1], **known(single=single)) == "other"


def test_the_hubs_own_file_is_known_by_its_checksum(tmp_path):
    path = write_jsonl(tmp_path / "sample_train.jsonl", ROWS)
    hub = {"repo": "a/b", "revision": "c", "files": {"train": "x.jsonl", "valid": "y.jsonl"}}
    hub["sha256"] = {"train": hashlib.sha256(path.read_bytes()).hexdigest()}
    spec, rows = rows_of(tmp_path, **known(), hub=hub)
    compared = compare_rows(tmp_path, spec, "train", rows)
    assert compared is not None
    assert compared.likeness == "same"


def test_prompts_remember_the_rows_they_were_drawn_from_and_warn_once(tmp_path, caplog):
    write_sentiment(tmp_path)
    spec = spec_of(SENTIMENT, rows={"train": {"count": 12}, "valid": {"count": 7}})
    with caplog.at_level(logging.WARNING):
        for seed in (1, 2):
            prompts = build_prompts(spec, tmp_path, Writing(encode_words), Settings(num_demonstrations=4, seed=seed))
    train, valid = read_split(tmp_path, spec, "train"), read_split(tmp_path, spec, "valid")
    assert prompts.rows["train"].sha256 == record_rows(spec, train).sha256
    assert asdict(prompts.rows["valid"]) == {
        "count": 6,
        "sha256": record_rows(spec, valid).sha256,
        "likeness": "other",
    }
    said = [record.message for record in caplog.records if "papers" in record.message]
    assert len(said) == 2
    assert said[1].startswith("sample, valid: not the papers' rows: 6, the papers' file has 7; a seed draws others")


def test_queries_from_the_train_split_leave_the_other_one_alone(tmp_path):
    write_sentiment(tmp_path)
    settings = Settings(num_demonstrations=4, seed=1, queries="train")
    assert list(build_prompts(spec_of(SENTIMENT), tmp_path, Writing(encode_words), settings).rows) == ["train"]


@pytest.mark.parametrize("name", dataset_names())
def test_the_catalogue_says_where_the_hub_has_each_dataset(name):
    spec = load_spec(name)
    assert spec.hub.repo.count("/") == 1
    assert len(spec.hub.revision) == 40  # a commit, not a branch
    assert all(spec.rows.get(split) is not None for split in SPLITS) == (name in PAPERS_SIX)


def test_datasets_and_doctor_say_whose_rows_they_are(tmp_path, capsys):
    for split in ("train", "valid"):
        write_jsonl(tmp_path / "sst2" / f"{split}.jsonl", [{"sentence": "fine", "label": 1}] * 2)
        write_jsonl(tmp_path / "boolq" / f"{split}.jsonl", [{"passage": "p", "question": "q", "label": 1}])
    assert datasets.main(["sst2", "--data", str(tmp_path)]) == 0
    assert "WARNING: not the papers' rows: 2, the papers' file has 67,349" in capsys.readouterr().out
    assert doctor.main(["--data", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  ok       boolq          train: 1 rows, none published to compare with"
    assert lines[4] == "  WARNING  sst2           valid: 2 rows, not the papers' rows: 2, the papers' file has 872"
    (tmp_path / "sst2" / "train.jsonl").write_text("[]\n")
    assert doctor.main(["--data", str(tmp_path)]) == 2
    assert "PROBLEM  sst2" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert doctor.main(["--data", str(tmp_path / "empty")]) == 2
    assert "fairseq-icl fetch data" in capsys.readouterr().out
