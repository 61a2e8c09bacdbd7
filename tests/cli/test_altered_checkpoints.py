"""A fine-tuned checkpoint that was altered: it chooses nothing that is written, and every fault is one line."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_icl import tasks as _tasks  # noqa: F401 - registers the task with fairseq
from fairseq_icl.criterions.icl_similarity import check_same_names, method_of, read_other
from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import read_checkpoint
from fairseq_icl.tasks.restore import restore
from tests.commands import assert_one_clear_line, succeeded
from tests.world import World

State = dict[str, Any]
WEIGHT = "decoder.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def finetuned(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("altered")
    succeeded(world.train(folder, "--record-queries"))
    return folder / "checkpoint_last.pt"


def put(*keys: Any, value: Any) -> Callable[[State], None]:
    """An alteration that puts a value at a place."""

    def alter(state: State) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return alter


def drop(*keys: Any) -> Callable[[State], None]:
    """An alteration that takes an entry away."""

    def alter(state: State) -> None:
        for key in keys[:-1]:
            state = state[key]
        del state[keys[-1]]

    return alter


ALTERATIONS = {
    "cfg missing": drop("cfg"),
    "cfg None": put("cfg", value=None),
    "cfg a list": put("cfg", value=[1]),
    "cfg a text": put("cfg", value="task"),
    "task missing": drop("cfg", "task"),
    "task a list": put("cfg", "task", value=[1]),
    "criterion missing": drop("cfg", "criterion"),
    "criterion a number": put("cfg", "criterion", value=3),
    "criterion unknown": put("cfg", "criterion", "_name", value="bogus"),
    "base a text": put("task_state", "base", value="model.pt"),
    "base without a hash": drop("task_state", "base", "sha256"),
    "hash a number": put("task_state", "base", "sha256", value=3),
    "hash of another model": put("task_state", "base", "sha256", value="0" * 64),
    "base path a list": put("task_state", "base", "path", value=["model.pt"]),
    "base path interpolated": put("task_state", "base", "path", value="${oc.env:HOME}/model.pt"),
    "base elsewhere": put("task_state", "base", "path", value="gone/gone.pt"),
    "model empty": put("model", value={}),
    "model a list": put("model", value=[1]),
    "weight a text": put("model", WEIGHT, value="abc"),
    "weight of another shape": put("model", WEIGHT, value=torch.zeros(2, 2)),
    "weight unknown": put("model", "decoder.nope", value=torch.zeros(2)),
    "weight NaN": put("model", WEIGHT, value=torch.full((16, 16), float("nan"))),
    "weight of whole numbers": put("model", WEIGHT, value=torch.zeros(16, 16, dtype=torch.long)),
    "queries a list": put("task_state", "training_queries", value=[1]),
    "queries of text rows": put("task_state", "training_queries", value={"a": torch.zeros(3, 2, 16)}),
    "queries without dimensions": put("task_state", "training_queries", value={0: torch.tensor(1.0)}),
    "queries no tensors": put("task_state", "training_queries", value={0: "abc"}),
    "queries NaN": put("task_state", "training_queries", value={0: torch.full((3, 2, 16), float("nan"))}),
    "queries of other layers": put("task_state", "training_queries", value={0: torch.zeros(9, 2, 16)}),
    "setting of a wrong type": put("cfg", "task", "num_demonstrations", value="abc"),
    "setting out of bounds": put("cfg", "task", "switch_fraction", value=7.0),
    "setting not a choice": put("cfg", "task", "loss_on", value="bogus"),
    "setting a list": put("cfg", "task", "train_parameters", value=["k_proj"]),
    "setting interpolated": put("cfg", "task", "train_parameters", value="${oc.env:HOME}"),
    "dictionary interpolated": put("cfg", "task", "dict", value="${oc.env:HOME}/dict.txt"),
    "dataset interpolated": put("cfg", "task", "dataset", value="a${oc.env:HOME}"),
    "dataset a number": put("cfg", "task", "dataset", value=[3]),
    "reading unknown": put("cfg", "task", "reading", value="bogus"),
    "linearize a text": put("cfg", "task", "linearize", value="${oc.env:HOME}"),
    "tokenizer unknown": put("cfg", "task", "bpe", value="bogus"),
}

OF_ANOTHER_FILE = ("tokenizer unknown", "criterion unknown")
"""Faults that are told as those of the options that the checkpoint brings."""


def altered(path: Path, alter: Callable[[State], None], folder: Path) -> Path:
    """A copy of a checkpoint with something else in it."""
    state = copy.deepcopy(dict(read_checkpoint(path)))
    alter(state)
    target = folder / "altered.pt"
    torch.save(state, target)
    return target


def use(path: str) -> None:
    """Everything that scoring reads from a fine-tuned checkpoint."""
    restore(path, {"criterion": None})
    method_of(path)


@pytest.mark.parametrize("name", ALTERATIONS)
def test_every_fault_is_one_line(finetuned: Path, tmp_path: Path, name: str):
    path = altered(finetuned, ALTERATIONS[name], tmp_path)
    with pytest.raises(UserError) as caught:
        use(str(path))
    assert len(str(caught.value)) < 500
    if name not in OF_ANOTHER_FILE:
        assert "altered.pt" in str(caught.value)


def test_without_its_state_it_is_no_fine_tuned_checkpoint(world: World, finetuned: Path, tmp_path: Path):
    path = altered(finetuned, drop("task_state"), tmp_path)
    assert_one_clear_line(world.validate(path, dict=world.dictionary), "altered.pt")


def test_a_second_checkpoint_must_belong_to_the_same_base(world: World, finetuned: Path, tmp_path: Path):
    (model,), _, task = restore(str(finetuned), {"criterion": None})
    for alter, part in (
        (put("task_state", "base", "sha256", value="0" * 64), "not fine-tuned from the same base"),
        (put("task_state", "base", value="model.pt"), "altered.pt: the fine-tuned checkpoint does not name its base"),
        (put("task_state", "linearized", value=True), "one of the two models is linearized"),
        (drop("model", WEIGHT), "trained different parameters"),
    ):
        other = altered(finetuned, alter, tmp_path)
        with pytest.raises(UserError, match=part):
            check_same_names(read_other(str(other), task), model)
    assert_one_clear_line(world.validate(finetuned, "--other-finetuned", other), "different parameters", WEIGHT)


def test_a_checkpoint_does_not_choose_what_is_written(world: World, finetuned: Path, tmp_path: Path):
    def alter(state: State) -> None:
        state["cfg"]["criterion"] = {
            "_name": "icl_similarity",
            "results": str(tmp_path / "planted.csv"),
            "save_activations": str(tmp_path / "planted.safetensors"),
            "other_finetuned": "${oc.env:HOME}",
            "path": str(tmp_path / "elsewhere.pt"),
            "position": "gold",
        }
        state["cfg"]["task"]["record_gradients"] = str(tmp_path / "planted.parquet")

    path = altered(finetuned, alter, tmp_path)
    os.environ.setdefault("HOME", "home")
    _, cfg, _ = restore(str(path), {"criterion": "icl_similarity", "path": str(path)})
    assert (cfg.criterion.results, cfg.criterion.save_activations, cfg.criterion.other_finetuned) == (None, None, None)
    assert (cfg.criterion.path, cfg.criterion.position, cfg.task.record_gradients) == (str(path), "gold", None)
    succeeded(world.validate(path))
    assert [file.name for file in tmp_path.iterdir()] == ["altered.pt"]


def test_an_interpolation_is_one_line_in_the_command(world: World, finetuned: Path, tmp_path: Path):
    path = altered(finetuned, put("cfg", "task", "train_parameters", value="${oc.env:HOME}"), tmp_path)
    assert_one_clear_line(world.validate(path), "altered.pt", "train_parameters", "only plain texts")
