"""The console command `fairseq-icl`: one word, one tool."""

import importlib
import sys

from fairseq_icl import __version__
from fairseq_icl.errors import exit_with, find_user_error

COMMANDS = {
    "demo": ("fairseq_icl.commands.demo", "run the whole instrument on the small model that ships with it"),
    "doctor": ("fairseq_icl.commands.doctor", "say what is in a model folder, and what is missing"),
    "datasets": ("fairseq_icl.commands.datasets", "list the datasets, show examples and statistics"),
    "score": ("fairseq_icl.commands.score", "score ZSL, ICL and FT side by side (fairseq-validate with our defaults)"),
    "replicate": ("fairseq_icl.commands.replicate", "rerun a paper's experiments, or your own"),
    "report": ("fairseq_icl.commands.report", "tables and figures of a run beside the published numbers"),
    "theory": ("fairseq_icl.commands.theory", "the papers' statements, executed: each with its error and its limits"),
    "bench": ("fairseq_icl.commands.bench", "measure speed and memory against the authors' way"),
}


def usage() -> str:
    """What `fairseq-icl --help` prints."""
    lines = [f"  {name:<10} {help_text}" for name, (_, help_text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fairseq-icl COMMAND [OPTIONS]",
            "",
            "Does a model learn in context the way gradient descent would teach it?",
            "",
            *lines,
            "",
            "fairseq-icl COMMAND --help explains each. Fine-tune with fairseq-train --user-dir fairseq_icl.",
            f"version {__version__}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command named first; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        exit_with(f"fairseq-icl {words[0]}: no such command; choose from {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[words[0]][0])
    try:
        code: int = module.main(words[1:])
        return code
    except Exception as error:
        message = find_user_error(error)
        if message is None:
            raise
        exit_with(message)


if __name__ == "__main__":
    sys.exit(main())
