"""Whether locks of the operating system (flock) can be relied on in a folder that several hosts may share.

Over NFS flock is a lock of the server (since Linux 2.6.12) unless a mount option keeps it on the host; on Lustre it
holds between hosts with the mount option `flock`; on others it may hold on one host only and nothing says so.
"""

import fcntl
import os
import re
import tempfile
from pathlib import Path

from fairseq_icl.files import reason_of, temporary_prefix

MOUNTS = Path("/proc/mounts")
ONE_HOST_ONLY = {"nolock", "localflock", "local_lock=flock", "local_lock=all"}
"""Mount options (NFS, Lustre) under which flock is seen by processes of the same host only."""
MAYBE_ONE_HOST = re.compile(r"beegfs|gpfs|panfs|cifs|smb3|afs|fuse\..*")
"""File systems of several hosts whose flock may hold on one of them only, without a mount option that says so."""


def why_flock_fails(folder: Path) -> str | None:
    """Why flock cannot be relied on in this folder; None if it can."""
    kind, options = mounted_as(folder)
    if option := ONE_HOST_ONLY & options:
        return f"mounted with {sorted(option)[0]}, so that locks hold on one host only"
    if MAYBE_ONE_HOST.fullmatch(kind):
        return f"on {kind} locks may hold on one host only"
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


def mounted_as(folder: Path) -> tuple[str, set[str]]:
    """(type, mount options) of the file system of `folder`; nothing where the system does not say."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
        place = folder.resolve()
    except OSError:
        return "", set()
    depth, found = -1, ("", set[str]())
    for line in lines:
        _, point, kind, options, *_ = [*line.split(), "", "", "", ""]
        mounted = Path(point.encode().decode("unicode_escape", errors="replace"))
        if place.is_relative_to(mounted) and len(mounted.parts) >= depth:
            depth, found = len(mounted.parts), (kind, set(options.split(",")))
    return found
