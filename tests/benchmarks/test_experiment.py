"""The commands that the benchmark runs at any shape."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import experiment
from benchmarks.experiment import (
    LAUNCHER,
    ONE_SEED,
    CommandRun,
    estimated_seconds,
    measure_experiment,
    replicate_words,
    run_command,
    shown_command,
    write_world,
)
from benchmarks.report import BenchFindings
from benchmarks.shapes import Shape
from fairseq_icl.models.files import find_files
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.replication.find_model import find_model, shape_of
from fairseq_icl.settings import Settings

SHAPE = Shape("test", layers=2, width=16, heads=2, ffn=64, vocabulary=300)


def test_world_has_prompts_of_the_right_size(tmp_path: Path) -> None:
    write_world(tmp_path, SHAPE)
    files = find_files(tmp_path, bpe=None)
    assert len(files.load_dictionary()) == SHAPE.vocabulary
    prompts = build_prompts(load_spec("sst2"), tmp_path, files.writing, Settings(seed=2))
    assert len(prompts.queries) == 872
    assert len(prompts.context_rows) == 32
    assert 22 < len(prompts.context) / 32 < 32


def test_command_is_understood_and_finds_the_model(tmp_path: Path) -> None:
    write_world(tmp_path, SHAPE)
    words = replicate_words(tmp_path, SHAPE, 7, ONE_SEED)[1:]
    config = compose_configuration(friendly(words))
    assert config["limit"] == 7
    files = find_model(config["model"], tmp_path / "out")
    assert files.name == SHAPE.name
    assert shape_of(config["model"], files) == SHAPE.sizes()


def test_shown_command_does_not_name_the_temporary_folder(tmp_path: Path) -> None:
    shown = shown_command(replicate_words(tmp_path, SHAPE, 7, ["workers=2"]), tmp_path)
    assert shown.startswith("fairseq-icl replicate experiment=deutch2024 model=FOLDER/model.pt ")
    assert "workers=2 limit=7" in shown
    assert str(tmp_path) not in shown


@pytest.mark.parametrize(("text", "seconds"), [("90 s", 90), ("12 min", 720), ("1.5 h", 5400)])
def test_estimate_is_read_from_the_plan(text: str, seconds: float) -> None:
    assert estimated_seconds(f"a plan\nabout {text} on this machine in one process\n") == seconds


def test_run_measures_a_command() -> None:
    done = run_command(["--version"])
    assert done.seconds > 0
    assert done.peak_bytes > 2**20
    assert done.output.strip()


def test_memory_of_the_benchmark_itself_is_not_counted() -> None:
    large = b"x" * 2**30
    assert run_command(["--version"]).peak_bytes < len(large)


def test_memory_of_processes_that_a_command_starts_is_added() -> None:
    """Two children of 200 MB each, which the kernel would count one by one."""
    child = "import time; held = bytearray(b'x' * 200_000_000); time.sleep(3)"
    start = f"import subprocess, sys; run = [sys.executable, '-c', {child!r}]; "
    start += "both = [subprocess.Popen(run) for _ in range(2)]; [one.wait() for one in both]"
    done = subprocess.run([sys.executable, "-c", LAUNCHER, sys.executable, "-c", start], capture_output=True, text=True)
    assert int(done.stdout.split()[-2]) * 1024 > 380_000_000


def test_experiment_is_measured_with_one_worker_and_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        experiment, "run_command", lambda words: commands.append(words) or CommandRun(90, 80, len(commands) * 2**30, "")
    )
    findings = BenchFindings("test", "")
    measure_experiment(findings, SHAPE, lambda _: None)
    assert [word for words in commands for word in words if word.startswith("workers")] == ["workers=1", "workers=2"]
    outs = {word for words in commands for word in words if word.startswith("out=")}
    assert len(outs) == 2  # or the second run would find everything done
    (note,) = findings.notes
    assert "with 1 worker 90 s and 1.00 GiB at its peak, with 2 workers 90 s and 2.00 GiB" in note
    assert "have 2.00 times the memory of one" in note


def test_experiment_has_all_seeds_inits_and_methods(tmp_path: Path) -> None:
    write_world(tmp_path, SHAPE)
    plan = run_command([*replicate_words(tmp_path, SHAPE, 2, ["workers=2"]), "--dry-run"]).output
    for part in ("gd", "lcgd", "alpha", "trained-embeddings"):
        assert part in plan
    assert estimated_seconds(plan) >= 0


def test_failed_command_is_not_measured(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        run_command(["no-such-command"])
    assert "no such command" in capfd.readouterr().err
