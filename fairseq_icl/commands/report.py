"""`fairseq-icl report RUN`: verdicts, tables and figures of a results folder, beside the published figures.

fairseq-icl report RUN                    write RUN/report and print its verdicts and tables
fairseq-icl report RUN --open             the same, and open the page in the browser
fairseq-icl report RUN_A RUN_B --to DIR   two results folders (two models, two readings) side by side
"""

import argparse
import hashlib
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.files import PACKAGE, write_atomically
from fairseq_icl.replication import FORMATS, USUAL_FORMATS
from fairseq_icl.typed import read_json

TOLD = "told.json"  # beside the report: what was said of it, and of which state of the results it is


def main(argv: list[str]) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(
        prog="fairseq-icl report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, nargs="+", help="results folder of fairseq-icl replicate; it may be unfinished; two: compare"
    )
    parser.add_argument("--to", type=Path, help="where to write the report (default: RUN/report, of two: ./report)")
    parser.add_argument(
        "--format", nargs="+", choices=FORMATS, default=USUAL_FORMATS, help="forms to write (default: html csv)"
    )
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
    formats: tuple[str, ...] = USUAL_FORMATS,
    *,
    quiet: bool = False,
    show: bool = False,
) -> None:
    """Write the report of a folder, or of several side by side, print its tables and say where it is.

    A report that is there already is not made again, unless cells, plans or the package have changed since.
    """
    folders = [folders] if isinstance(folders, Path) else list(folders)
    target = to or (folders[0] / "report" if len(folders) == 1 else Path("report"))
    state = _state(folders, target, formats)
    told: dict[str, Any] = {}
    with suppress(UserError, KeyError, TypeError):  # what was said of a report that lies there
        before = read_json(target / TOLD) if (target / TOLD).exists() else {}
        if before["state"] == state and all((target / f"report.{name}").is_file() for name in formats):
            told = {name: before[name] for name in ("tables", "warnings", "last")}
    if not told:
        from fairseq_icl.replication.report import Contents, write_report  # pandas, which --help can do without
        from fairseq_icl.replication.report.run import load_run, side_by_side

        runs = [load_run(folder) for folder in folders]
        run = runs[0] if len(runs) == 1 else side_by_side(runs)
        contents = Contents.of(run)
        written = write_report(contents, target, formats)
        missing = f", {len(run.missing)} missing" if len(run.missing) else ""
        finished = f"{len(run.planned) - len(run.missing)} of {len(run.planned)} cells finished{missing}"
        last = f"{finished}; report: {next(iter(written.values()))}"
        told = {"tables": contents.plain(), "warnings": run.warnings, "last": last}
    write_atomically(target / TOLD, json.dumps({"state": state, **told}))
    if not quiet:
        print(told["tables"], end="\n\n")
    for warning in told["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    print(told["last"])
    page = target / "report.html"
    if show and not webbrowser.open(page.resolve().as_uri()):
        print(f"no browser could be started; open {page} yourself", file=sys.stderr)


def _state(folders: Sequence[Path], target: Path, formats: tuple[str, ...]) -> str:
    """Hash of what a report depends on: sizes and times of the files of plans, cells and package, and its form."""
    parts: list[object] = [str(target), formats]
    for folder in (*(folder / name for folder in folders for name in ("plans", "cells")), PACKAGE):
        for found, _, names in sorted(os.walk(folder)):
            facts = ((name, os.lstat(Path(found, name))) for name in sorted(names) if not name.endswith(".pyc"))
            parts += [(found, name, stat.st_size, stat.st_mtime_ns) for name, stat in facts]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
