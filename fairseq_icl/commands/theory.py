"""`fairseq-icl theory`: the papers' statements, executed: each with its error, and with one premise taken away.

First on random problems (dual form, perceptron, linear attention as weights, gradient descent by linear self-attention,
implicit updates, momentum), then on a language model. Writes theory.html and theory.md.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_icl.theory.statements import Record


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
    from fairseq_icl.files import write_atomically
    from fairseq_icl.theory.page import render_html, render_markdown, run_statements

    records = run_statements(arguments.seed, training=not arguments.no_training) + _on_model(arguments)
    subject = (
        f"Model of the last rows: {arguments.model}, dataset {arguments.dataset}, {arguments.demonstrations} "
        f"demonstrations, {arguments.queries} queries, seed {arguments.seed}."
    )
    text = render_markdown(records, subject)
    write_atomically(arguments.to / "theory.html", render_html(records, subject))
    write_atomically(arguments.to / "theory.md", text)
    print(text)
    claims = [record for record in records if record.is_claim]
    failed = [record.statement for record in claims if not record.holds]
    print(f"{len(claims) - len(failed)} of {len(claims)} statements hold; pages: {arguments.to / 'theory.html'}")
    return 1 if failed else 0


def _on_model(arguments: argparse.Namespace) -> list["Record"]:
    """The statements that can be checked on a language model, with its own prompts."""
    from fairseq_icl import api
    from fairseq_icl.theory.decoder_statements import run_on_decoder

    model = api.load_model(arguments.model, device="cpu")
    prompts = api.build_prompts(
        model,
        arguments.dataset,
        data=arguments.data,
        k=arguments.demonstrations,
        seed=arguments.seed,
        limit=arguments.queries,
    )
    ends = [prompts.context_spans[place][1] + 1 for place in range(len(prompts.context_spans))]
    chosen = sorted({ends[min(len(ends), size) - 1] for size in (1, 2, 4, 8, 16, 32, len(ends))})
    contexts = [prompts.context[:end] for end in chosen]
    queries = [query.inputs[0] for query in prompts.queries]
    return run_on_decoder(model.lm.decoder.double(), prompts.start, contexts, queries)
