"""Checkpoints that lie about themselves: one line that names the file, before any memory is spent on them."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_icl import load_model
from fairseq_icl.commands.doctor import examine
from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import read_checkpoint
from tests.world import World, make_world, model_options

PROJECTION = "decoder.layers.0.self_attn.k_proj.weight"
TABLE = "decoder.embed_tokens.weight"
OPTIONS: dict[str, Any] = {
    "million layers": {"decoder_layers": 10**6},
    "more layers than weights": {"decoder_layers": 4},
    "fewer layers than weights": {"decoder_layers": 2},
    "no layers": {"decoder_layers": 0},
    "layers in words": {"decoder_layers": "three"},
    "layers in a list": {"decoder_layers": [3]},
    "half a layer": {"decoder_layers": 2.5},
    "huge positions": {"max_target_positions": 10**12},
    "negative positions": {"max_target_positions": -5},
    "huge width": {"decoder_embed_dim": 10**9},
    "negative width": {"decoder_embed_dim": -16},
    "width in words": {"decoder_embed_dim": "wide"},
    "no width": {"decoder_embed_dim": None},
    "another width": {"decoder_embed_dim": 32, "decoder_input_dim": 32, "decoder_output_dim": 32},
    "huge feed-forward layer": {"decoder_ffn_embed_dim": 2**40},
    "another feed-forward layer": {"decoder_ffn_embed_dim": 64},
    "heads that do not divide": {"decoder_attention_heads": 3},
    "no heads": {"decoder_attention_heads": 0},
    "unknown activation": {"activation_fn": "bogus"},
    "activation of a wrong kind": {"activation_fn": 3},
    "a mapping for a switch": {"decoder_normalize_before": {"a": 1}},
    "adaptive input": {"adaptive_input": True, "adaptive_input_cutoff": "1,2"},
    "cutoff in words": {"adaptive_softmax_cutoff": "abc"},
}


def with_weights(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The state with other weights; None takes one away."""
    weights = dict(state["model"]) | {{"projection": PROJECTION, "table": TABLE}[k]: v for k, v in changes.items()}
    return state | {"model": {name: value for name, value in weights.items() if value is not None}}


ALTERATIONS: dict[str, Any] = {
    "args of a wrong kind": lambda state: state | {"args": [1, 2]},
    "args a text": lambda state: state | {"args": "decoder_layers=3"},
    "empty args": lambda state: state | {"args": Namespace()},
    "cfg a number": lambda state: {"model": state["model"], "cfg": 3},
    "cfg without a model": lambda state: {"model": state["model"], "cfg": {"task": 1}},
    "model a list": lambda state: state | {"model": [torch.zeros(1)]},
    "model None": lambda state: state | {"model": None},
    "model empty": lambda state: state | {"model": {}},
    "names that are numbers": lambda state: state | {"model": {3: torch.zeros(1)}},
    "weights in words": lambda state: with_weights(state, projection="abc"),
    "weights as numbers": lambda state: with_weights(state, table=[[1.0, 2.0]]),
    "table of one dimension": lambda state: with_weights(state, table=torch.zeros(48)),
    "table of no dimension": lambda state: with_weights(state, table=torch.tensor(1.0)),
    "no table": lambda state: with_weights(state, table=None),
    "projection missing": lambda state: with_weights(state, projection=None),
    "projection of another shape": lambda state: with_weights(state, projection=torch.zeros(3, 16)),
    "projection that repeats one value": lambda state: with_weights(
        state, projection=torch.zeros(1).expand(10**6, 10**6)
    ),
    "sparse projection": lambda state: with_weights(state, projection=torch.eye(16).to_sparse()),
    "whole numbers for the table": lambda state: with_weights(state, table=torch.zeros(48, 16, dtype=torch.bool)),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("malformed") / "w")


def refused(state: dict[str, Any], world: World, folder: Path) -> None:
    """Doctor and load_model both say so, in one line with the file's name."""
    path = folder / "altered.pt"
    torch.save(state, path)
    (folder / "dict.txt").write_bytes(world.dictionary.read_bytes())
    with pytest.raises(UserError, match=r"altered\.pt") as caught:
        load_model(path, bpe=None)
    assert len(str(caught.value)) < 400
    findings = examine(path)
    assert findings.problems
    assert "PROBLEM" in "\n".join(findings.lines)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(world: World, tmp_path: Path, name: str):
    state = dict(read_checkpoint(world.model))
    refused(state | {"args": Namespace(**model_options(**OPTIONS[name]))}, world, tmp_path)


@pytest.mark.parametrize("name", ALTERATIONS)
def test_content(world: World, tmp_path: Path, name: str):
    refused(ALTERATIONS[name](dict(read_checkpoint(world.model))), world, tmp_path)
