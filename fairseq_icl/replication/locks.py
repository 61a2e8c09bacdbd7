"""Locks of a results folder: one process at a time works on a key, and whoever waits says for whom.

    RUN/locks/KEY.lock    locked by the operating system (flock) while a process works on KEY; who, stands in the file
    RUN/locks/KEY.soft    instead of that, where flock does not hold between hosts: the file itself is the lock
    RUN/locks/SOFT        says that this folder needs the second kind

A lock of the system vanishes with the process that holds it. A soft lock is broken when its process is gone and was
of this host; one of another host that died has to be removed by hand: rm RUN/locks/*.soft
"""

import errno
import fcntl
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import SoftFileLock, Timeout

from fairseq_icl.errors import UserError
from fairseq_icl.files import reason_of, remedy_for, temporary_prefix, write_atomically

TELL_EVERY = 60.0
"""Seconds between two lines about a lock that is waited for; the environment variable below has another number."""
TELL_EVERY_VARIABLE = "FAIRSEQ_ICL_TELL_EVERY"
POLL = 0.1
HELD = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)
MOUNTS = Path("/proc/mounts")
ONE_HOST_ONLY = {"nolock", "localflock", "local_lock=flock", "local_lock=all"}
"""Mount options (NFS, Lustre) under which flock is seen by processes of the same host only."""
SOFT = "SOFT"


class StoreError(UserError):
    """The results folder cannot be used: no further cell could be stored either."""


class Locks:
    """The locks in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder

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

    @contextmanager
    def hold(self, key: str, *, wait: bool, say: Callable[[str], None] | None = None) -> Iterator[bool]:
        """Hold the lock of `key`; yields False if another process holds it and `wait` is not asked for."""
        lock = SoftLock(self.folder / f"{key}.soft") if self.are_soft else SystemLock(self.folder / f"{key}.lock")
        held = self._acquire(lock, wait, say or _to_stderr)
        try:
            yield held
        finally:
            if held:
                lock.release()

    def _acquire(self, lock: "SystemLock | SoftLock", wait: bool, say: Callable[[str], None]) -> bool:
        start = told = time.monotonic()
        while not lock.acquire():
            if not wait:
                return False
            if time.monotonic() - told >= tell_every():
                told = time.monotonic()
                say(f"{lock.path}: waiting since {told - start:.0f} s for {holder_of(lock.path)}")
            time.sleep(POLL)
        return True


class SystemLock:
    """flock, with the holder's process and host in the file."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Try once."""
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
        self._handle = handle
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
        return True

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
    try:
        pid, host = path.read_text(encoding="utf-8", errors="replace").split()[:2]
    except (OSError, ValueError):
        return "another process"
    if host == socket.gethostname():
        help_text = f"if it is stopped, let it go on (kill -CONT {pid}) or end it (kill -KILL {pid})"
    elif path.suffix == ".soft":
        help_text = f"if that host is gone, remove the file: rm {path}"
    else:
        help_text = "if it is stopped, end it there"
    return f"process {pid} on {host}; {help_text}"


def tell_every() -> float:
    """Seconds between two lines."""
    try:
        return float(os.environ[TELL_EVERY_VARIABLE])
    except (KeyError, ValueError):
        return TELL_EVERY


def why_flock_fails(folder: Path) -> str | None:
    """Why flock cannot be relied on in this folder; None if it can."""
    option = ONE_HOST_ONLY & mount_options(folder)
    if option:
        return f"mounted with {sorted(option)[0]}, so that locks hold on one host only"
    handle, name = tempfile.mkstemp(prefix=temporary_prefix("probe"), dir=folder)
    other = os.open(name, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return f"the file system has no locks ({reason_of(error)})"
    finally:
        os.close(handle)
        os.close(other)
        os.unlink(name)
    return "the file system's locks keep nobody out"


def mount_options(folder: Path) -> set[str]:
    """Options with which the file system of `folder` is mounted; none where the system does not say."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
        place = folder.resolve()
    except OSError:
        return set()
    found: tuple[int, set[str]] = (-1, set())
    for line in lines:
        _, point, _, options, *_ = [*line.split(), "", "", "", ""]
        mounted = Path(point.encode().decode("unicode_escape", errors="replace"))
        if place.is_relative_to(mounted) and len(mounted.parts) >= found[0]:
            found = (len(mounted.parts), set(options.split(",")))
    return found[1]


def _explained(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be locked ({reason_of(error)}); {remedy_for(error)} results folder: out=DIR")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
