"""Models that cannot be used: one clear line, exit code 2, nothing left behind."""

import json
import os
from pathlib import Path

import pytest
import torch

from fairseq_icl.models.checkpoints import read_checkpoint
from tests.commands import assert_one_clear_line, succeeded
from tests.world import World


class Payload:
    """A pickle that creates a folder when it is loaded."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def broken(kind: str, world: World, folder: Path) -> Path:
    """A checkpoint that is broken in one way."""
    path = folder / f"{kind}.pt"
    whole = world.model.read_bytes()
    state = dict(read_checkpoint(world.model))
    if kind == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "corrupt":
        path.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 20)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "malicious":
        torch.save(state | {"args": Payload(folder / "owned")}, path)
    elif kind in ("nan", "inf"):
        weights = {name: tensor.clone() for name, tensor in state["model"].items()}
        weights["decoder.layers.0.self_attn.k_proj.weight"][0, 0] = float(kind)
        torch.save(state | {"model": weights}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", ("corrupt",)),
        ("corrupt", ("corrupt",)),
        ("empty", ("empty",)),
        ("malicious", ("refused", "mkdir")),
        ("nan", ("k_proj.weight", "NaN or infinite")),
        ("inf", ("k_proj.weight", "NaN or infinite")),
        ("absent", ("no such checkpoint",)),
    ],
)
def test_unusable_checkpoint(world: World, tmp_path: Path, kind: str, words: tuple[str, ...]):
    path = broken(kind, world, tmp_path)
    save_dir = tmp_path / "out"
    result = world.train(save_dir, pretrained=path, dict=world.dictionary)
    assert_one_clear_line(result, path.name, *words)
    assert not (tmp_path / "owned").exists()
    assert not list(save_dir.glob("*"))


def test_weights_so_large_that_numbers_overflow(world: World, tmp_path: Path):
    path = tmp_path / "huge.pt"
    state = dict(read_checkpoint(world.model))
    torch.save(state | {"model": {name: 1e19 * tensor for name, tensor in state["model"].items()}}, path)
    result = world.train(tmp_path / "out", pretrained=path, dict=world.dictionary)
    assert_one_clear_line(result, "the loss is NaN or infinite at demonstration", "--lr")
    assert not list((tmp_path / "out").glob("*"))
    result = world.validate(path, "--results", tmp_path / "results.parquet", dict=world.dictionary)
    assert_one_clear_line(result, "validation file is scored NaN", "checkpoint")
    assert not (tmp_path / "results.parquet").exists()


def test_dictionary_of_another_model(world: World, tmp_path: Path):
    (tmp_path / "dict.txt").write_text("one 1\ntwo 1\n")
    result = world.train(tmp_path / "out", dict=tmp_path / "dict.txt")
    assert_one_clear_line(result, "48 token embeddings", "6 symbols", "--dict")
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("merges", "words"), [("a b", ("of the tokenizer's 3 pieces", "different models")), ("a c", ("one model's files",))]
)
def test_tokenizer_files_of_another_model(world: World, tmp_path: Path, merges: str, words: tuple[str, ...]):
    encoder, vocabulary = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    encoder.write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    vocabulary.write_text(f"#version: 0.2\n{merges}\n")
    files = {"bpe": "gpt2", "gpt2-encoder-json": encoder, "gpt2-vocab-bpe": vocabulary}
    assert_one_clear_line(world.train(tmp_path / "out", **files), *words)
    assert not list((tmp_path / "out").glob("*"))


def test_no_dictionary_beside_the_checkpoint(world: World, tmp_path: Path):
    lonely = tmp_path / "model.pt"
    lonely.write_bytes(world.model.read_bytes())
    assert_one_clear_line(world.validate(lonely), "dict.txt")


def test_base_that_was_replaced_after_fine_tuning(world: World, tmp_path: Path):
    succeeded(world.train(tmp_path))
    state = dict(read_checkpoint(world.model))
    other = tmp_path / "other.pt"
    torch.save(state | {"note": "not the same file"}, other)
    result = world.validate(tmp_path / "checkpoint_last.pt", **{"base-model": other, "dict": world.dictionary})
    assert_one_clear_line(result, "not the model that was fine-tuned", "--base-model")
