"""The whole experiment that the benchmark runs at any shape."""

from pathlib import Path

import pytest

from fairseq_icl.bench.scale import command, estimated_seconds, run, sizes, write_world
from fairseq_icl.bench.shapes import SHAPES, Shape
from fairseq_icl.encoding import line_encoder, load_dictionary
from fairseq_icl.prompts.build import build_prompts
from fairseq_icl.prompts.catalogue import load_spec
from fairseq_icl.reading import Reading
from fairseq_icl.replication.configuration import compose_configuration, friendly

SHAPE = Shape("test", layers=2, width=16, heads=2, vocabulary=300)


def test_world_has_prompts_of_the_right_size(tmp_path: Path) -> None:
    write_world(tmp_path, SHAPE)
    dictionary = load_dictionary(tmp_path / "dict.txt")
    assert len(dictionary) == SHAPE.vocabulary
    encode = line_encoder(dictionary, None)
    prompts = build_prompts(load_spec("sst2"), tmp_path, encode, num_demonstrations=32, seed=2, reading=Reading())
    assert len(prompts.queries) == 872
    assert prompts.num_dropped == 0
    assert 22 < len(prompts.context) / 32 < 32


def test_command_is_understood_and_has_the_shape(tmp_path: Path) -> None:
    words = command(tmp_path, SHAPES["355m"], limit=7)[1:]
    config = compose_configuration(friendly(words, sweep=False))
    assert config["model"]["shape"] == sizes(SHAPES["355m"])
    assert config["limit"] == 7


@pytest.mark.parametrize(("text", "seconds"), [("90 s", 90), ("12 min", 720), ("1.5 h", 5400)])
def test_estimate_is_read_from_the_plan(text: str, seconds: float) -> None:
    assert estimated_seconds(f"a plan\nestimated time: {text} on this machine\n") == seconds


def test_run_measures_a_command() -> None:
    done = run(["--version"])
    assert done.seconds > 0
    assert done.peak_bytes > 2**20
    assert done.output.strip()


def test_memory_of_the_benchmark_itself_is_not_counted() -> None:
    large = b"x" * 2**30
    assert run(["--version"]).peak_bytes < len(large)


def test_failed_command_is_not_measured(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        run(["no-such-command"])
    assert "no such command" in capfd.readouterr().err
