"""The whole experiment that the benchmark runs at any shape."""

from pathlib import Path

import pytest

from fairseq_icl.bench.shapes import Shape
from fairseq_icl.bench.whole import estimated_seconds, replicate_words, run_command, write_world
from fairseq_icl.models.files import find_files
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.replication.stand_in import find_model, shape_of
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
    words = replicate_words(tmp_path, SHAPE, limit=7)[1:]
    config = compose_configuration(friendly(words, sweep=False))
    assert config["limit"] == 7
    files = find_model(config["model"], tmp_path / "out")
    assert files.name == SHAPE.name
    assert shape_of(config["model"], files) == SHAPE.sizes()


@pytest.mark.parametrize(("text", "seconds"), [("90 s", 90), ("12 min", 720), ("1.5 h", 5400)])
def test_estimate_is_read_from_the_plan(text: str, seconds: float) -> None:
    assert estimated_seconds(f"a plan\nestimated time: {text} on this machine\n") == seconds


def test_run_measures_a_command() -> None:
    done = run_command(["--version"])
    assert done.seconds > 0
    assert done.peak_bytes > 2**20
    assert done.output.strip()


def test_memory_of_the_benchmark_itself_is_not_counted() -> None:
    large = b"x" * 2**30
    assert run_command(["--version"]).peak_bytes < len(large)


def test_failed_command_is_not_measured(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        run_command(["no-such-command"])
    assert "no such command" in capfd.readouterr().err
