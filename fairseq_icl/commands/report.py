"""`fairseq-icl report RUN`: tables and figures of a results folder, beside the published figures."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_icl.replication import FORMATS

if TYPE_CHECKING:
    from fairseq_icl.replication.report.run import Run


def main(argv: list[str]) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(prog="fairseq-icl report", description=__doc__)
    parser.add_argument("run", type=Path, help="results folder of fairseq-icl replicate; it may be unfinished")
    parser.add_argument("--to", type=Path, help="where to write the report (default: RUN/report)")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=FORMATS, help="forms to write (default: all)")
    parser.add_argument("--quiet", action="store_true", help="do not print the tables")
    arguments = parser.parse_args(argv)
    report(arguments.run, arguments.to, tuple(arguments.format), quiet=arguments.quiet)
    return 0


def report(folder: Path, to: Path | None = None, formats: tuple[str, ...] = FORMATS, *, quiet: bool = False) -> "Run":
    """Write the report of `folder`, print its tables and say where it is."""
    from fairseq_icl.replication.report import own_tables, text, write_report  # pandas, which --help can do without
    from fairseq_icl.replication.report.run import load_run
    from fairseq_icl.replication.report.tables import paper_tables

    run = load_run(folder)
    written = write_report(run, to or Path(folder) / "report", formats)
    if not quiet:
        for table in [*paper_tables(run), *own_tables(run)]:
            print(text.plain(table), end="\n\n")
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    finished = int(run.planned["finished"].sum())
    missing = f", {len(run.missing)} missing" if len(run.missing) else ""
    print(f"{finished} of {len(run.planned)} cells finished{missing}; report: {next(iter(written.values()))}")
    return run
