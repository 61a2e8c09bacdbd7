"""A run's report, written in all its forms into one folder."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.replication import FORMATS
from fairseq_icl.replication.report import html, text
from fairseq_icl.replication.report.order import order_tables
from fairseq_icl.replication.report.run import Run
from fairseq_icl.replication.report.stability import stability_tables
from fairseq_icl.replication.report.tables import Table, comparison_tables, paper_tables

if TYPE_CHECKING:
    from fairseq_icl.results.drawing import Drawing

DOTS_PER_INCH = 130


def write_report(run: Run, folder: Path, formats: tuple[str, ...] = FORMATS) -> dict[str, Path]:
    """Write the report; returns the path of each format's main file."""
    from fairseq_icl.replication.report.figures import all_figures  # matplotlib, which tables alone can do without

    papers, comparisons = paper_tables(run), own_tables(run)
    drawings = list(all_figures(run)) if {"html", "md", "tex"} & set(formats) else []
    written = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if {"md", "tex"} & set(formats):
            _write_figures(drawings, folder / "figures")
        contents = {
            "html": lambda: html.page(run, papers, comparisons, drawings),
            "md": lambda: markdown_page(run, [*papers, *comparisons], drawings),
            "tex": lambda: latex_page([*papers, *comparisons], drawings),
            "csv": lambda: text.comma_separated([*papers, *comparisons]),
        }
        for name in formats:
            written[name] = folder / f"report.{name}"
            write_atomically(written[name], contents[name]())
        if "csv" in formats:
            flat = run.summary.assign(keys=run.summary["keys"].map(lambda keys: " ".join(map(str, keys))))
            texts = flat.select_dtypes(exclude="number").columns
            flat[texts] = flat[texts].map(lambda cell: text.spreadsheet_safe(cell) if isinstance(cell, str) else cell)
            write_atomically(folder / "summary.csv", flat.to_csv(index=False))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another place with --to") from error
    return written


def own_tables(run: Run) -> list[Table]:
    """The tables that compare the run's cells with each other: variants, perturbations, orders."""
    return [*comparison_tables(run), *stability_tables(run), *order_tables(run)]


def _write_figures(drawings: "list[Drawing]", folder: Path) -> None:
    for drawing in drawings:
        path = folder / f"{text.file_name(drawing.name)}.png"
        options = {"format": "png", "dpi": DOTS_PER_INCH, "metadata": {"Software": None}}
        # Into a new file that takes the place of the old one: a link that lies there is not followed.
        write_atomically(path, partial(drawing.save, **options))


def markdown_page(run: Run, tables: list[Table], drawings: "list[Drawing]") -> str:
    """The report in Markdown, figures beside it."""
    finished = int(run.planned["finished"].sum())
    lines = [
        f"# Report: {text.marked(', '.join(run.experiments))}",
        "",
        f"{finished} of {len(run.planned)} cells finished.",
        "",
    ]
    lines += [line for warning in run.warnings for line in (f"**{text.marked(warning)}**", "")]
    lines += [text.markdown(table) for table in tables]
    for drawing in drawings:
        lines += [
            f"### {text.marked(drawing.title)}",
            "",
            f"![{text.marked(drawing.title)}](figures/{text.file_name(drawing.name)}.png)",
            "",
            text.marked(drawing.caption),
            "",
        ]
    return "\n".join(lines)


def latex_page(tables: list[Table], drawings: "list[Drawing]") -> str:
    """Tables and figures to be \\input into a document that uses booktabs and graphicx."""
    lines = [r"% \usepackage{booktabs,graphicx}", *(text.latex(table) for table in tables)]
    for drawing in drawings:
        lines += [
            r"\begin{figure}",
            r"\centering",
            rf"\includegraphics[width=\linewidth]{{figures/{text.file_name(drawing.name)}.png}}",
        ]
        lines += [rf"\caption{{{text.escaped(f'{drawing.title}. {drawing.caption}')}}}", r"\end{figure}", ""]
    return "\n".join(lines)
