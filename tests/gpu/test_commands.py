"""The commands on a simulated GPU: replicate, doctor; and a run of which one cell does not fit into memory."""

import platform
from pathlib import Path

from fairseq_icl.results import read_results
from tests.commands import run
from tests.gpu.conftest import OnGPUs, simulated
from tests.world import World

DEMO = ("experiment=demo", "dataset=demo_sentiment", "method=gd", "limit=4", "k=2", "seed=1", "init=pretrained")


def replicate(out: Path, *words: str) -> tuple[int, str]:
    done = run("fairseq-icl", "replicate", *DEMO, *words, f"out={out}", **simulated(2))
    return done.code, done.text


def devices(out: Path) -> list[str]:
    """What the cells of a run say of the device."""
    return sorted(read_results(path)[1]["machine"]["device"] for path in out.rglob("results.parquet"))


def doctor(world: World, total: int) -> tuple[list[str], int]:
    import torch

    from fairseq_icl.commands.doctor import Findings, compare_devices
    from fairseq_icl.models import load_model
    from tests.gpu.simulated_gpu import GPU

    GPU.total = GPU.memory + total
    findings = Findings()
    compare_devices(findings, load_model(world.model, bpe=None, device="cpu").lm.decoder, [2, 5, 6, 7, 9, 11])
    assert not torch.backends.cuda.matmul.allow_tf32
    return findings.lines, findings.problems


def kernels_of_the_probe(world: World, out: Path, device: str) -> int:
    """How many kernels ran on the GPU while a plan's time was estimated."""
    from fairseq_icl.replication.estimate import Probe
    from tests.gpu.simulated_gpu import GPU
    from tests.replication.test_run import planned

    words = ("experiment=deutch2024", "init=pretrained", "method=gd", "seed=1", "limit=4")
    cells, engine = planned(world, out, *words, f"device={device}")
    GPU.reset()
    assert Probe(engine.keys, world.data).estimate(cells) > 0
    return GPU.kernels


def test_a_plan_is_timed_on_the_device_that_would_run_it(on_gpus: OnGPUs, world: World, tmp_path: Path) -> None:
    assert on_gpus(kernels_of_the_probe, world, tmp_path / "gpu", "cuda") > 0
    assert on_gpus(kernels_of_the_probe, world, tmp_path / "cpu", "cpu") == 0


def test_doctor_compares_the_gpus_own_path_and_says_when_a_model_does_not_fit(on_gpus: OnGPUs, world: World) -> None:
    lines, problems = on_gpus(doctor, world, 2**30)
    assert not problems
    assert "Simulated GPU: log-probabilities of the text differ by at most" in lines[0]
    assert "gradient of a training step" in lines[0]
    assert lines[1].startswith("  ok       gpu fp16"), lines[1]
    lines, problems = on_gpus(doctor, world, 1000)
    assert "precision=fp16 or bf16 is needed" in lines[0]
    assert "WARNING  gpu fp16" in lines[1]
    assert "not even half of it fits" in lines[1]


def test_cells_of_gpu_and_cpu_have_keys_of_their_own(tmp_path: Path) -> None:
    for words in ((), ("device=cpu",)):
        code, text = replicate(tmp_path / "run", *words)
        assert code == 0, text[-3000:]
    assert devices(tmp_path / "run") == ["Simulated GPU", f"cpu {platform.machine()}"]
