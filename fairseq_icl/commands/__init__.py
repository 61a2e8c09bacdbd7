"""The console command `fairseq-icl`: one word, one tool."""

import importlib
import signal
import sys
from types import FrameType

from fairseq_icl import __version__
from fairseq_icl.errors import end_quietly, exit_with, find_user_error

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


class Terminated(BaseException):
    """SIGTERM has come: like Ctrl-C it undoes on its way out what is half done."""


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise Terminated


def main(argv: list[str] | None = None) -> int:
    """Run the command named first; returns its exit code.

    Ctrl-C ends with one line and code 130, SIGTERM with 143; whoever reads our output may stop reading (141).
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        end_quietly("interrupted; what is finished is kept", 128 + signal.SIGINT)
    except Terminated:
        end_quietly("terminated; what is finished is kept", 128 + signal.SIGTERM)
    except BrokenPipeError:
        end_quietly("", 128 + signal.SIGPIPE)
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # a library answered it with an error of its own
            end_quietly("interrupted; what is finished is kept", 128 + signal.SIGINT)
        message = find_user_error(error)
        if message is None:
            raise
        exit_with(message)


def run(words: list[str]) -> int:
    """Find the command and run it."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        exit_with(f"fairseq-icl {words[0]}: no such command; choose from {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[words[0]][0])
    code: int = module.main(words[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
