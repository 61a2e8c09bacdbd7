"""docs/findings.md from results folders.

    python -m examples.findings FOLDER... --page docs/findings.md
    python -m examples.findings --page docs/findings.md --ask model=gemma-3-270m method=gd lr=0.01 queries=train \\
        auc_icl minus auc_ft

Every finished cell of the folders, of whatever experiment and model, goes to docs/findings_cells.csv, where it takes
the place of an earlier one with the same settings. The page is made of that file: tables, figures and verdicts, and the
numbers in the prose, examples/findings/prose.md, where each stands as the question that it answers (prose.py). Without
folders the page is only made anew, and a third model is one more folder. Nothing is averaged but seeds: whatever else
differs between cells is a row or a column of its own.

`--ask` prints the rows of the file behind a number of the page, with mean, SD and interval over seeds. After `minus`
stand only the words that differ from those before it. Where nothing is said, cells are pretrained and as plain as any.
"""

import argparse
from pathlib import Path

from examples.findings.cells import answer, cells_file, with_folders
from examples.findings.page import all_of, lines_of
from examples.findings.prose import filled
from fairseq_icl.files import write_atomically


def main() -> None:
    """Add the folders' cells to the file, write the page."""
    parser = argparse.ArgumentParser(prog="python -m examples.findings", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="results folders of any experiment")
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--prose", type=Path, default=Path(__file__).with_name("prose.md"), help="what it says")
    parser.add_argument("--ask", nargs="+", metavar="WORD", help="COLUMN=VALUE of the file's cells, and a metric")
    arguments = parser.parse_args()
    file = cells_file(arguments.page)
    cells = with_folders(file, arguments.folders)
    try:
        if arguments.ask:
            print(answer(cells, arguments.ask))
            return
        write_atomically(file, cells.to_csv(index=False, lineterminator="\n"))
        prose, numbers = filled(arguments.prose, cells)
    except ValueError as error:
        parser.error(str(error))
    heads = ["number", "words", "told from zero, if a difference"]
    asked = lines_of("## Every number above, and its words for `--ask`", heads, numbers)
    parts = [prose.rstrip(), asked if numbers else "", "## Tables", *all_of(cells, arguments.page)]
    write_atomically(arguments.page, "\n\n".join(filter(None, parts)) + "\n")


if __name__ == "__main__":
    main()
