"""fairseq's configuration for a cell."""

from argparse import Namespace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

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


def flat(config: DictConfig) -> dict[str, object]:
    """section.name -> value"""
    sections = OmegaConf.to_container(config)
    sections = {name: vars(part) if isinstance(part, Namespace) else part for name, part in sections.items()}
    return {f"{name}.{key}": value for name, part in sections.items() for key, value in (part or {}).items()}


def test_shared_conversions_are_what_fairseq_would_convert(world, tmp_path):
    first = arguments(world, tmp_path, "method=gd,lcgd")
    second = arguments(world, tmp_path, "method=gd,lcgd", "seed=9", "lr=0.7", "clip_norm=2", "reading=paper", "limit=2")
    for words in first:
        parse(words)
    shared = [flat(parse(words)) for words in second]
    training._converted.clear()
    for ours, words in zip(shared, second, strict=True):
        fairseqs = flat(parse(words))
        assert {name: ours[name] for name in ours if ours[name] != fairseqs[name]} == {}
        assert ours.keys() == fairseqs.keys()
    assert shared[0]["optimization.lr"] == [0.7]
    assert shared[0]["task.seed"] == shared[0]["common.seed"] == 9


def test_a_methods_flags_win_and_its_criterion_gets_the_reading(world, tmp_path):
    vanilla, layer_causal = arguments(world, tmp_path, "method=gd,lcgd", "layer_loss=mean")
    assert "--layer-loss" not in vanilla
    assert layer_causal[layer_causal.index("--layer-loss") + 1] == "mean"
    assert parse(layer_causal).criterion.layer_loss == "mean"
