"""`fairseq-icl theory`: the papers' statements, executed: each with its error, and with one premise taken away.

First on random problems (dual form, perceptron, linear attention as weights, gradient descent by linear self-attention,
preconditioned, autoregressive and with kernels, implicit updates, momentum), then on a language model. Writes
theory.html and theory.md.
"""

import argparse
import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_icl.theory.statements import Record

TITLE = "In-context learning and gradient descent: the statements, executed"
INTRODUCTION = (
    "Every row is one statement, computed twice: as it is claimed, and with one premise removed. Exact statements must "
    "hold to 1e-10 in float64 and fail visibly without it; measured ones show a gap beside a larger one. A question "
    "claims nothing: its two numbers are the answer."
)
HEADER = ("statement", "source", "what was computed", "number", "premise removed", "number then", "kind", "holds")
HERE = Path(__file__).parents[1] / "theory"  # has page.css, and layer_causal.png of examples/layer_causal_drawing.py
BY_LAYER = "The model looked at, layer by layer, at the last token of the queries; means over heads and queries."
DRAWN = "Vanilla descent has one loss at the top; layer-causal descent has one at every layer and cuts gradients."


def main(argv: list[str]) -> int:
    """Entry of the command; exit code 1 if a statement does not hold."""
    parser = argparse.ArgumentParser(
        prog="fairseq-icl theory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="demo", help="a fairseq checkpoint or Hugging Face folder; demo (default): the shipped one"
    )
    parser.add_argument("--dataset", default="demo_sentiment", help="whose demonstrations and queries the model sees")
    parser.add_argument("--data", type=Path, help="folder with the dataset's files (default: the shipped one)")
    parser.add_argument("--demonstrations", type=int, default=32, metavar="K", help="in the prompt (default: 32)")
    parser.add_argument("--queries", type=int, default=20, metavar="N", help="validation examples (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: 1)")
    parser.add_argument("--no-training", action="store_true", help="leave out what needs a trained model: seconds")
    parser.add_argument("--to", type=Path, default=Path("theory"), help="folder for the pages (default: theory)")
    arguments = parser.parse_args(argv)
    from fairseq_icl import api
    from fairseq_icl.errors import UserError
    from fairseq_icl.files import write_atomically
    from fairseq_icl.theory.descent import run_descent  # which adds to the exact statements
    from fairseq_icl.theory.on_decoder import run_on_decoder
    from fairseq_icl.theory.statements import run_exact
    from fairseq_icl.theory.trained import run_trained

    model = api.load_model(arguments.model, device="cpu")
    of_prompts = {"k": arguments.demonstrations, "seed": arguments.seed, "limit": arguments.queries}
    prompts = api.build_prompts(model, arguments.dataset, data=arguments.data, **of_prompts)
    ends = [end + 1 for _, end in prompts.context_spans]
    if not ends:
        raise UserError(f"--demonstrations {arguments.demonstrations}: the prompt has none; give at least 1 that fits")
    records = run_exact(arguments.seed)
    records += [] if arguments.no_training else run_trained(arguments.seed) + run_descent(arguments.seed)
    sizes = [*(size for size in (1, 2, 4, 8, 16, 32) if size < len(ends)), len(ends)]
    contexts = [prompts.context[: ends[size - 1]] for size in sizes]
    queries = [query.inputs[0] for query in prompts.queries]
    records += run_on_decoder(model.lm.decoder.double(), prompts.start, contexts, queries)
    subject = (
        f"Model of the last rows: {arguments.model}, dataset {arguments.dataset}, {arguments.demonstrations} "
        f"demonstrations, {arguments.queries} queries, seed {arguments.seed}."
    )
    text = render_markdown(records, subject)
    write_atomically(arguments.to / "theory.html", render_html(records, subject))
    write_atomically(arguments.to / "theory.md", text)
    print(text)
    claims = [record for record in records if record.kind != "question"]
    failed = [record.statement for record in claims if not record.holds]
    print(f"{len(claims) - len(failed)} of {len(claims)} statements hold; pages: {arguments.to / 'theory.html'}")
    return 1 if failed else 0


def _cells(record: "Record") -> list[str]:
    value, broken = (f"{x:.1e}" if x < 1e-3 or x >= 1e4 else f"{x:.4f}" for x in (record.value, record.broken))
    holds = "-" if record.kind == "question" else "yes" if record.holds else "NO"
    return [record.statement, record.source, record.computed, value, record.premise, broken, record.kind, holds]


def render_markdown(records: Sequence["Record"], subject: str = "") -> str:
    """A title, an introduction, on request a line about the model that was looked at, and one table."""

    def plain(text: str) -> str:  # a bar would end a cell, a line break the row, and < might open a tag
        text = " ".join(escape(text, quote=False).split())
        return "".join("\\" + mark if mark in "\\|*_`[" else mark for mark in text)

    rows = [HEADER, ["---"] * len(HEADER), *([plain(cell) for cell in _cells(record)] for record in records)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return "\n\n".join(filter(None, [f"# {TITLE}", INTRODUCTION, plain(subject), table])) + "\n"


def render_html(records: Sequence["Record"], subject: str = "") -> str:
    """One HTML page that needs no other file: the statements, what they have by layer, and layer-causal descent drawn.

    `subject` is a line about the model that was looked at.
    """
    rows = []
    for record in records:
        cells = _cells(record)
        kinds = ["text", "text", "text", "number", "text", "number", "text", cells[-1].lower()]
        named = zip(HEADER, kinds, cells, strict=True)
        rows.append("".join(f'<td data-name="{name}" class="{kind}">{escape(cell)}</td>' for name, kind, cell in named))
    series = {title: values for record in records for title, values in record.per_layer.items()}
    figures = [("Measures by layer", BY_LAYER, drawn_by_layer(series))] if series else []
    figures += [("Vanilla and layer-causal gradient descent", DRAWN, (HERE / "layer_causal.png").read_bytes())]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(TITLE)}</title>'
        f"<style>{(HERE / 'page.css').read_text()}</style></head><body><h1>{escape(TITLE)}</h1>"
        f"<p>{escape(INTRODUCTION)}</p><p>{escape(subject)}</p>\n"
        f'<div class="wide"><table><thead><tr>{"".join(f"<th>{name}</th>" for name in HEADER)}</tr></thead><tbody>\n'
        + "\n".join(f"<tr>{row}</tr>" for row in rows)
        + "\n</tbody></table></div>"
        + "".join(
            f'<figure><img src="data:image/png;base64,{base64.b64encode(picture).decode("ascii")}" alt="{title}">'
            f"<figcaption>{caption}</figcaption></figure>"
            for title, caption, picture in figures
        )
        + "</body></html>\n"
    )


def drawn_by_layer(series: Mapping[str, Sequence[float]]) -> bytes:
    """One small panel for each series of numbers by layer, three in a row, as PNG."""
    from matplotlib.ticker import MaxNLocator

    from fairseq_icl.results.drawing import COLOURS, Drawing, panels

    figure, axes = panels(list(series))
    for ax, values in zip(axes, series.values(), strict=True):
        ax.plot(range(1, len(values) + 1), values, color=COLOURS[0], marker="o", markersize=3, linewidth=1.2)
        ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        ax.set_xlabel("layer")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if max(values) > 100 * min(values) > 0:
            ax.set_yscale("log")
    picture = io.BytesIO()
    figure.set_layout_engine("constrained")
    Drawing("", "", "", figure).save(picture, format="png", dpi=110)
    return picture.getvalue()
