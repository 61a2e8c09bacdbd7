"""The console command `fairseq-icl`: one word, one tool."""

import importlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from fairseq_icl import __version__
from fairseq_icl.commands.arguments import HELP, SLOW
from fairseq_icl.errors import end_quietly, exit_with, find_user_error

COMMANDS = {
    "demo": ("fairseq_icl.commands.demo", "run the whole instrument on the small model that ships with it"),
    "doctor": ("fairseq_icl.commands.doctor", "say what is in a model folder, and what is missing"),
    "datasets": ("fairseq_icl.commands.datasets", "list the datasets, show examples and statistics"),
    "fetch": (
        "fairseq_icl.commands.fetch",
        "bring datasets and models from the Hugging Face hub, or fairseq's archives",
    ),
    "score": ("fairseq_icl.commands.score", "score ZSL, ICL and FT side by side (fairseq-validate with our defaults)"),
    "replicate": ("fairseq_icl.commands.replicate", "rerun a paper's experiments, or your own"),
    "report": ("fairseq_icl.commands.report", "tables and figures of a run beside the published numbers"),
    "theory": ("fairseq_icl.commands.theory", "the papers' statements, executed: each with its error and its limits"),
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


_received: list[int] = []
"""The signal that is ending the process."""
AGAIN_AFTER = 0.05
"""Seconds until a signal that got lost is sent again."""
LAST_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def _on_signal(number: int, frame: FrameType | None) -> None:
    """The first signal unwinds what is being done; a second one does not wait for that."""
    if _received:
        os._exit(128 + number)
    _received.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _on_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """A signal that came while Python ran a callback, which cannot raise: it comes once more, a moment later."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
        sys.__unraisablehook__(unraisable)
        return
    number = _received.pop()
    threading.Timer(AGAIN_AFTER, os.kill, (os.getpid(), number)).start()


def main(argv: list[str] | None = None) -> int:
    """Run the command named first; returns its exit code.

    Ctrl-C ends with one line and code 130, SIGTERM with 143; whoever reads our output may stop reading (141).
    """
    _received.clear()
    before = {number: signal.signal(number, _on_signal) for number in LAST_WORDS}
    hook, sys.unraisablehook = sys.unraisablehook, _on_unraisable
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, Terminated):
        end_by_signal()
    except Exception as error:
        if _received:  # a library answered the signal with an error of its own
            end_by_signal()
        if isinstance(error, BrokenPipeError):
            end_quietly("", 128 + signal.SIGPIPE)
        message = find_user_error(error)
        if message is None:
            raise
        exit_with(message)
    finally:  # for those who call this from Python
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def end_by_signal() -> NoReturn:
    """One line, and the exit code that shells know."""
    number = _received[0] if _received else int(signal.SIGINT)
    end_quietly(f"{LAST_WORDS[signal.Signals(number)]}; what is finished is kept", 128 + number)


def run(words: list[str]) -> int:
    """Find the command and run it."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] == "bench":
        exit_with("fairseq-icl bench has left the package: run python -m benchmarks in a clone of the repository")
    if words[0] not in COMMANDS:
        exit_with(f"fairseq-icl {words[0]}: no such command; choose from {', '.join(COMMANDS)}")
    if words[0] in SLOW and not {*HELP}.isdisjoint(words):
        SLOW[words[0]]().print_help()
        return 0
    module = importlib.import_module(COMMANDS[words[0]][0])
    code: int = module.main(words[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
