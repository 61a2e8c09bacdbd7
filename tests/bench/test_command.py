"""`fairseq-icl bench` as a user types it."""

from tests.commands import assert_one_clear_line, run


def test_bench_prints_a_table_and_its_limits() -> None:
    result = run("fairseq-icl", "bench", "--shape", "tiny", "--quick", "--what", "metrics")
    assert result.code in (0, 1), result.text  # 1: a limit was missed, which a busy machine may cause
    for part in ("tiny shape", "metrics and records, 100 queries", "bytes written an example", "of GEMM rate"):
        assert part in result.stdout


def test_bench_names_the_parts_it_knows() -> None:
    assert_one_clear_line(run("fairseq-icl", "bench", "--what", "icl,nothing"), "'nothing'", "pipeline")
