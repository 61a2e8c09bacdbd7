"""fairseq's configuration for a cell."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from fairseq_icl.replication import training
from fairseq_icl.replication.model_files import find_model
from fairseq_icl.replication.plan import expand
from fairseq_icl.replication.training import parse, train_arguments
from tests.replication.toy_run import configuration
from tests.world import World


def arguments(world: World, folder: Path, *more: str) -> list[list[str]]:
    config = configuration(world, folder, "experiment=deutch2024", "init=pretrained", *more)
    files = find_model(config["model"], folder)
    return [train_arguments(cell, files, world.data, folder) for cell in expand(config)]


def test_shared_conversions_are_what_fairseq_would_convert(world, tmp_path):
    first = arguments(world, tmp_path, "method=gd,lcgd")
    second = arguments(world, tmp_path, "method=gd,lcgd", "seed=9", "lr=0.7", "clip_norm=2", "reading=paper", "limit=2")
    for words in first:
        parse(words)
    shared = [OmegaConf.to_container(parse(words)) for words in second]
    training._converted.clear()
    fresh = [OmegaConf.to_container(parse(words)) for words in second]
    for ours, fairseqs in zip(shared, fresh, strict=True):
        assert json.dumps(ours, sort_keys=True, default=str) == json.dumps(fairseqs, sort_keys=True, default=str)
    assert shared[0]["optimization"]["lr"] == [0.7]
    assert shared[0]["task"]["seed"] == shared[0]["common"]["seed"] == 9


def test_a_methods_flags_win_and_its_criterion_gets_the_reading(world, tmp_path):
    vanilla, layer_causal = arguments(world, tmp_path, "method=gd,lcgd", "layer_loss=mean")
    assert "--layer-loss" not in vanilla
    assert layer_causal[layer_causal.index("--layer-loss") + 1] == "mean"
    assert parse(layer_causal).criterion.layer_loss == "mean"
