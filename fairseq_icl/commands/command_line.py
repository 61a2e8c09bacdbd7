"""The console command `fairseq-icl`: one word, one tool; and what the tools that are slow to import accept.

Their help is there at once.
"""

import argparse
import importlib
import os
import re
import signal
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fairseq_icl import __version__
from fairseq_icl.errors import end_quietly, exit_with, find_user_error
from fairseq_icl.files import PACKAGE
from fairseq_icl.settings import SETTINGS, Setting

COMMANDS = {
    "demo": "run the whole instrument on the small model that ships with it",
    "doctor": "say what is in a model folder, and what is missing",
    "datasets": "list the datasets, show examples and statistics",
    "fetch": "bring datasets and models from the Hugging Face hub, or fairseq's archives",
    "score": "score ZSL, ICL and FT side by side (fairseq-validate with our defaults)",
    "replicate": "rerun a paper's experiments, or your own",
    "report": "tables and figures of a run beside the published numbers",
    "theory": "the papers' statements, executed: each with its error and its limits",
}
"""The commands, each a module of this folder, and what they do."""


def usage() -> str:
    """What `fairseq-icl --help` prints."""
    commands = "\n".join(f"  {name:<10} {help_text}" for name, help_text in COMMANDS.items())
    return f"""usage: fairseq-icl COMMAND [OPTIONS]

Does a model learn in context the way gradient descent would teach it?

{commands}

fairseq-icl COMMAND --help explains each. Fine-tune with fairseq-train --user-dir fairseq_icl.
version {__version__}"""


class Terminated(BaseException):
    """SIGTERM has come: like Ctrl-C it undoes on its way out what is half done."""


_received: list[int] = []  # the signal that is ending the process
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
    threading.Timer(0.05, os.kill, (os.getpid(), _received.pop())).start()


def main(argv: list[str] | None = None) -> int:
    """Run the command named first; returns its exit code.

    Ctrl-C ends with one line and code 130, SIGTERM with 143; whoever reads our output may stop reading (141).
    """
    # How often an OpenMP thread looks for work before it sleeps: by default some milliseconds, in which others cannot
    # run. Beside busy processes this is most of the time (docs/faq.md). Read when torch is loaded, which it is not yet.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
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
    if words[0] in SLOW and not {"-h", "--help"}.isdisjoint(words):
        SLOW[words[0]]().print_help()
        return 0
    code: int = importlib.import_module(f"fairseq_icl.commands.{words[0]}").main(words[1:])
    return code


FOLDER = PACKAGE / "config"
KEY = re.compile(r"(?P<name>[a-z_]+): *(?P<default>[^#]*?) *(# (?P<text>.*))?")
REPLICATE = """Rerun a paper, or a part of it; what is finished stays, what is missing is computed.

    fairseq-icl replicate experiment=deutch2024 model=1.3b data=DATA                       the whole paper
    fairseq-icl replicate experiment=deutch2024 data=DATA dataset=sst2,mr method=lcgd      a part of it
    fairseq-icl replicate experiment=deutch2024 data=DATA k=1,2,4,8 lr=0.001,0.01          every combination of values
    fairseq-icl replicate experiment=audit data=DATA model=PATH/model.pt limit=100         another model, fewer examples
    fairseq-icl replicate experiment=deutch2024 data=hub model=hub:facebook/opt-125m       fetched, kept in the cache
    fairseq-icl replicate experiment=dai2023 data=DATA --dry-run                           the plan and what it costs
    fairseq-icl replicate experiment=dai2023 data=DATA workers=4                           four processes share the work
    fairseq-icl replicate experiment=dai2023 data=DATA cluster=slurm cluster.queue=gpu     jobs of a cluster do

Every key below can be overridden, and every setting takes a list of values. Stop it whenever you like and give the same
command again: it goes on where it was.
"""
SCORE = """`fairseq-icl score`: fairseq-validate with this plugin's task and criterion filled in.

    fairseq-icl score DATA --path FINETUNED.pt --results RESULTS.parquet                   ZSL, ICL and FT side by side
    fairseq-icl score DATA --path MODEL.pt --dataset sst2 --bpe gpt2                       ZSL and ICL of a base model

Every flag of fairseq-validate works (fairseq-validate --help); those of the task and the criterion are:
"""


RawParser = partial(argparse.ArgumentParser, formatter_class=argparse.RawDescriptionHelpFormatter)


def flags_of_replicate() -> argparse.ArgumentParser:
    """The flags of `replicate`."""
    parser = RawParser("fairseq-icl replicate", description=REPLICATE)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="the keys and settings below")
    parser.add_argument("--dry-run", action="store_true", help="print the plan with an estimate of time and memory")
    parser.add_argument("--quiet", action="store_true", help="no progress, no tables")
    return parser


def replicate() -> argparse.ArgumentParser:
    """The same, with all keys and settings in its help."""
    parser = flags_of_replicate()
    names = {group: sorted(p.stem for p in (FOLDER / group).glob("*.yaml")) for group in ("experiment", "model")}
    groups = [f"{group}: {', '.join(found)}" for group, found in names.items()]
    groups[1] += "; or a path of a checkpoint, a Hugging Face folder or a YAML file, or hub:OWNER/NAME"
    from_paper = dict.fromkeys(("num_demonstrations", "seed", "permutation", "lr"), "as the paper says")
    settings = [_described(known, from_paper.get(name, "")) for name, known in SETTINGS.items()]
    settings.insert(0, "k: the same as num_demonstrations")
    parser.epilog = "\n\n".join([_lines("keys", [*groups, *_keys()]), _lines("settings", settings)])
    return parser


def doctor(description: str | None, text: str) -> argparse.ArgumentParser:
    """The flags of `doctor`; `text` is the one that is tokenized."""
    parser = argparse.ArgumentParser(prog="fairseq-icl doctor", description=description)
    what = "folder with model.pt, dict.txt and the tokenizer's files; a Hugging Face folder; demo: the shipped model"
    parser.add_argument("folder", type=Path, nargs="?", help=what)
    parser.add_argument("--data", type=Path, metavar="DATA", help="look at the datasets in this folder (too)")
    parser.add_argument("--text", default=text, help="text for the tokenizer's round trip and the continuation")
    parser.add_argument("--no-continuation", action="store_true", help="do not load the weights (a large model)")
    of_reference = "compare a Hugging Face folder with transformers' own code"
    parser.add_argument("--reference", action="store_true", help=of_reference)
    return parser


def score() -> argparse.ArgumentParser:
    """The flags of `score` that fairseq-validate does not have, for its help."""
    usage = "fairseq-icl score DATA --path CHECKPOINT [FLAGS]"
    parser = RawParser("fairseq-icl score", usage=usage, description=SCORE, add_help=False)
    known = [known for known in SETTINGS.values() if known.is_flag_of("task", "icl_similarity")]
    parser.epilog = _lines("flags", [f"--{_described(one).replace('_', '-', one.name.count('_'))}" for one in known])
    return parser


SLOW = {
    "replicate": replicate,
    "doctor": lambda: doctor("What is in a model folder, whether it fits together, and what to do if not.", "..."),
    "score": score,
}
"""Commands whose help is printed without importing them."""


def _described(known: Setting, default: str = "") -> str:
    """One setting: help, choices, default."""
    choices = f"; one of {', '.join(known.choices)}" if known.choices else ""
    if known.paper is not None:
        default = f"as reading says; authors: {known.default}, paper: {known.paper}"
    default = default or ("" if known.default is None else str(known.default))
    return f"{known.name}: {known.help}{choices}" + (f" (default: {default})" if default else "")


def _keys() -> list[str]:
    """The keys of replicate.yaml with what its comments say of them and their defaults."""
    keys: dict[str, tuple[str, str]] = {}
    name = section = ""
    text = (FOLDER / "replicate.yaml").read_text(encoding="utf-8").partition("\nname:")[2].partition("\nhydra:")[0]
    for line in filter(str.strip, f"name:{text}".splitlines()):
        found = KEY.fullmatch(line.strip())
        if found is None:  # the comment goes on
            keys[name] = (f"{keys[name][0]} {line.strip(' #')}", keys[name][1])
            continue
        section = section if line.startswith(" ") else found["name"] + "."
        name = section + found["name"] if line.startswith(" ") else found["name"].replace("datasets", "dataset")
        keys[name] = (found["text"], found["default"])
    endings = {"???": "; has to be given", "": "", "null": ""}
    return [f"{n}: {text}{endings.get(default, f' (default: {default})')}" for n, (text, default) in keys.items()]


def _lines(title: str, entries: list[str]) -> str:
    wrapped = [textwrap.fill(entry, 118, initial_indent="  ", subsequent_indent="      ") for entry in entries]
    return "\n".join([f"{title}:", *wrapped])
