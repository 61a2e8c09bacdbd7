"""Errors that a user can cause and mend: shown as one line, without a traceback, with exit code 2."""

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

EXIT_CODE = 2


class UserError(Exception):
    """A problem in what the user gave us. The message names the place (file:line or setting) and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # what a file or a setting holds may have several


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Errors raised inside get the file's name in front, unless they name it already."""
    try:
        yield
    except UserError as error:
        if place in str(error):
            raise
        raise UserError(f"{place}: {error}") from error


def find_user_error(error: BaseException | None) -> str | None:
    """The message of the UserError behind `error`, or of a GPU whose memory is full; else None.

    fairseq wraps exceptions (`raise Exception("Cannot load ...")`) and torch.multiprocessing passes a child's
    exception on as text, so the chain and, last, the text are searched.
    """
    seen = error
    while seen is not None:
        if isinstance(seen, UserError):
            return str(seen)
        if type(seen).__name__ == "OutOfMemoryError":  # torch's
            return out_of_memory(seen)
        seen = seen.__cause__ or seen.__context__
    if type(error).__name__ == "ProcessRaisedException":
        in_child = re.search(r"^fairseq_icl\.errors\.UserError: (.*)$", str(error), re.MULTILINE)
        return in_child and in_child.group(1)
    return None


def out_of_memory(error: BaseException) -> str:
    """One line for torch's error of several sentences."""
    fewer = "observe fewer rows (limit=N) or demonstrations, take precision=fp16 or bf16"
    return f"{str(error).split('. ')[0]}; {fewer}, or fewer workers for each GPU"


def exit_with(message: str, code: int = EXIT_CODE) -> NoReturn:
    """Print the one line and end the process at once. For commands only, never for a caller of the Python API.

    `os._exit` and not `sys.exit`: fairseq's iterators leave threads behind whose destruction at a regular exit
    sometimes aborts the process ("terminate called without an active exception"), which would hide the exit code.
    """
    end_quietly(f"error: {' '.join(message.split())}", code)


def end_quietly(line: str, code: int) -> NoReturn:
    """End the process at once with a last line on stderr, if there is one and somebody reads it."""
    for child in multiprocessing.active_children():
        child.kill()  # a data loader's worker would complain of the broken connection, after our line
    with suppress(OSError, ValueError):  # nobody reads stdout any more
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, end="\n" if line else "", flush=True)
    os._exit(code)
