"""Fine-tuning on simulated GPUs: which device learns, how many processes, and what happens when memory is full."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import read_checkpoint
from fairseq_icl.results import means, read_results
from tests.commands import Result, assert_one_clear_line, run, succeeded
from tests.gpu.conftest import OnGPUs, simulated
from tests.world import World

SGD = ("--optimizer", "sgd", "--lr", "0.1", "--disable-validation", "--no-epoch-checkpoints")


def tuned_on(world: World, device: str | None, precision: str = "fp32", **settings: Any) -> dict[str, Any]:
    """Weights after six steps, what is observed of them, and where they are; the base must stay what it was."""
    model = fi.load_model(world.model, bpe=None, device=device, precision=precision)
    prompts = fi.build_prompts(model, str(world.spec), data=world.data, k=6, seed=3, limit=4)
    before = fi.observe(model, prompts).option_logprobs
    with fi.fine_tuned(model, prompts, "gd", lr=0.1, **settings) as tuned:
        assert tuned.weights is not None
        weights = {name: value.float().cpu() for name, value in tuned.weights.items()}
        devices = {str(value.device) for value in tuned.weights.values()}
        seen = fi.observe(tuned, prompts).option_logprobs
        steps = tuned.gradients["step"].nunique()
    assert torch.equal(fi.observe(model, prompts).option_logprobs, before)
    return {"weights": weights, "devices": devices, "seen": seen, "steps": steps}


def train(world: World, folder: Path, criterion: str, devices: int = 1, memory: int | None = None) -> Result:
    """fairseq-train in fp16 as on a machine with so many GPUs."""
    task = [word for word in world.task_flags(pretrained=world.model) if word != "--cpu"]
    words = [
        *task,
        "--arch",
        "pretrained_lm",
        "--criterion",
        criterion,
        "--precision",
        "fp16",
        "--save-dir",
        folder,
        *SGD,
    ]
    return run("fairseq-train", world.data, *words, **simulated(devices, memory))


@pytest.mark.parametrize("device", [None, "cpu", "cuda:1"])
def test_the_device_of_the_model_is_the_one_that_learns(on_gpus: OnGPUs, world: World, device: str | None) -> None:
    found = on_gpus(tuned_on, world, device, devices=2)
    plain = tuned_on(world, "cpu")
    assert found["devices"] == {device or "cuda:0"}
    assert found["steps"] == plain["steps"] == 6
    for name, value in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["seen"], plain["seen"], rtol=0, atol=1e-4)


def clipped_on_cpu(world: World) -> dict[str, Any]:
    return tuned_on(world, "cpu", clip_norm=0.5)


def test_gradients_are_clipped_on_the_cpu_of_a_machine_with_a_gpu(on_gpus: OnGPUs, world: World) -> None:
    found, plain = on_gpus(clipped_on_cpu, world), clipped_on_cpu(world)
    assert all(torch.equal(found["weights"][name], value) for name, value in plain["weights"].items())


def tuned_in_little_memory(world: World, spare: int) -> None:
    from tests.gpu.simulated_gpu import GPU

    model = fi.load_model(world.model, bpe=None)
    prompts = fi.build_prompts(model, str(world.spec), data=world.data, k=6, seed=3, limit=4)
    GPU.total = GPU.memory + spare
    with fi.fine_tuned(model, prompts, "gd", lr=0.1):
        pass


def observed_in_little_memory(world: World, spare: int) -> None:
    from tests.gpu.simulated_gpu import GPU

    model = fi.load_model(world.model, bpe=None)
    prompts = fi.build_prompts(model, str(world.spec), data=world.data, k=6, seed=3, limit=4)
    GPU.total = GPU.memory + spare
    fi.observe(model, prompts, in_context=True)


@pytest.mark.parametrize(
    ("function", "spare"),
    [(tuned_in_little_memory, 20_000), (tuned_in_little_memory, 100), (observed_in_little_memory, 9_000)],
)
def test_full_memory_is_one_line_with_a_remedy(on_gpus: OnGPUs, world: World, function: Any, spare: int) -> None:
    with pytest.raises(UserError, match=r"(fine-tuning|observing): CUDA out of memory.*; .*precision=fp16.*workers"):
        on_gpus(function, world, spare)


def test_full_memory_ends_fairseq_train_instead_of_skipping_demonstrations(world: World, tmp_path: Path) -> None:
    assert_one_clear_line(train(world, tmp_path, "cross_entropy", memory=60_000), "out of memory", "precision=")
    assert not (tmp_path / "checkpoint_last.pt").exists()


def test_two_gpus_make_the_updates_of_one_and_score_a_second_checkpoint(
    on_gpus: OnGPUs, world: World, tmp_path: Path
) -> None:
    files = []
    for criterion in ("cross_entropy", "layer_causal_ce"):
        succeeded(train(world, tmp_path / criterion, criterion, devices=2))
        files.append(tmp_path / criterion / "checkpoint_last.pt")
    state = read_checkpoint(files[0])
    assert state["optimizer_history"][-1]["num_updates"] == 6
    here = on_gpus(tuned_on, world, None, "fp16")
    for name, value in here["weights"].items():
        torch.testing.assert_close(state["model"][name], value, rtol=0, atol=1e-3)

    task = [word for word in world.task_flags() if word != "--cpu"]
    flags = ["--path", files[0], "--other-finetuned", files[1], "--results", tmp_path / "two.parquet"]
    words = [*task, "--criterion", "icl_similarity", *flags]
    succeeded(run("fairseq-validate", world.data, *words, **simulated(2)))
    table, made_by = read_results(tmp_path / "two.parquet")
    assert 0 < means(table).set_index("metric")["value"]["alpha"] < 1
    assert made_by["machine"]["device"] == "Simulated GPU"
