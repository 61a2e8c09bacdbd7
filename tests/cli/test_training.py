"""fairseq-train on demonstrations, and what its checkpoints are good for."""

from pathlib import Path

import pytest
import torch

from fairseq_icl.files import sha256_of
from fairseq_icl.models.checkpoints import base_reference, read_checkpoint
from fairseq_icl.models.files import load_dictionary
from tests.commands import PLUGIN, run, succeeded
from tests.world import World, save_model


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = succeeded(world.train(folder))
    assert max(map(len, done.text.splitlines())) < 1000, "fairseq's line of its configuration is for LOGLEVEL=DEBUG"
    return folder / "checkpoint_last.pt"


def last_line(text: str) -> str:
    return next(line for line in reversed(text.splitlines()) if "| valid |" in line)


def numbers(text: str) -> str:
    """The metrics of a validation without the speed, which differs from run to run."""
    return " | ".join(part for part in last_line(text).split(" | ")[3:] if not part.startswith("wps"))


def test_help_lists_the_task_and_explains_every_flag():
    text = succeeded(run("fairseq-train", "--user-dir", PLUGIN, "--help")).stdout
    options = text.split("options:", 1)[1]
    for word in ("demonstration_prompting", "pretrained_lm", "layer_causal_ce", "icl_similarity"):
        assert word in options
    entries = options.split("\n  -")[1:]
    flags = [entry.split("\n")[0].split()[0] for entry in entries]
    unexplained = [flag for flag, entry in zip(flags, entries, strict=True) if len(" ".join(entry.split()).split()) < 3]
    assert "-switch-labels" in flags
    assert unexplained == []


def test_checkpoint_holds_what_was_trained_and_names_its_base(world: World, trained: Path):
    state = read_checkpoint(trained)
    parts = {name.split("self_attn.")[1] for name in state["model"]}
    assert parts == {"k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"}
    assert base_reference(state) == {"path": str(world.model), "sha256": sha256_of(world.model)}


def test_fine_tuned_checkpoint_validates_with_its_own_flags_and_base(world: World, trained: Path):
    plain = run(
        "fairseq-validate",
        world.data,
        "--user-dir",
        PLUGIN,
        "--cpu",
        "--task",
        "demonstration_prompting",
        "--path",
        trained,
    )
    explicit = world.validate(trained, criterion="cross_entropy")
    assert numbers(succeeded(plain).text) == numbers(succeeded(explicit).text)
    base = world.validate(world.model, criterion="cross_entropy")
    assert numbers(succeeded(base).text) != numbers(explicit.text)


def test_args_and_cfg_checkpoints_validate_to_identical_numbers(world: World, tmp_path: Path):
    save_model(tmp_path / "cfg.pt", load_dictionary(world.dictionary), style="cfg")
    one = world.validate(world.model)
    two = world.validate(tmp_path / "cfg.pt", dict=world.dictionary)
    assert numbers(succeeded(one).text) == numbers(succeeded(two).text)
    assert "accuracy_icl" in last_line(one.text)


def test_training_can_be_resumed_from_its_checkpoint(world: World, tmp_path: Path):
    halves, whole = tmp_path / "halves", tmp_path / "whole"
    succeeded(world.train(halves, "--max-update", "3", "--save-interval-updates", "3"))
    result = succeeded(world.train(halves, "--restore-file", "checkpoint_last.pt"))
    assert "Loaded checkpoint" in result.text
    succeeded(world.train(whole))
    one, two = (read_checkpoint(folder / "checkpoint_last.pt")["model"] for folder in (halves, whole))
    for name in two:
        assert torch.equal(one[name], two[name]), name


def test_every_demonstration_is_used_once_in_order(world: World, tmp_path: Path):
    result = succeeded(world.train(tmp_path, "--log-format", "json", "--log-interval", "1"))
    assert '"num_updates": "6"' in result.text
    assert "total_num_itrs = 6" in result.text


@pytest.mark.parametrize(
    "flags",
    [("--loss-on", "label"), ("--step-per", "token"), ("--biases", "frozen"), ("--switch-labels", "finetuning")],
    ids=lambda flags: flags[0],
)
def test_each_difference_between_code_and_paper_changes_the_outcome(
    world: World, trained: Path, tmp_path: Path, flags: tuple[str, str]
):
    succeeded(world.train(tmp_path, *flags))
    plain, changed = (read_checkpoint(path)["model"] for path in (trained, tmp_path / "checkpoint_last.pt"))
    assert any(name not in changed or not torch.equal(changed[name], plain[name]) for name in plain)
