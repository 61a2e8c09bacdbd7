"""Tables, limits and the plot of a benchmark."""

from pathlib import Path

from benchmarks.report import PREAMBLE, BenchFindings, BenchRow, Limit
from benchmarks.sweeps import SweepPoint

ROWS = [
    BenchRow("ICL scoring", 0.5, 20.0, gemm_share=0.61),
    BenchRow("memory", ours_memory=2**20, authors_memory=5 * 2**20),
]
POINTS = [SweepPoint("demonstrations", k, 27 * k, 0.1 * k, 0.05, 0.1 * k) for k in (8, 64)]


def test_row_knows_how_many_times_faster_it_is() -> None:
    assert ROWS[0].ratio == 40
    assert ROWS[1].ratio is None
    assert ROWS[0].cells()[:4] == ["ICL scoring", "0.500", "20.000", "40.0"]
    assert ROWS[1].cells()[4:6] == ["1", "5"]


def test_speed_is_expected_where_both_ways_ran() -> None:
    findings = BenchFindings("tiny", "a title")
    for row in ROWS:
        findings.expect_faster(row, 20, "times faster")
    assert findings.limits == [Limit("times faster", 40.0, 20, at_least=True)]


def test_limit_is_kept_on_its_side_of_the_bound() -> None:
    assert Limit("times faster", 20.0, 20, at_least=True).kept
    assert not Limit("times faster", 19.9, 20, at_least=True).kept
    assert Limit("share", 0.1, 0.1).kept
    assert Limit("share", 0.2, 0.1).line() == "MISSED  share: 0.2 (at most 0.1)"


def test_text_has_a_line_for_every_row_limit_and_point() -> None:
    findings = BenchFindings(
        "tiny", "a title", ROWS, [Limit("times faster", 40, 20, at_least=True)], POINTS, ["a note"]
    )
    text = findings.text()
    for part in ("a title", "ICL scoring", "8 demonstrations", "a note", "ok      times faster: 40 (at least 20)"):
        assert part in text


def test_page_and_plot_are_written(tmp_path: Path) -> None:
    BenchFindings("tiny", "a title", ROWS, [], POINTS).write(tmp_path, "python -m benchmarks")
    BenchFindings("large", "another", ROWS).write(tmp_path, "python -m benchmarks --shape large")
    BenchFindings("tiny", "a title", ROWS, [], POINTS).write(tmp_path, "python -m benchmarks")
    page = (tmp_path / "benchmark.md").read_text()
    assert page.count("\n## ") == 2  # a part a shape, made anew in its place
    page = page.partition("<!-- end of tiny -->")[0]
    assert "Made by `python -m benchmarks`." in page
    assert "![cost per query](benchmark_tiny.png)" in page
    assert page.count("\n| ") == 2 * (1 + 2) + 1  # header and rows of two tables, and a row of exponents
    assert (tmp_path / "benchmark_tiny.png").read_bytes().startswith(b"\x89PNG")


def test_preamble_is_made_anew_and_other_parts_stay(tmp_path: Path) -> None:
    (tmp_path / "benchmark.md").write_text("# An old preamble\n\n<!-- tiny -->\nold\n<!-- end of tiny -->\n")
    BenchFindings("large", "a title", ROWS).write(tmp_path, "python -m benchmarks")
    page = (tmp_path / "benchmark.md").read_text()
    assert page.startswith(PREAMBLE + "<!-- tiny -->\nold\n<!-- end of tiny -->\n<!-- large -->")


def test_page_in_the_repository_starts_with_the_preamble() -> None:
    page = Path(__file__).parents[2] / "docs" / "benchmark.md"
    assert page.read_text().startswith(PREAMBLE + "<!-- ")


def test_no_plot_without_a_sweep(tmp_path: Path) -> None:
    BenchFindings("tiny", "a title", ROWS).write(tmp_path, "python -m benchmarks")
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.md"]
