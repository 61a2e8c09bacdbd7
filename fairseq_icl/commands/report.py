"""`fairseq-icl report RUN`: verdicts, tables and figures of a results folder, beside the published figures.

fairseq-icl report RUN                    write RUN/report and print its verdicts and tables
fairseq-icl report RUN --open             the same, and open the page in the browser
fairseq-icl report RUN_A RUN_B --to DIR   two results folders (two models, two readings) side by side
"""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_icl.errors import UserError
from fairseq_icl.replication import FORMATS

if TYPE_CHECKING:
    from fairseq_icl.replication.report.run import Run


def main(argv: list[str]) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(
        prog="fairseq-icl report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help="results folder of fairseq-icl replicate; it may be unfinished; two: compare"
    )
    parser.add_argument("--to", type=Path, help="where to write the report (default: RUN/report, of two: ./report)")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=FORMATS, help="forms to write (default: all)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser when it is written")
    parser.add_argument("--quiet", action="store_true", help="do not print the tables")
    arguments = parser.parse_args(argv)
    if arguments.open and "html" not in arguments.format:
        raise UserError("--open: the page is the html form; add html to --format")
    report(arguments.run, arguments.to, tuple(arguments.format), quiet=arguments.quiet, show=arguments.open)
    return 0


def report(
    folders: Path | Sequence[Path],
    to: Path | None = None,
    formats: tuple[str, ...] = FORMATS,
    *,
    quiet: bool = False,
    show: bool = False,
) -> "Run":
    """Write the report of a folder, or of several side by side, print its tables and say where it is."""
    from fairseq_icl.replication.report import Contents, write_report  # pandas, which --help can do without
    from fairseq_icl.replication.report.run import load_run, side_by_side

    folders = [folders] if isinstance(folders, Path) else list(folders)
    runs = [load_run(folder) for folder in folders]
    run = runs[0] if len(runs) == 1 else side_by_side(runs)
    contents = Contents.of(run)
    place = to or (folders[0] / "report" if len(folders) == 1 else Path("report"))
    written = write_report(contents, place, formats)
    if not quiet:
        print(contents.plain(), end="\n\n")
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    finished = int(run.planned["finished"].sum())
    missing = f", {len(run.missing)} missing" if len(run.missing) else ""
    print(f"{finished} of {len(run.planned)} cells finished{missing}; report: {next(iter(written.values()))}")
    if show and not webbrowser.open(written["html"].resolve().as_uri()):
        print(f"no browser could be started; open {written['html']} yourself", file=sys.stderr)
    return run
