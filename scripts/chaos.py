"""Chaos: workers on one results folder are killed, stopped, starved of disk and fed damaged files, within a budget.

    python scripts/chaos.py --events 1000                 as many events, however long it takes
    python scripts/chaos.py --minutes 5 --workers 4       as long, however many events there are

Round after round a small audit of the shipped model is computed in a fresh folder by two to four processes that are
disturbed at random. A round ends when all cells are there; a last, undisturbed run must then find nothing left to
compute and no leftovers, and all tables must be those of a run in peace, to the last digit. No process may ever end
with a traceback. Exit code 0 if all that holds.

Files under observations/ are damaged while nobody holds their lock: between two uses, as a bad disk would.
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
from pathlib import Path

from fairseq_icl.commands import main as fairseq_icl
from fairseq_icl.commands import replicate  # noqa: F401 - imported before the forks
from fairseq_icl.replication.locks import Locks
from fairseq_icl.results import read_results

RUN = ["replicate", "experiment=audit", "model=demo", "dataset=demo_sentiment", "seed=1", "num_demonstrations=6"]
RUN += ["limit=8", "method=gd,lcgd", "init=pretrained", "quiet=true"]
ENDS = {0, 2, 130, 141, 143, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
KINDS = ["kill", "kill", "stop", "stop", "interrupt", "terminate", "full disk", "damage", "damage", "junk"]
ROUND_SECONDS = 60
"""After this a round is left in peace, so that it can end."""


class Chaos:
    """One folder, its workers, and what is done to them."""

    def __init__(self, folder: Path, workers: int, dice: random.Random, events: Counter[str], pace: float = 0.0):
        self.folder, self.size, self.dice, self.events, self.pace = folder, workers, dice, events, pace
        self.logs = folder.with_name(f"{folder.name}-logs")
        self.logs.mkdir()
        self.workers: set[int] = set()
        self.stopped: dict[int, float] = {}
        self.problems: list[str] = []

    def start(self, limit: int | None = None) -> int:
        """A new worker; `limit` is the size of the largest file it can write."""
        log = self.logs / f"{sum(1 for _ in self.logs.iterdir())}.log"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                # The limit holds for the log as well, and a worker that cannot say anything ends with another code.
                handle = os.open(log if limit is None else os.devnull, os.O_WRONLY | os.O_CREAT)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                code = fairseq_icl([*RUN, f"out={self.folder}"])
            except KeyboardInterrupt:
                code = 130
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        self.workers.add(pid)
        return pid

    def reap(self) -> None:
        """Notice who ended, and how; wake those that were stopped long enough."""
        for pid in list(self.workers):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                if code not in ENDS:
                    self.problems.append(f"a worker ended with {code}")
                self.workers.discard(pid)
                self.stopped.pop(pid, None)
        for pid, until in list(self.stopped.items()):
            if time.monotonic() > until:
                os.kill(pid, signal.SIGCONT)
                del self.stopped[pid]

    def event(self) -> None:
        """Something bad happens."""
        kind = self.dice.choice(KINDS)
        victim = self.dice.choice(sorted(self.workers)) if self.workers else None
        if kind == "full disk":
            if len(self.workers) > self.size:
                return
            self.start(self.dice.choice([512, 4096, 16384, 65536]))
        elif kind == "damage":
            if not self.damage():
                return
        elif kind == "junk":
            self.junk()
        elif victim is None:
            return
        elif kind == "stop":
            os.kill(victim, signal.SIGSTOP)
            self.stopped[victim] = time.monotonic() + self.dice.uniform(0.05, 1.0)
        else:
            numbers = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
            os.kill(victim, numbers[kind])
        self.events[kind] += 1

    def damage(self) -> bool:
        """Truncate, alter or replace something under observations/; False if there is nothing that is not in use."""
        kept = sorted(self.folder.glob("observations/[!.]*"))
        if not kept:
            return False
        place = self.dice.choice(kept)
        with Locks(self.folder / "locks").hold(place.name, wait=False) as free:
            files = sorted(place.iterdir()) if free and place.is_dir() else []
            if not files:
                return False
            path = self.dice.choice(files)
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
            while len(self.workers) < self.size:
                self.start()
            time.sleep(self.dice.uniform(0.02, self.pace))
            self.event()
            self.reap()
        while self.workers:
            self.stopped = dict.fromkeys(self.stopped, 0.0)
            self.reap()
            time.sleep(0.02)
        last = self.start()
        self.workers.discard(last)
        code = os.waitstatus_to_exitcode(os.waitpid(last, 0)[1])
        if code != 0:
            self.problems.append(f"the last run, in peace, ended with {code}")

    def check(self, expected: dict[str, str]) -> list[str]:
        """What is wrong with the finished folder."""
        problems = [*self.problems]
        if tables(self.folder) != expected:
            problems.append("the tables are not those of the quiet run")
        for name in ("cells", "observations", "plans"):
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
    parser.add_argument("--workers", type=int, choices=(2, 3, 4), help="processes at a time (default: 2 to 4, drawn)")
    parser.add_argument("--seed", type=int, default=0, help="of the events (their timing is the machine's)")
    parser.add_argument("--keep", type=Path, help="work in this new folder and keep it")
    arguments = parser.parse_intermixed_args()
    RUN.extend(arguments.settings)
    if arguments.minutes is None and arguments.events is None:
        arguments.minutes = 1.0
    os.environ.setdefault("FAIRSEQ_ICL_TELL_EVERY", "0.5")
    place = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    place.mkdir(parents=True, exist_ok=True)
    dice, events = random.Random(arguments.seed), Counter[str]()
    quiet = Chaos(place / "quiet", 1, dice, events)
    start = time.monotonic()
    quiet.round(0, Budget(None, 0, events))
    expected = tables(quiet.folder)
    pace = min(
        (time.monotonic() - start) / max(len(expected), 1), 1.0
    )  # an event a cell or so: work gets done in between
    budget, rounds, problems = Budget(arguments.minutes, arguments.events, events), 0, quiet.check(expected)
    while budget() and not problems and expected:
        workers = arguments.workers or dice.choice([2, 3, 4])
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
