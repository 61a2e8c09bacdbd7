"""`workers=N`: N processes of this machine on one results folder, each the same command with a share of its own.

The parent computes nothing. It shows what is finished, passes on what its workers say, replaces one that was killed,
and ends one that stands still, after telling so for a while. Workers end with their parent, however that ends.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fairseq_icl.errors import UserError
from fairseq_icl.files import HOST
from fairseq_icl.replication.alive import clock_of, last_beat, silent_after
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.locks import Holder, tell_every
from fairseq_icl.replication.scheduling import SESSION_VARIABLE, told_failures
from fairseq_icl.replication.sharing import SHARING_VARIABLE, keep_only, model_name, shared_models
from fairseq_icl.replication.store import Store

PARENT_VARIABLE = "FAIRSEQ_ICL_PARENT"
"""Set for workers: they end when their standard input does."""
LOOK = 0.2
"""Seconds between two looks at the workers."""
GRACE = 10.0
"""Seconds in which a worker that is told to end may do so."""
ERROR = "error: "


def command(words: Sequence[str], share: str) -> list[str]:
    """The command of a process that computes a share of what the command of `words` asks for."""
    own = [word for word in words if not word.startswith(("workers=", "share=", "launcher=", "slurm."))]
    return [sys.executable, "-P", "-m", "fairseq_icl", "replicate", *own, f"share={share}"]


def run_workers(
    count: int, words: Sequence[str], store: Store, plan: dict[str, Cell], tell: Callable[[float, list[str]], None]
) -> None:
    """Compute the cells of a plan, by key, with `count` processes; `tell` hears how many are done, and new lines."""
    store.sweep_unfinished()
    names = {key: model_name(cell) for key, cell in plan.items()}
    with shared_models(store.folder) as folder, pool(count, words, store, plan, folder) as workers:
        while workers.look():
            tell(len(plan) - len(workers.left()), workers.lines())
            if folder is not None:
                keep_only(folder, {names[key] for key in workers.left()})
            time.sleep(LOOK)
        tell(len(plan) - len(workers.left()), workers.lines())
        workers.check()


@contextlib.contextmanager
def pool(
    count: int, words: Sequence[str], store: Store, plan: dict[str, Cell], models: Path | None
) -> Iterator["Pool"]:
    """The workers, running, with a folder for models they share; whatever happens, none of them is left in the end."""
    workers = Pool(count, words, store, plan, models)
    try:
        for number in range(1, count + 1):
            workers.start(number, f"{number}/{count}+")
        yield workers
    finally:
        workers.end()


@dataclass
class Worker:
    """One process."""

    number: int
    share: str
    process: "subprocess.Popen[str]"
    listener: threading.Thread
    stopped_at: float | None = None
    """When it was first seen to stand still."""
    told: float = 0.0
    was_ended: bool = False
    """Whether it stood still for so long that it was ended."""

    def __str__(self) -> str:
        return f"worker {self.number} (process {self.process.pid})"

    def close(self) -> None:
        """Hear the last words of a worker that has ended."""
        self.listener.join(GRACE)
        if self.process.stdin is not None:
            self.process.stdin.close()


class Pool:
    """Some workers and what they say."""

    def __init__(self, count: int, words: Sequence[str], store: Store, plan: dict[str, Cell], models: Path | None):
        self.count, self.words, self.store, self.plan = count, words, store, plan
        self.sharing = {SHARING_VARIABLE: str(models.resolve())} if models is not None else {}
        self.session = uuid.uuid4().hex
        self.workers: list[Worker] = []
        self.errors: list[str] = []
        self.restarts = 0
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done: set[str] = set()

    def start(self, number: int, share: str) -> None:
        """Start a worker."""
        variables = os.environ | {PARENT_VARIABLE: "1", SESSION_VARIABLE: self.session, **_device(number)}
        variables |= self.sharing
        variables["OMP_NUM_THREADS"] = str(threads_each(self.count))
        process = subprocess.Popen(
            command(self.words, share),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=variables,
        )
        listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        listener.start()
        self.workers.append(Worker(number, share, process, listener))

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                if line.startswith(ERROR):
                    self.errors.append(line.removeprefix(ERROR).strip())
                else:
                    self._said.put(line.rstrip())

    def lines(self) -> list[str]:
        """What the workers said since the last time."""
        lines = []
        while not self._said.empty():
            lines.append(self._said.get())
        return lines

    def left(self) -> list[str]:
        """Keys of the cells that are neither finished nor failed."""
        self._done |= {key for key in self.plan if key not in self._done and self._is_done(key)}
        return [key for key in self.plan if key not in self._done]

    def _is_done(self, key: str) -> bool:
        return self.store.is_finished(key) or self.store.failure(key).get("session") == self.session

    def look(self) -> bool:
        """Look after the workers; whether there is still one at work."""
        for worker in list(self.workers):
            code = worker.process.poll()
            if code is None:
                self._watch(worker)
                continue
            self.workers.remove(worker)
            worker.close()
            if code not in (0, 2) and self.left():
                self._replace(worker, code)
        if not self.workers and self.left() and not self.errors and self.restarts <= self.count:
            self.restarts += 1  # what others hold, or what the one that was killed last left behind
            self.start(1, "1/1")
        return bool(self.workers)

    def _replace(self, worker: Worker, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if worker.was_ended:
            how = "stood still and was ended"
        elif code == -signal.SIGKILL:
            how += " (perhaps for want of memory: fewer workers need less)"
        if self.restarts >= self.count:
            self.errors.append(f"{worker} {how}, as {self.restarts} others before; {len(self.left())} cells are left")
            return
        self._said.put(f"{worker} {how}; another takes its place")
        self.restarts += 1
        self.start(worker.number, worker.share)

    def _watch(self, worker: Worker) -> None:
        """Notice a worker that stands still: tell, and in the end give its place to another."""
        now = time.monotonic()
        if worker.was_ended or not self._stands_still(worker.process.pid):
            worker.stopped_at = None
            return
        if worker.stopped_at is None:
            worker.stopped_at = worker.told = now
        still = now - worker.stopped_at
        if still >= silent_after():
            worker.was_ended = True
            worker.process.kill()
        elif now - worker.told >= tell_every():
            worker.told = now
            pid = worker.process.pid
            self._said.put(
                f"{worker} stands still since {still:.0f} s{self._held_by(pid)}; let it go on (kill -CONT {pid}), or "
                f"end it (kill -KILL {pid}) and another takes its place, as will happen after {silent_after():.0f} s"
            )

    def _stands_still(self, pid: int) -> bool:
        folder = self.store.locks.folder
        beat = last_beat(folder, pid, HOST)
        return is_stopped(pid) or (beat is not None and clock_of(folder) - beat >= silent_after())

    def _held_by(self, pid: int) -> str:
        holders = {key: Holder.of(self.store.locks.path(key)) for key in self.left()}
        cells = [self.plan[key].label for key, holder in holders.items() if holder is not None and holder.pid == pid]
        return f" and holds {', '.join(cells)}" if cells else ""

    def check(self) -> None:
        """UserError if something is missing in the end."""
        failed = {key: self.store.failure(key) for key in self.plan if not self.store.is_finished(key)}
        told = {
            key: f"{self.plan[key].label}: {said.get('error')}"
            for key, said in failed.items()
            if said.get("session") == self.session
        }
        if told:
            raise UserError(told_failures(told, len(self.plan)))
        if failed:
            raise UserError(self.errors[0] if self.errors else f"{len(failed)} cells are not finished")

    def end(self) -> None:
        """End all workers: they are asked to, and forced to if they do not."""
        for worker in self.workers:
            worker.process.terminate()
        deadline = time.monotonic() + GRACE
        for worker in self.workers:
            if is_stopped(worker.process.pid):
                worker.process.kill()
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.close()


def threads_each(count: int) -> int:
    """Threads of each of `count` processes of this machine: what OMP_NUM_THREADS says, else an equal part."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() and int(said) else max(1, len(os.sched_getaffinity(0)) // count)


def _device(number: int) -> dict[str, str]:
    """Where there are several GPUs, the one that a worker sees."""
    count = torch.cuda.device_count()
    if count < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[(number - 1) % count]}


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP, Ctrl-Z)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def follow_parent() -> None:
    """In a worker: end when the parent does, and leave Ctrl-C, which the whole terminal gets, to it."""
    if not os.environ.pop(PARENT_VARIABLE, None):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait_for_end() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, daemon=True).start()
