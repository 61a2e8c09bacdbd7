"""`python -m benchmarks` as a user types it."""

from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks.report import BenchFindings, Limit
from benchmarks.shapes import Shape
from fairseq_icl.errors import UserError
from tests.commands import assert_one_clear_line, run


def test_bench_prints_a_table_and_its_limits(capsys) -> None:
    assert bench.main(["--shape", "tiny", "--quick", "--what", "metrics"]) in (0, 1)  # 1: a limit was missed
    printed = capsys.readouterr().out
    for part in ("tiny shape", "metrics and records, 100 queries", "bytes written an example", "of GEMM rate"):
        assert part in printed


def test_bench_names_the_parts_it_knows() -> None:
    assert_one_clear_line(run("python", "-m", "benchmarks", "--what", "icl,nothing"), "'nothing'", "pipeline")


def test_the_command_of_the_package_says_where_the_benchmark_is() -> None:
    assert_one_clear_line(run("fairseq-icl", "bench", "--quick"), "python -m benchmarks")


def test_several_shapes_are_measured_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "run", lambda shape, *_, **__: BenchFindings(shape.name, f"of {shape.name}"))
    monkeypatch.setattr(bench, "DOCS", tmp_path)
    assert bench.main(["--shape", "355m,125m", "--write-docs"]) == 0
    assert capsys.readouterr().out == "of 355m\n\nof 125m\n"
    page = (tmp_path / "benchmark.md").read_text()
    assert page.index("## 355m") < page.index("## 125m")
    assert page.count("Made by `python -m benchmarks --shape 355m,125m --write-docs`.") == 2


def test_all_shapes_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(bench, "run", lambda shape, *_, **__: BenchFindings(shape.name, shape.name))
    assert bench.main(["--shape", "all"]) == 0
    assert capsys.readouterr().out.split() == ["125m", "355m", "1.3b"]


def test_one_missed_limit_of_any_shape_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def run(shape: Shape, *_: object, **__: object) -> BenchFindings:
        return BenchFindings(shape.name, "", limits=[Limit("a share", 0.5, 0.1 if shape.name == "tiny" else 1)])

    monkeypatch.setattr(bench, "run", run)
    assert bench.main(["--shape", "tiny,125m"]) == 1
    assert bench.main(["--shape", "125m"]) == 0


def test_bench_names_the_shapes_it_knows() -> None:
    with pytest.raises(UserError, match=r"--shape small: no shape 'small'"):
        bench.main(["--shape", "small"])
    with pytest.raises(UserError, match=r"--shape 125m,7b: no shape '7b'; choose from tiny, 125m, 355m, 1\.3b"):
        bench.main(["--shape", "125m,7b"])
