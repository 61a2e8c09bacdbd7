"""A run's report, written in all its forms into one folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_icl.errors import UserError
from fairseq_icl.files import write_atomically
from fairseq_icl.replication import FORMATS
from fairseq_icl.replication.report import text
from fairseq_icl.replication.report.claims import Verdict, summary, verdicts
from fairseq_icl.replication.report.displacement import displacement_tables, steps_tables
from fairseq_icl.replication.report.experiments import order_tables, stability_tables, trajectory_tables
from fairseq_icl.replication.report.rates import SEARCHED, rate_tables, write_model_files
from fairseq_icl.replication.report.run import Run, with_data
from fairseq_icl.replication.report.tables import Table, comparison_tables, data_tables, overview, paper_tables

if TYPE_CHECKING:
    from fairseq_icl.results.drawing import Drawing

DOTS_PER_INCH = 130
COMPARISONS = [steps_tables, comparison_tables, stability_tables, order_tables, trajectory_tables, rate_tables]
COMPARISONS += [displacement_tables, data_tables]
"""What makes tables besides the papers' own: functions run -> tables, with what they need."""


@dataclass(frozen=True)
class Contents:
    """What a report says, before it has a form."""

    run: Run
    verdicts: dict[str, list[Verdict]]  # by model
    overviews: list[Table]
    papers: list[Table]
    comparisons: list[Table]

    @classmethod
    def of(cls, run: Run) -> "Contents":
        """Everything that the run has numbers for."""
        models = run.planned.loc[run.planned["finished"], "model"].drop_duplicates()
        comparisons = [table for make in with_data(run, COMPARISONS) for table in make(run)]
        overviews = [table for model in models if (table := overview(run, model)).rows]
        return cls(run, {model: verdicts(run, model) for model in models}, overviews, paper_tables(run), comparisons)

    @property
    def sheets(self) -> list[text.Sheet | Table]:
        """Verdicts and tables, in the order of the report."""
        found = [text.verdict_sheet(model, verdicts) for model, verdicts in self.verdicts.items()]
        return [*self.overviews, *found, *self.papers, *self.comparisons]

    @property
    def state(self) -> str:
        """How much of the plan there is, and in which precision."""
        planned, missing = len(self.run.planned), len(self.run.missing)
        told = f" {missing} missing: the same command again computes just these." if missing else ""
        return f"{planned - missing} of {planned} cells finished.{told} {self.run.computed_in}".rstrip()

    def plain(self) -> str:
        """Everything for a terminal."""
        parts = [summary(model, found) for model, found in self.verdicts.items()]
        parts += map(text.plain, self.overviews)
        parts += filter(None, map(text.plain_verdicts, self.verdicts.values()))
        return "\n\n".join([*parts, *map(text.plain, [*self.papers, *self.comparisons])])


def write_report(contents: Contents | Run, folder: Path, formats: tuple[str, ...] = FORMATS) -> dict[str, Path]:
    """Write the report; returns the path of each format's main file."""
    from fairseq_icl.replication.report import html  # what tables alone can do without
    from fairseq_icl.replication.report.figures import all_figures

    contents = Contents.of(contents) if isinstance(contents, Run) else contents
    charts = list(all_figures(contents.run)) if {"html", "md", "tex"} & set(formats) else []
    written = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawings: list[Drawing] = []
        if {"md", "tex"} & set(formats):
            from fairseq_icl.replication.report.plotting import drawings as drawn  # matplotlib

            drawings = list(drawn(charts))
            options = {"format": "png", "dpi": DOTS_PER_INCH, "metadata": {"Software": None}}
            for drawing in drawings:
                # Into a new file that takes the place of the old one: a link that lies there is not followed.
                path = folder / "figures" / f"{text.file_name(drawing.name)}.png"
                write_atomically(path, partial(drawing.save, **options))
        makers = {
            "html": lambda: html.page(contents, charts),
            "md": lambda: markdown_page(contents, drawings),
            "tex": lambda: latex_page(contents.sheets, drawings),
            "csv": lambda: text.comma_separated([*contents.papers, *contents.comparisons, *contents.overviews]),
        }
        for name in formats:
            written[name] = folder / f"report.{name}"
            write_atomically(written[name], makers[name]())
        if "csv" in formats:
            _write_csv(contents, folder)
        if SEARCHED in contents.run.content["settings"]:
            write_model_files(contents.run, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another place with --to") from error
    return written


def _write_csv(contents: Contents, folder: Path) -> None:
    """All means, and the verdicts, beside the tables."""
    summary = contents.run.summary
    flat = summary.assign(keys=summary["keys"].map(lambda keys: " ".join(map(str, keys))))
    texts = flat.select_dtypes(exclude="number").columns
    flat[texts] = flat[texts].map(lambda cell: text.spreadsheet_safe(cell) if isinstance(cell, str) else cell)
    write_atomically(folder / "summary.csv", flat.to_csv(index=False))
    lines = [["model", "name", *text.VERDICT_HEAD]]
    for model, found in contents.verdicts.items():
        rows = text.verdict_sheet(model, found).lines[1:]
        lines += [[model, verdict.claim.name, *row] for verdict, row in zip(found, rows, strict=True)]
    write_atomically(folder / "verdicts.csv", text.csv_of(lines))


def markdown_page(contents: Contents, drawings: "list[Drawing]") -> str:
    """The report in Markdown, figures beside it."""
    lines = [f"# Report: {text.marked(', '.join(contents.run.experiments))}", ""]
    for model, found in contents.verdicts.items():
        lines += [text.marked(summary(model, found)), ""]
    lines += [contents.state, ""]
    lines += [line for warning in contents.run.warnings for line in (f"**{text.marked(warning)}**", "")]
    lines += [text.markdown(table) for table in contents.sheets]
    for drawing in drawings:
        title, caption = text.marked(drawing.title), text.marked(drawing.caption)
        lines += [f"### {title}", "", f"![{title}](figures/{text.file_name(drawing.name)}.png)", "", caption, ""]
    return "\n".join(lines)


def latex_page(tables: Sequence[text.Sheet | Table], drawings: "list[Drawing]") -> str:
    """Tables and figures to be \\input into a document that uses booktabs and graphicx."""
    lines = [r"% \usepackage{booktabs,graphicx}", *(text.latex(table) for table in tables)]
    for drawing in drawings:
        picture = rf"\includegraphics[width=\linewidth]{{figures/{text.file_name(drawing.name)}.png}}"
        caption = rf"\caption{{{text.escaped(f'{drawing.title}. {drawing.caption}')}}}"
        lines += [r"\begin{figure}", r"\centering", picture, caption, r"\end{figure}", ""]
    return "\n".join(lines)
