"""What a benchmark found, as text and as a page of docs/ with a plot."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import sweeps
from fairseq_icl.files import with_part
from fairseq_icl.results import text_table

MEBI = 2**20


@dataclass(frozen=True)
class BenchRow:
    """One thing measured both ways. Seconds, bytes of peak memory beside the weights, bytes on disk."""

    what: str
    ours: float | None = None
    authors: float | None = None
    ours_memory: int | None = None
    authors_memory: int | None = None
    ours_disk: float | None = None
    authors_disk: float | None = None
    gemm_share: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster our way is."""
        return self.authors / self.ours if self.ours and self.authors else None

    def cells(self) -> list[str]:
        """The row as text, in the order of `HEADER`."""
        return [
            self.what,
            _text(self.ours, "{:.3f}"),
            _text(self.authors, "{:.3f}"),
            _text(self.ratio, "{:.1f}"),
            _text(self.ours_memory and self.ours_memory / MEBI, "{:,.0f}"),
            _text(self.authors_memory and self.authors_memory / MEBI, "{:,.0f}"),
            _text(self.ours_disk and self.ours_disk / 1000, "{:,.1f}"),
            _text(self.authors_disk and self.authors_disk / 1000, "{:,.1f}"),
            _text(self.gemm_share and 100 * self.gemm_share, "{:.0f} %"),
        ]


HEADER = ["", "ours s", "authors s", "times faster", "ours MiB", "authors MiB", "ours kB", "authors kB", "of GEMM rate"]
PAGE = "benchmark.md"
PART = "<!-- "
"""What the marks of all parts begin with; before the first of them is the preamble."""
PREAMBLE = """\
# Benchmark

`python -m benchmarks --shape SHAPE --peers --write-docs` makes a shape's part of this page anew, `--shape all` every
part. "Ours" is `observe`, `fine_tuned` and `compare`, which every command of this plugin runs. "Authors" is the
protocol of the two papers' code, rewritten here from docs/protocol.md (benchmarks/authors.py): every query
alone behind the whole prompt, whole attention maps, all logits, gradients of all weights, records as JSON lines;
tests/benchmarks checks that it gives the numbers their code gave.

With `--peers` the same models run in other libraries (benchmarks/peers.py), in rows that name them: their
seconds and memory stand in the authors' columns. transformers 5.22, TransformerLens 4.3 and lm-evaluation-harness
0.4.13 install beside the versions of constraints.txt (extra `[bench]`); one that is not installed is named and left
out. Everybody gets the same token ids and has to give the same numbers to 1e-5: options' scores and, but for
lm-evaluation-harness, every layer's attention output at one token. nnsight was not measured: TransformerLens stands
for libraries that put hooks on the models of transformers.

"""
EXPLANATION = (
    "s: seconds, the best of several runs in turn. MiB: peak memory above the weights, in a process of its own. "
    "kB: written to disk per example. GEMM rate: bare matrix products with as many rows, measured in the same run."
)


@dataclass(frozen=True)
class Limit:
    """A figure that is to stay on one side of a bound."""

    what: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Whether it did."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """One line of text."""
        wanted = f"{'at least' if self.at_least else 'at most'} {self.bound:g}"
        return f"{'ok    ' if self.kept else 'MISSED'}  {self.what}: {self.value:.3g} ({wanted})"


@dataclass
class BenchFindings:
    """All that one run of the benchmark found."""

    shape: str
    title: str
    rows: list[BenchRow] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    points: list[sweeps.SweepPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def expect_faster(self, row: BenchRow, times: float, what: str) -> None:
        """A limit: in `row` our way is to be so many times faster. None where the authors' way did not run."""
        if row.ratio is not None:
            self.limits.append(Limit(what, row.ratio, times, at_least=True))

    def text(self) -> str:
        """Everything, for the terminal."""
        parts = [self.title]
        if self.rows:
            parts += [text_table([HEADER, *(row.cells() for row in self.rows)], names=1), EXPLANATION]
        if self.points:
            parts += [text_table(sweeps.table(self.points), names=1), sweeps.EXPLANATION]
        parts += ["\n".join(self.notes), "\n".join(limit.line() for limit in self.limits)]
        return "\n\n".join(part for part in parts if part)

    def markdown(self, command: str) -> str:
        """Everything, as the part of a page that names the command it was made by."""
        parts = [f"## {self.shape}", f"Made by `{command}`.", self.title]
        if self.rows:
            parts += [_markdown([HEADER, *(row.cells() for row in self.rows)]), EXPLANATION]
        if self.points:
            parts += [f"![cost per query](benchmark_{self.shape}.png)", _markdown(sweeps.table(self.points))]
            parts.append(sweeps.EXPLANATION)
        parts += ["\n".join(f"- {note}" for note in self.notes)]
        parts += ["\n".join(f"- {limit.line()}" for limit in self.limits)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, folder: Path, command: str) -> None:
        """The shape's part of benchmark.md and, if there was a sweep, benchmark_SHAPE.png."""
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / PAGE
        parts = page.read_text() if page.is_file() else ""
        before = PREAMBLE + parts[parts.find(PART) :] if PART in parts else PREAMBLE
        start, end = f"<!-- {self.shape} -->\n", f"<!-- end of {self.shape} -->\n"
        page.write_text(with_part(before, start, end, self.markdown(command)))
        if self.points:
            sweeps.plot(self.points, folder / f"benchmark_{self.shape}.png")


def _text(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)


def _markdown(table: Sequence[Sequence[str]]) -> str:
    header, *rows = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([header, "|---" + "|--:" * (len(table[0]) - 1) + "|", *rows])
