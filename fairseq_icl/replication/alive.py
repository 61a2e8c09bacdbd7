"""Signs of life: whoever holds locks in a folder touches a file there, so that others can tell work from a standstill.

    RUN/locks/.alive-HOST.PID-x    touched every few seconds while process PID of HOST holds a lock of the folder

A process that is stopped (SIGSTOP), or whose host froze, touches nothing. Times are those of the file system, not of
the hosts, whose clocks may differ. What a killed process leaves is swept away with its other leftovers (files.py).
"""

import os
import re
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from fairseq_icl.files import HOST, temporary_prefix

BEAT = 10.0
"""Seconds between two signs of life."""
SILENT_AFTER = 600.0
"""Seconds without a sign of life after which nobody waits any longer; the environment variable has another number."""
SILENT_AFTER_VARIABLE = "FAIRSEQ_ICL_SILENT_AFTER"


def silent_after() -> float:
    """Seconds without a sign of life after which a process is taken for frozen."""
    try:
        return float(os.environ[SILENT_AFTER_VARIABLE])
    except (KeyError, ValueError):
        return SILENT_AFTER


def beat_every() -> float:
    """Seconds between two signs of life: several in the time after which they are missed."""
    return min(BEAT, silent_after() / 4)


class Heartbeat:
    """The signs of life of this process in one folder, given while at least one lock is held."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._held = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """One lock more."""
        self._held += 1
        if self._held == 1:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=_beat, args=(_file_of(self.folder), self._stop), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """One lock less."""
        self._held -= 1
        if self._held == 0:
            self._stop.set()
            if self._thread is not None and self._thread.is_alive():  # or it could not be started
                self._thread.join(BEAT)  # its last touch comes before the removal; nobody waits for a disk that hangs
            with suppress(OSError):
                _file_of(self.folder).unlink(missing_ok=True)


def _beat(path: Path, stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(OSError):  # a full disk, or the folder is gone: others then hear nothing, which is true enough
            path.touch()
        stop.wait(beat_every())


def last_beat(folder: Path, pid: int, host: str) -> float | None:
    """When that process last gave a sign of life, by the file system's clock; None if it never did."""
    name = _file_of(folder, pid, re.sub(r"[^A-Za-z0-9]", "_", host)[:40])
    try:
        handle = os.open(name, os.O_RDONLY)  # opened, not only looked up: NFS then asks its server
    except OSError:
        return None
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)


def clock_of(folder: Path) -> float:
    """The time as the folder's file system has it."""
    with tempfile.NamedTemporaryFile(prefix=temporary_prefix("clock"), dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _file_of(folder: Path, pid: int | None = None, host: str = HOST) -> Path:
    return folder / f".alive-{host}.{os.getpid() if pid is None else pid}-x"
