"""Pretraining: token layout, the widening of episodes, and the script from nothing."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from examples.demo_model.episodes import FORMATS, Episode, Level
from examples.demo_model.pretraining.batches import BOS, EOS, EpisodeBatches, HeldOutBatches, collate, to_row
from examples.demo_model.pretraining.task import DemoPretrainingConfig, DemoPretrainingTask
from examples.demo_model.tokenizer import Tokenizer
from fairseq_icl.files import DEMO_MODEL

TOKENIZER = DEMO_MODEL.parent / "sentencepiece.bpe.model"

CLONE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TOKENIZER)


def test_rows_have_the_layout_of_in_context_prompts(tokenizer):
    episode = Episode(["dog", "cat", "bread"], ["red", "red", "blue"], [0, 0, 1])
    (dog,), (cat,), (bread,), (red,), (blue,) = tokenizer.encode(["dog", "cat", "bread", "red", "blue"])
    row = to_row(episode, tokenizer, 100)
    assert row.tokens == [BOS, dog, red, EOS, cat, red, EOS, bread, blue, EOS]
    assert row.demonstration == [-1, -1, 0, -1, -1, 1, -1, -1, 2, -1]
    assert row.seen == [-1, -1, 0, -1, -1, 1, -1, -1, 0, -1]
    assert to_row(episode, tokenizer, 4).tokens == row.tokens[:5]


def test_samples_are_shifted_by_one_token_and_padded(tokenizer):
    rows = [to_row(Episode(["dog"] * n, ["red"] * n, [0] * n), tokenizer, 100) for n in (1, 2)]
    sample = collate(rows)
    assert sample["ntokens"] == 3 + 6
    source, target = sample["net_input"]["src_tokens"], sample["target"]
    assert source.shape == target.shape == sample["seen"].shape == (2, 6)
    assert torch.equal(source[:, 1:], target[:, :-1])
    assert target[0].tolist()[3:] == [1, 1, 1]
    assert (target[sample["seen"] >= 0] == tokenizer.encode(["red"])[0][0]).all()


def test_batches_follow_from_seed_epoch_and_level(tokenizer):
    def batch(seed=1, epoch=1, level=4, index=3):
        dataset = EpisodeBatches(tokenizer, seed, num_batches=5, tokens_per_batch=2048)
        dataset.set_epoch(epoch)
        dataset.level = Level(level)
        return dataset[index]

    assert batch() == batch()
    assert all(batch() != other for other in (batch(seed=2), batch(epoch=2), batch(level=5), batch(index=4)))
    assert {row.format for index in range(5) for row in batch(index=index)} == {-1, *range(len(FORMATS))}


@pytest.mark.parametrize("number", range(Level.LAST + 1))
def test_rows_fill_their_length(tokenizer, number):
    dataset = EpisodeBatches(tokenizer, 1, num_batches=9, tokens_per_batch=2048)
    dataset.level = Level(number)
    for index in range(9):
        assert {len(row.tokens) - 1 for row in dataset[index]} <= set(Level(number).lengths)


def test_held_out_rows_hold_32_demonstrations_before_the_last_label(tokenizer):
    rows = HeldOutBatches(tokenizer, seed=0, num_batches=1, dataset="demo_pairs")[0]
    assert all(max(row.demonstration) == 32 for row in rows)
    assert rows == HeldOutBatches(tokenizer, seed=0, num_batches=1, dataset="demo_pairs")[0]


def test_level_rises_only_when_every_format_is_read_and_survives_a_restart():
    config = DemoPretrainingConfig(data=str(DEMO_MODEL.parent), seed=1)
    task = DemoPretrainingTask.setup_task(config)
    task.load_dataset("train")
    good = dict.fromkeys(FORMATS, 100) | {f"{name}_correct": 95 for name in FORMATS}
    task.totals = Counter(good | {"bare_correct": 80})
    task.begin_epoch(2, None)
    assert task.datasets["train"].level == Level(0)
    task.totals = Counter(good)
    task.begin_epoch(3, None)
    assert task.datasets["train"].level == Level(1)
    resumed = DemoPretrainingTask.setup_task(config)
    resumed.load_dataset("train")
    resumed.load_state_dict(task.state_dict())
    resumed.begin_epoch(4, None)
    assert resumed.datasets["train"].level == Level(1)


def test_script_trains_from_nothing_and_the_loss_falls(tmp_path):
    arguments = [str(tmp_path), "--max-update", "40", "--every", "40"]
    subprocess.run([sys.executable, "-m", "examples.demo_model.train", *arguments], cwd=CLONE, check=True, timeout=300)
    log = (tmp_path / "train.log").read_text()
    losses = [float(loss) for loss in re.findall(r"train_inner.*? label_loss=([\d.]+)", log)]
    assert len(losses) >= 4
    assert losses[-1] < losses[0] - 1
    model = torch.load(tmp_path / "model" / "model.pt", weights_only=True)["model"]
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
    assert (tmp_path / "data" / "demo_topic" / "valid.jsonl").exists()
