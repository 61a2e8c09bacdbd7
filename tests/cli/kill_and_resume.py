"""Run a command, kill it with SIGKILL once a number of cells is finished, and start it again: for each number in turn.

    python kill_and_resume.py RESULTS MOMENTS fairseq-icl-arguments...

Prints, for every start, the finished cells with their times as JSON. Each start is a process of its own, forked before
any work is done, so that fairseq is imported once and not once a start.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from fairseq_icl.commands import main, replicate  # noqa: F401  imported before the forks


def finished(folder: Path) -> dict[str, int]:
    """Key -> time of every finished cell."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cells").glob("[!.]*")}


def start(arguments: list[str]) -> int:
    """Process id of a new process that runs the command."""
    process = os.fork()
    if process == 0:
        os._exit(main(arguments))
    return process


def kill_when(process: int, folder: Path, cells: int, delay: float) -> None:
    """Wait until `cells` cells are finished and `delay` seconds more, then kill."""
    while len(finished(folder)) < cells:
        if os.waitpid(process, os.WNOHANG) != (0, 0):
            sys.exit("the command ended before it could be killed")
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


if __name__ == "__main__":
    folder, moments, arguments = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    for cells, delay in moments:
        kill_when(start(arguments), folder, cells, delay)
        print(json.dumps(finished(folder)), flush=True)
    _, status = os.waitpid(start(arguments), 0)
    print(json.dumps(finished(folder)), flush=True)
    sys.exit(os.waitstatus_to_exitcode(status))
