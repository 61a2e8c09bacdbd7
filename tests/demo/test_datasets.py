"""The held-out datasets: reproducible, balanced, unseen in pretraining, readable by the catalogue."""

from collections import Counter

import pytest

from examples.demo_model import DEMO_DATASETS
from examples.demo_model.datasets import ROWS_PER_SPLIT, dataset_rows, write_datasets
from examples.demo_model.episodes import HELD_OUT
from examples.demo_model.grammar import is_held_out
from fairseq_icl.files import DEMO_DATA
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.prompts.readers import read_split


def text_of(row):
    return row["text"] if "text" in row else f"{row['premise']} | {row['hypothesis']}"


def test_names_of_the_shipped_datasets_are_those_of_the_held_out_tasks():
    assert tuple(HELD_OUT) == DEMO_DATASETS
    assert {path.stem for path in DEMO_DATA.glob("*.yaml")} == set(DEMO_DATASETS)


@pytest.mark.parametrize("name", DEMO_DATASETS)
def test_rows_are_balanced_and_held_out_and_differ_between_splits(name):
    splits = dataset_rows(name, seed=1)
    texts = [text_of(row) for rows in splits.values() for row in rows]
    assert len(texts) == len(set(texts)) == 2 * ROWS_PER_SPLIT
    assert all(map(is_held_out, texts))
    for rows in splits.values():
        counts = Counter(row["label"] for row in rows)
        assert set(counts.values()) == {ROWS_PER_SPLIT // len(HELD_OUT[name].groups)}


@pytest.mark.parametrize("name", DEMO_DATASETS)
def test_shipped_files_are_what_the_generator_writes(name, tmp_path):
    write_datasets(tmp_path, seed=1)
    for file in (f"{name}.yaml", f"{name}/train.jsonl", f"{name}/valid.jsonl"):
        assert (DEMO_DATA / file).read_bytes() == (tmp_path / file).read_bytes()


@pytest.mark.parametrize("name", DEMO_DATASETS)
def test_shipped_yaml_says_what_the_held_out_task_is(name):
    spec = load_spec(str(DEMO_DATA / f"{name}.yaml"))
    assert spec.name == name
    assert (spec.template, spec.label_words) == (HELD_OUT[name].template, HELD_OUT[name].label_words)
    assert spec.label_names == HELD_OUT[name].groups
    assert spec.papers["demo"]["learning_rate"] > 0
    assert len(read_split(DEMO_DATA, spec, "valid")) == ROWS_PER_SPLIT
