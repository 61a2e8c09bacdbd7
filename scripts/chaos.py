"""Chaos: runs on one results folder are killed, stopped, interrupted, given full disks, damaged files and junk.

    python scripts/chaos.py --events 1000          until so many events have happened
    python scripts/chaos.py --minutes 10           or for so long

A quiet run comes first. Then rounds: `replicate` starts, alone or with two workers, something bad happens to one of its
processes or to the folder, what ended is started again, until all cells are finished. After every round, a last run in
peace must end well, and the folder must hold exactly the tables of the quiet run, no leftovers and no traceback.
Prints what happened as JSON; exit code 0 if all that holds.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import dask
import psutil

from fairseq_icl.commands import main as fairseq_icl
from fairseq_icl.commands import replicate  # noqa: F401 - imported before the forks
from fairseq_icl.results import read_results

RUN = ["replicate", "experiment=audit", "model=demo", "dataset=demo_sentiment", "seed=1", "num_demonstrations=6"]
RUN += ["limit=8", "method=gd,lcgd", "init=pretrained", "quiet=true"]
ENDS = {0, 2, 130, 141, 143, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
KINDS = [
    "kill",
    "kill",
    "kill worker",
    "stop",
    "stop",
    "interrupt",
    "terminate",
    "full disk",
    "damage",
    "damage",
    "junk",
]
KINDS += ["second command"]
ROUND_SECONDS = 90
"""After this a round is left in peace, so that it can end."""
FROZEN_AFTER = "20s"
"""Dask gives up a worker that is silent for so long."""


class Chaos:
    """One folder, the command that works on it, and what is done to them."""

    def __init__(self, folder: Path, workers: int, dice: random.Random, events: Counter[str], pace: float = 0.0):
        self.folder, self.workers, self.dice, self.events, self.pace = folder, workers, dice, events, pace
        self.logs = folder.with_name(f"{folder.name}-logs")
        self.logs.mkdir()
        self.command: int | None = None
        self.stopped: dict[int, float] = {}
        self.pipes: dict[int, int | None] = {}
        self.problems: list[str] = []

    def start(self, limit: int | None = None) -> int:
        """A new command; `limit` is the size of the largest file it can write."""
        log = self.logs / f"{sum(1 for _ in self.logs.iterdir())}.log"
        # The limit holds for a log as well, but not for a pipe, which is large enough for what a command says.
        reading, writing = (None, os.open(log, os.O_WRONLY | os.O_CREAT)) if limit is None else os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(writing, 1)
                os.dup2(writing, 2)
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                with dask.config.set({"distributed.scheduler.worker-ttl": FROZEN_AFTER}):
                    code = fairseq_icl([*RUN, f"out={self.folder}", f"workers={self.workers}"])
            except KeyboardInterrupt:
                code = 130
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        os.close(writing)
        self.pipes[pid] = reading
        return pid

    def wait(self, pid: int, *, block: bool = True) -> int | None:
        """The exit code of a command that ended, None if it has not; one that is not foreseen is a problem."""
        done, status = os.waitpid(pid, 0 if block else os.WNOHANG)
        if not done:
            return None
        code, pipe = os.waitstatus_to_exitcode(status), self.pipes.pop(pid)
        said = ""
        if pipe is not None:
            os.set_blocking(pipe, False)  # a worker that outlives the command has it open too
            with suppress(BlockingIOError):
                said = os.read(pipe, 1 << 16).decode(errors="replace")
            os.close(pipe)
        if code not in ENDS or "Traceback" in said:
            self.problems.append(f"a command ended with {code} {said[-2000:]}".strip())
        return code

    def reap(self) -> None:
        """Notice whether the command ended; wake those that were stopped long enough."""
        if self.command is not None and self.wait(self.command, block=False) is not None:
            self.command = None
        for pid, until in list(self.stopped.items()):
            if time.monotonic() > until:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGCONT)
                del self.stopped[pid]

    def processes(self) -> list[int]:
        """The workers of the command."""
        try:
            return (
                [child.pid for child in psutil.Process(self.command).children(recursive=True)] if self.command else []
            )
        except psutil.NoSuchProcess:
            return []

    def event(self) -> None:
        """Something bad happens."""
        kind = self.dice.choice(KINDS)
        workers = self.processes()
        if kind == "second command":
            if self.command is None or self.wait(self.start()) not in (0, 2):
                return
        elif kind == "full disk":
            if self.command is not None:
                os.kill(self.command, signal.SIGKILL)
                self.wait(self.command)
            self.command = self.start(self.dice.choice([512, 4096, 16384, 65536]))
        elif kind == "damage":
            if not self.damage():
                return
        elif kind == "junk":
            self.junk()
        elif self.command is None or (kind == "kill worker" and not workers):
            return
        elif kind == "stop":
            victim = self.dice.choice([self.command, *workers])
            os.kill(victim, signal.SIGSTOP)
            self.stopped[victim] = time.monotonic() + self.dice.uniform(0.05, 1.0)
        else:
            numbers = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
            victim = self.dice.choice(workers) if kind == "kill worker" else self.command
            if psutil.pid_exists(victim):
                os.kill(victim, numbers.get(kind, signal.SIGKILL))
        self.events[kind] += 1

    def damage(self) -> bool:
        """Truncate, alter or replace something under observations/, as a bad disk would; False if nothing is there."""
        kept = sorted(self.folder.glob("observations/[!.]*"))
        if not kept:
            return False
        place = self.dice.choice(kept)
        try:
            path = self.dice.choice(sorted(place.iterdir()))
            how = self.dice.choice(["truncate", "alter", "remove", "empty", "replace"])
            if how == "truncate":
                os.truncate(path, path.stat().st_size // 2)
            elif how == "alter":
                content = bytearray(path.read_bytes())
                content[self.dice.randrange(len(content))] ^= 0x55
                path.write_bytes(content)
            elif how == "remove":
                path.unlink()
            else:
                shutil.rmtree(place)
                place.mkdir() if how == "empty" else place.write_text("foreign")
        except (OSError, IndexError):  # the command was just removing it
            return False
        return True

    def junk(self) -> None:
        """Files that nobody of us wrote."""
        for folder in ("plans", "observations"):
            if (self.folder / folder).is_dir():
                name = f"junk{self.dice.randrange(3)}.json"
                (self.folder / folder / name).write_bytes(self.dice.randbytes(20))

    def round(self, cells: int, go_on: "Budget") -> None:
        """Disturb until all cells are finished, or the budget is spent; then let the work end in peace."""
        start = time.monotonic()
        while go_on() and time.monotonic() - start < ROUND_SECONDS and finished(self.folder) < cells:
            self.command = self.command or self.start()
            time.sleep(self.dice.uniform(0.02, self.pace))
            self.event()
            self.reap()
        while self.command is not None:
            self.stopped = dict.fromkeys(self.stopped, 0.0)
            self.reap()
            time.sleep(0.02)
        code = self.wait(self.start())
        if code != 0:
            self.problems.append(f"the last run, in peace, ended with {code}")

    def check(self, expected: dict[str, str]) -> list[str]:
        """What is wrong with the finished folder."""
        problems = [*self.problems]
        if tables(self.folder) != expected:
            problems.append("the tables are not those of the quiet run")
        for name in ("cells", "observations", "plans", "models"):
            problems += [f"left over: {path}" for path in (self.folder / name).glob(".*")]
        for log in self.logs.iterdir():
            if "Traceback" in log.read_text(errors="replace"):
                problems.append(f"a traceback in {log}")
        return problems


class Budget:
    """Minutes or events, whichever is spent first."""

    def __init__(self, minutes: float | None, limit: int | None, events: Counter[str]):
        self.end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
        self.limit, self.events = limit, events

    def __call__(self) -> bool:
        return time.monotonic() < self.end and (self.limit is None or self.events.total() < self.limit)


def finished(folder: Path) -> int:
    """How many cells are there."""
    return sum(1 for _ in folder.glob("cells/[!.]*"))


def tables(folder: Path) -> dict[str, str]:
    """Key -> the table of every finished cell, to the last digit."""
    paths = sorted(folder.glob("cells/*/results.parquet"))
    return {path.parent.name: read_results(path)[0].to_csv(index=False) for path in paths}


def main() -> int:
    """Rounds until the budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the run, over those of this script")
    parser.add_argument("--minutes", type=float, help="how long (without a budget: 1)")
    parser.add_argument("--events", type=int, help="how many events")
    parser.add_argument("--workers", type=int, choices=(1, 2, 3), help="of each command (default: 1 or 2, drawn)")
    parser.add_argument("--seed", type=int, default=0, help="of the events (their timing is the machine's)")
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    arguments = parser.parse_intermixed_args()
    RUN.extend(arguments.settings)
    if arguments.minutes is None and arguments.events is None:
        arguments.minutes = 1.0
    place = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    place.mkdir(parents=True, exist_ok=True)
    dice, events = random.Random(arguments.seed), Counter[str]()
    quiet = Chaos(place / "quiet", 1, dice, events)
    start = time.monotonic()
    quiet.round(0, Budget(None, 0, events))
    expected = tables(quiet.folder)
    # An event a cell or so: work gets done in between.
    pace = min((time.monotonic() - start) / max(len(expected), 1), 1.0)
    budget, rounds, problems = Budget(arguments.minutes, arguments.events, events), 0, quiet.check(expected)
    while budget() and not problems and expected:
        workers = arguments.workers or dice.choice([1, 1, 1, 2])
        chaos = Chaos(place / f"round{rounds}", workers, dice, events, pace)
        chaos.round(len(expected), budget)
        problems += chaos.check(expected)
        rounds += 1
    said = {"events": events.total(), "rounds": rounds, "cells": len(expected), "kinds": dict(sorted(events.items()))}
    print(json.dumps(said | {"problems": problems}))
    if arguments.keep is None and not problems:
        shutil.rmtree(place, ignore_errors=True)
    elif problems:
        print(f"see {place}", file=sys.stderr)
    return 1 if problems or not expected else 0


if __name__ == "__main__":
    sys.exit(main())
