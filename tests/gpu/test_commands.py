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


def test_doctor_compares_the_gpus_own_path_and_says_when_a_model_does_not_fit(on_gpus: OnGPUs, world: World) -> None:
    lines, problems = on_gpus(doctor, world, 2**30)
    assert not problems
    assert "Simulated GPU: log-probabilities of the text differ by at most" in lines[0]
    lines, problems = on_gpus(doctor, world, 1000)
    assert "WARNING  gpu" in lines[0]
    assert "precision=fp16 or bf16 is needed" in lines[0]


def test_cells_of_gpu_and_cpu_have_keys_of_their_own(tmp_path: Path) -> None:
    for words in ((), ("device=cpu",)):
        code, text = replicate(tmp_path / "run", *words)
        assert code == 0, text[-3000:]
    assert devices(tmp_path / "run") == ["Simulated GPU", f"cpu {platform.machine()}"]
