"""The flags of layer-causal training and of gradient control, through fairseq-train."""

from pathlib import Path

import pytest

from fairseq_icl.models.files import load_dictionary
from fairseq_icl.results import heatmap_matrix, read_gradient_record, whole_layer_matrix
from tests.commands import assert_one_clear_line, succeeded
from tests.world import World, save_model


@pytest.fixture(scope="module")
def vanilla_record(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vanilla")
    record = ("--record-gradients", folder / "record.parquet", "--gradient-norms", "all")
    succeeded(world.train(folder, *record))
    return folder / "record.parquet"


def test_layers_are_held_to_the_norms_of_vanilla_fine_tuning(world: World, vanilla_record: Path, tmp_path: Path):
    clip = ("--layer-clip", "norm", "--layer-clip-value", f"from:{vanilla_record}")
    record = ("--record-gradients", tmp_path / "record.parquet", "--log-format", "json", "--log-interval", 1)
    point = ("--layer-causal-point", "attention", "--layers", "0-1", "--layer-loss", "mean")
    result = succeeded(world.train(tmp_path, *clip, *record, *point, criterion="layer_causal_ce"))
    for name in ('"gnorm_layer_0"', '"gnorm_layer_2"', '"loss_layer_1"', '"nll_loss"'):
        assert name in result.text
    assert "loss_layer_2" not in result.text
    norms = heatmap_matrix(read_gradient_record(tmp_path / "record.parquet")[0])  # (steps, layers)
    assert norms.shape == heatmap_matrix(read_gradient_record(vanilla_record)[0]).shape == (6, 3)
    whole = whole_layer_matrix(read_gradient_record(vanilla_record)[0])
    assert whole is not None
    assert (whole > heatmap_matrix(read_gradient_record(vanilla_record)[0])).all()
    assert whole_layer_matrix(read_gradient_record(tmp_path / "record.parquet")[0]) is None
    assert (norms[:, :2] > 0).all()
    assert (norms[:, 2] == 0).all()


def test_whole_layers_without_a_record_end_in_one_line(world: World, tmp_path: Path):
    assert_one_clear_line(world.train(tmp_path, "--gradient-norms", "all"), "--gradient-norms", "--record-gradients")


def test_layer_range_outside_the_model_ends_in_one_line(world: World, tmp_path: Path):
    result = world.train(tmp_path, "--layers", "1-3", criterion="layer_causal_ce")
    assert_one_clear_line(result, "layers=1-3", "layers 0-2")


def test_clip_file_of_another_model_ends_in_one_line(world: World, vanilla_record: Path, tmp_path: Path):
    save_model(tmp_path / "other.pt", load_dictionary(world.dictionary), seed=2)
    clip = ("--layer-clip", "norm", "--layer-clip-value", f"from:{vanilla_record}")
    result = world.train(tmp_path / "run", *clip, pretrained=tmp_path / "other.pt", dict=world.dictionary)
    assert_one_clear_line(result, "record.parquet", "another model")


def test_clip_file_of_other_demonstrations_ends_in_one_line(world: World, vanilla_record: Path, tmp_path: Path):
    clip = ("--layer-clip", "norm", "--layer-clip-value", f"from:{vanilla_record}")
    assert_one_clear_line(world.train(tmp_path, *clip, seed=4), "record.parquet", "same demonstrations")


def test_diverged_training_names_the_demonstration(world: World, tmp_path: Path):
    result = world.train(tmp_path, "--lr", "1e30", criterion="layer_causal_ce")
    assert_one_clear_line(result, "NaN or infinite at demonstration", "--lr")
