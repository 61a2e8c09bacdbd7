"""docs/findings.md from results folders.

    python -m examples.findings FOLDER... --page docs/findings.md
    python -m examples.findings --page docs/findings.md --ask model=gemma-3-270m method=gd lr=0.01 queries=train \\
        auc_icl minus auc_ft

Every finished cell of the folders, of whatever experiment and model, goes to docs/findings_cells.csv, where it takes
the place of an earlier one with the same settings. Tables, figures and verdicts between the page's marks are made of
that file alone: without folders the page is only made anew, and a third model is one more folder. The prose stands
outside the marks. Nothing is averaged but seeds: whatever else differs between cells is a row or a column of its own.

`--ask` prints the rows of the file behind a number of the page, with mean, SD and interval over seeds. After `minus`
stand only the words that differ from those before it. Where nothing is said, cells are pretrained and as plain as any.
"""

import argparse
from pathlib import Path

from examples.findings.cells import answer, with_folders
from examples.findings.page import all_of
from fairseq_icl.files import with_part, write_atomically

MARKS = ("<!-- tables -->", "<!-- end of tables -->")


def main() -> None:
    """Add the folders' cells to the file, write the page."""
    parser = argparse.ArgumentParser(prog="python -m examples.findings", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="results folders of any experiment")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--ask", nargs="+", metavar="WORD", help="COLUMN=VALUE of the file's cells, and a metric")
    arguments = parser.parse_args()
    file = arguments.page.with_name(f"{arguments.page.stem}_cells.csv")
    cells = with_folders(file, arguments.folders)
    if arguments.ask:
        try:
            print(answer(cells, arguments.ask))
        except ValueError as error:
            parser.error(f"--ask: {error}")
        return
    write_atomically(file, cells.to_csv(index=False, lineterminator="\n"))
    text = "\n\n".join(filter(None, all_of(cells, arguments.page)))
    write_atomically(arguments.page, with_part(arguments.page.read_text("utf-8"), *MARKS, f"\n{text}\n"))


if __name__ == "__main__":
    main()
