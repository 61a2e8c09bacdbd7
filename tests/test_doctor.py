"""The doctor describes a good folder and says what to do about a bad one."""

from pathlib import Path

import pytest

from fairseq_icl.commands.doctor import examine, main
from tests.world import World, make_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "w")


def test_missing_tokenizer_files_are_named(world: World, capsys: pytest.CaptureFixture):
    assert main([str(world.model.parent)]) == 2
    text = capsys.readouterr().out
    assert "3 layers of width 16, 2 heads, sinusoidal positions up to 256, with final layer norm" in text
    assert "in float32" in text
    assert "PROBLEM  tokenizer" in text
    assert "encoder.json + vocab.bpe (--bpe gpt2)" in text


def test_missing_dictionary_and_checkpoint_are_named(world: World):
    world.dictionary.unlink()
    assert any("PROBLEM  dictionary" in line for line in examine(world.model.parent).lines)
    world.model.unlink()
    assert any("no such checkpoint" in line for line in examine(world.model.parent).lines)


def test_dictionary_of_another_size_is_explained(world: World):
    with world.dictionary.open("a") as file:
        file.write("extra 1\n")
    problems = [line for line in examine(world.model.parent).lines if "PROBLEM" in line]
    assert "48 embeddings but 49 symbols" in problems[0]


def test_the_shipped_model_is_ready_and_known_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "--bpe sentencepiece" in text
    assert "continuation" in text
