"""Locks of a results folder: one process at a time works on a key, and whoever waits says for whom.

    RUN/locks/KEY.lock    locked by the operating system (flock) while a process works on KEY; who, stands in the file
    RUN/locks/KEY.soft    instead of that, where flock does not hold between hosts: the file itself is the lock
    RUN/locks/SOFT        says that this folder needs the second kind

A lock of the system vanishes with the process that holds it. A soft lock is broken when its process is gone and was
of this host; one of another host that died has to be removed by hand. Removing the file is the way out of any lock
whose holder is frozen, or gone with its host: the next process makes a new file, and should the old holder ever go on,
what it computed is thrown away.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import SoftFileLock, Timeout

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of, remedy_for, write_atomically
from fairseq_icl.replication.alive import Heartbeat, beat_every, clock_of, last_beat
from fairseq_icl.replication.file_systems import why_flock_fails

TELL_EVERY = 60.0
"""Seconds between two lines about a lock that is waited for; the environment variable below has another number."""
TELL_EVERY_VARIABLE = "FAIRSEQ_ICL_TELL_EVERY"
POLL = 0.1
HELD = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
SOFT = "SOFT"


class StoreError(UserError):
    """The results folder cannot be used: no further cell could be stored either."""


class Held(Exception):
    """Another process holds the lock of `key`, and waiting was not asked for."""

    def __init__(self, key: str):
        super().__init__(key)
        self.key = key


class Locks:
    """The locks in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._heartbeat = Heartbeat(folder)

    @property
    def are_soft(self) -> bool:
        """Whether lock files are used because flock does not hold here."""
        return (self.folder / SOFT).exists()

    def prepare(self, say: Callable[[str], None]) -> None:
        """Look whether flock holds in this folder; if it does not, use lock files, and say so."""
        reason = None if self.are_soft else why_flock_fails(self.folder)
        if reason is not None:
            write_atomically(self.folder / SOFT, f"{reason}\n")
            say(
                f"{self.folder}: {reason}; lock files are used instead. If a host dies in the middle, remove what it "
                f"left: rm {self.folder}/*.soft"
            )

    def path(self, key: str) -> Path:
        """The file that is, or has, the lock of `key`."""
        return self.folder / (f"{key}.soft" if self.are_soft else f"{key}.lock")

    def _lock(self, key: str) -> "SystemLock | SoftLock":
        return SoftLock(self.path(key)) if self.are_soft else SystemLock(self.path(key))

    @contextmanager
    def hold(self, key: str, *, wait: bool, say: Callable[[str], None] | None = None) -> Iterator[bool]:
        """Hold the lock of `key`; yields False if another process holds it and `wait` is not asked for."""
        lock = self._lock(key)
        held = self._acquire(lock, wait, say or _to_stderr)
        try:
            if held:
                self._heartbeat.start()
            yield held
        finally:
            if held:
                lock.release()
                self._heartbeat.end()

    def is_held(self, key: str) -> bool:
        """Whether a process holds the lock of `key` right now."""
        lock = self._lock(key)
        if lock.acquire():
            lock.release()
            return False
        return True

    def _acquire(self, lock: "SystemLock | SoftLock", wait: bool, say: Callable[[str], None]) -> bool:
        start = told = time.monotonic()
        while not lock.acquire():
            if not wait:
                return False
            if time.monotonic() - told >= tell_every():
                told = time.monotonic()
                say(f"{lock.path}: waiting since {told - start:.0f} s for {holder_of(lock.path)}")
            time.sleep(POLL)
        try:
            self._check_that_nobody_else_holds(lock)
        except BaseException:
            lock.release()
            raise
        return True

    def _check_that_nobody_else_holds(self, lock: "SystemLock | SoftLock") -> None:
        """Fail loudly if a process of another host goes on working on what we have just locked.

        Its name in the file says that it did not let go: it was killed, or locks do not hold between the hosts. In the
        second case it gives another sign of life.
        """
        before = lock.before if isinstance(lock, SystemLock) else None
        if before is None or before.host == socket.gethostname():
            return
        seen = last_beat(self.folder, before.pid, before.host)
        if seen is None or clock_of(self.folder) - seen > 3 * beat_every():
            return
        deadline = time.monotonic() + 2 * beat_every()
        while time.monotonic() < deadline:
            time.sleep(min(POLL, beat_every()))
            if (last_beat(self.folder, before.pid, before.host) or seen) > seen:
                raise StoreError(
                    f"{lock.path}: locked here although process {before.pid} on {before.host} holds it and works: "
                    "locks of this file system (flock) do not hold between hosts; end all processes on this folder, "
                    f"then touch {self.folder / SOFT} (lock files are used from then on) and start them again"
                )


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as its file says."""

    path: Path
    pid: int
    host: str
    since: float
    """When it was taken, by the file system's clock."""

    @classmethod
    def of(cls, path: Path) -> "Holder | None":
        """The holder of the lock at `path`; None if the file does not say."""
        try:
            pid, host = path.read_text(encoding="utf-8", errors="replace").split()[:2]
            return cls(path, int(pid), host, path.stat().st_mtime)
        except (OSError, ValueError):
            return None

    def silence(self) -> float:
        """Seconds since its last sign of life."""
        beat = last_beat(self.path.parent, self.pid, self.host)
        return max(0.0, clock_of(self.path.parent) - max(self.since, beat or self.since))

    @property
    def remedy(self) -> str:
        """What can be done about a holder that does not go on."""
        if self.host == socket.gethostname():
            return f"if it is stopped, let it go on (kill -CONT {self.pid}) or end it (kill -KILL {self.pid})"
        if self.path.suffix == ".soft":
            return f"if that host is gone, remove the file: rm {self.path}"
        return f"if it is stopped, end it there; if that host is gone, remove the file: rm {self.path}"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}; {self.remedy}"


class SystemLock:
    """flock, with the holder's process and host in the file."""

    def __init__(self, path: Path):
        self.path = path
        self.before: Holder | None = None
        """Who held the lock before and did not let go properly."""
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Try once."""
        while (answer := self._try()) is None:
            pass
        return answer

    def _try(self) -> bool | None:
        """Whether the lock is ours; None if somebody removed the file meanwhile, so that there is a new one to lock."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise _explained(self.path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in HELD:
                return False
            raise _explained(self.path, error) from error
        except BaseException:  # a signal
            os.close(handle)
            raise
        if not self._is_still_there(handle):
            os.close(handle)
            return None
        self._handle = handle
        self.before = Holder.of(self.path)
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
        return True

    def _is_still_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """Let others in. The file stays: without it two processes could hold locks of two files of one name."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)


class SoftLock:
    """A file that exists while the lock is held, with the holder's process and host in it."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = SoftFileLock(path, timeout=0)

    def acquire(self) -> bool:
        """Try once; the lock of a process of this host that is gone is broken."""
        try:
            self._lock.acquire()
        except Timeout:
            return False
        except OSError as error:
            raise _explained(self.path, error) from error
        return True

    def release(self) -> None:
        """Let others in."""
        self._lock.release()


def holder_of(path: Path) -> str:
    """Who holds the lock, and what can be done about it."""
    return str(Holder.of(path) or "another process")


def tell_every() -> float:
    """Seconds between two lines."""
    try:
        return float(os.environ[TELL_EVERY_VARIABLE])
    except (KeyError, ValueError):
        return TELL_EVERY


def _explained(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be locked ({reason_of(error)}); {remedy_for(error)} results folder: out=DIR")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
