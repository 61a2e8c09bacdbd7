"""Data, flags and places that cannot be used: one clear line, exit code 2, nothing left behind."""

import json
import shutil
from pathlib import Path

import pytest

from tests.commands import assert_one_clear_line, run
from tests.world import SPEC, World

GOOD = {"text": "word1 word2", "label": 1}


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.fixture
def other(world: World, tmp_path: Path) -> World:
    """A copy of the world that a test may spoil."""
    shutil.copytree(world.root, tmp_path / "w")
    return World(tmp_path / "w")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lines(GOOD, "{not json", GOOD), ("toy_train.jsonl:2", "JSON")),
        (lines(GOOD, {"text": "word1"}), ("toy_train.jsonl:2", "label")),
        (lines(GOOD, {"text": "word1", "label": 7}), ("toy_train.jsonl:2", "7")),
        ("", ("toy_train.jsonl", "no rows")),
        (lines(*[GOOD] * 3), ("6 demonstrations", "3 rows", "num_demonstrations")),
    ],
    ids=["not JSON", "no label", "label out of range", "empty", "too few rows"],
)
def test_spoiled_training_file(other: World, tmp_path: Path, content: str, words: tuple[str, ...]):
    (other.data / "toy_train.jsonl").write_text(content)
    assert_one_clear_line(other.train(tmp_path / "out"), *words)
    assert not list((tmp_path / "out").glob("*"))


def test_query_longer_than_the_model(other: World, tmp_path: Path):
    with (other.data / "toy_valid.jsonl").open("a") as file:
        file.write(lines({"text": "word1 " * 300, "label": 0}))
    result = other.validate(other.model, "--results", tmp_path / "results.parquet")
    assert_one_clear_line(result, "toy_valid.jsonl:16", "256 positions")
    assert not (tmp_path / "results.parquet").exists()


def test_class_missing_among_the_demonstrations_can_be_refused(other: World, tmp_path: Path):
    (other.data / "toy_train.jsonl").write_text(lines(*[GOOD] * 9))
    result = other.train(tmp_path / "out", "--missing-class", "refuse")
    assert_one_clear_line(result, "no demonstration", "Negative", "seed")
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("[nowhere, Positive]", ("nowhere", "unknown to the dictionary", "bpe")),
        ("[word1, word1 word2]", ("word1 word2", "cannot be told apart")),
        ("['', Positive]", ("label_words",)),
        ("[' ', Positive]", ("label",)),
    ],
)
def test_label_words_that_cannot_be_scored(other: World, tmp_path: Path, words: str, parts: tuple[str, ...]):
    other.spec.write_text(SPEC.replace("[Negative, Positive]", words))
    assert_one_clear_line(other.train(tmp_path / "out"), *parts)
    assert not list((tmp_path / "out").glob("*"))


def test_unknown_dataset_and_missing_folder(world: World, tmp_path: Path):
    assert_one_clear_line(world.train(tmp_path / "out", dataset="sst3"), "sst3", "sst2")
    other = World(tmp_path / "nowhere")
    assert_one_clear_line(other.train(tmp_path / "out", dataset=world.spec, pretrained=world.model), "data")


def test_update_that_is_not_finite_names_the_demonstration(world: World, tmp_path: Path):
    result = world.train(tmp_path / "out", "--lr", "1e30")
    assert_one_clear_line(result, "NaN or infinite at demonstration", "--lr")
    assert not list((tmp_path / "out").glob("*.pt"))


def test_place_that_cannot_be_written(world: World, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    assert_one_clear_line(world.train(tmp_path / "file" / "out"), "--save-dir", "cannot be written")
    result = world.validate(world.model, "--results", tmp_path / "file" / "results.parquet")
    assert_one_clear_line(result, "results.parquet", "cannot be written")


def test_full_disk_leaves_no_half_written_checkpoint(world: World, tmp_path: Path):
    """A limit on the size of files stands in for the full disk: writes fail in the middle just so."""
    result = world.train(tmp_path / "out", shell_prefix="ulimit -f 4;")
    assert_one_clear_line(result, "checkpoint", "cannot be written", "--save-dir")
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_unknown_command_lists_the_known_ones():
    assert_one_clear_line(run("fairseq-icl", "replay"), "replay", "replicate", "doctor")


@pytest.mark.parametrize("content", ["version: &a [*a]\n", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"])
def test_a_yaml_bomb_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(content)
    for command in (("datasets", path), ("replicate", "experiment=demo", f"model={path}", "data=demo")):
        assert_one_clear_line(run("fairseq-icl", *command), "bomb.yaml", "aliases (*name) are not allowed")
