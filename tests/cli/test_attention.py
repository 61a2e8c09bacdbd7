"""Linear and momentum attention by the commands: trained from scratch, fine-tuned, scored, and part of a cell's key."""

import json
from pathlib import Path

import pandas as pd
import pytest

from fairseq_icl.models.attention import Rule
from fairseq_icl.models.checkpoints import read_checkpoint
from fairseq_icl.models.files import load_dictionary
from fairseq_icl.models.pretrained_lm import load_decoder
from tests.cli.test_training import numbers
from tests.commands import PLUGIN, assert_one_clear_line, run, succeeded
from tests.world import World

SHAPE = """--arch attention_lm --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32
    --decoder-input-dim 16 --decoder-output-dim 16 --decoder-attention-heads 2 --share-decoder-input-output-embed"""
TRAINING = """--task language_modeling --sample-break-mode complete --tokens-per-sample 64 --max-target-positions 256
    --optimizer adam --lr 0.01 --max-update 4 --batch-size 4 --required-batch-size-multiple 1
    --num-workers 0 --cpu --disable-validation"""


@pytest.fixture(scope="module")
def corpus(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some lines of the world's words, binarised by fairseq."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.loads(line)["text"] for line in next(world.data.glob("*train.jsonl")).read_text().splitlines()]
    (folder / "lines").write_text("\n".join(lines * 10) + "\n")
    words = [
        "--only-source",
        "--trainpref",
        folder / "lines",
        "--srcdict",
        world.dictionary,
        "--destdir",
        folder / "bin",
    ]
    succeeded(run("fairseq-preprocess", *words, "--workers", "1"))
    return folder / "bin"


def train(corpus: Path, folder: Path, *flags: str):
    words = [*SHAPE.split(), *TRAINING.split(), "--save-dir", folder, *flags]
    return run("fairseq-train", corpus, "--user-dir", PLUGIN, *words)


def test_a_momentum_model_is_trained_by_fairseq_and_scored_with_its_momentum(
    world: World, corpus: Path, tmp_path: Path
):
    succeeded(train(corpus, tmp_path, "--attention", "momentum", "--momentum", "0.5"))
    model = tmp_path / "checkpoint_last.pt"
    assert read_checkpoint(model)["cfg"]["model"]["attention_momentum"] == 0.5
    decoder = load_decoder(model, load_dictionary(world.dictionary))
    assert decoder.layers[1].self_attn.rule == Rule(momentum=0.5)
    text = succeeded(world.validate(model, dict=world.dictionary)).text
    assert "accuracy_icl" in text


def test_half_a_choice_is_one_line(corpus: Path, tmp_path: Path):
    assert_one_clear_line(train(corpus, tmp_path, "--attention", "momentum"), "--momentum ETA together")


def test_the_switch_is_a_setting_of_replicate_and_part_of_the_key(world: World, tmp_path: Path):
    words = ["experiment=demo", "dataset=demo_sentiment", "method=gd", "init=pretrained", "seed=1", "limit=8"]
    words += ["num_demonstrations=4", "lr=0.001", "vary={attention: [linear]}", f"out={tmp_path / 'run'}", "--quiet"]
    succeeded(run("fairseq-icl", "replicate", *words))
    cells = {}
    for file in (tmp_path / "run").glob("cells/*/cell.json"):
        described = json.loads(file.read_text())
        cells[described["cell"]["settings"]["attention"]] = (
            described,
            pd.read_parquet(file.parent / "results.parquet"),
        )
    assert set(cells) == {"softmax", "linear"}
    assert "--attention linear" in cells["linear"][0]["command"]
    first, second = (table[table.metric == "sim_aou"].value.mean() for _, table in cells.values())
    assert first != second


def test_a_model_fine_tuned_under_linear_attention_is_scored_under_it(world: World, tmp_path: Path):
    succeeded(world.train(tmp_path, "--attention", "linear", "--lr", "0.0001"))
    checkpoint = tmp_path / "checkpoint_last.pt"
    assert read_checkpoint(checkpoint)["cfg"]["task"]["attention"] == "linear"
    own, other = world.validate(checkpoint), world.validate(checkpoint, attention="softmax")
    assert numbers(succeeded(own).text) != numbers(succeeded(other).text)
