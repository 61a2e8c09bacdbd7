"""Locks: who waits says for whom; file systems whose locks do not hold are noticed; messages that fit."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fairseq_icl.errors import UserError
from fairseq_icl.replication import file_systems, locks
from fairseq_icl.replication.alive import Heartbeat
from fairseq_icl.replication.file_systems import mounted_as, why_flock_fails
from fairseq_icl.replication.locks import Locks, holder_of
from fairseq_icl.replication.store import Store, StoreError

HOLDER = """
import sys, time
from fairseq_icl.replication.store import Store
with Store(sys.argv[1]).working_on("k") as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def holding(folder: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock of k."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "True"
    process.stdout.close()
    return process


def flock_that_does_nothing(handle: int, operation: int) -> None:
    """As on a file system without locks that does not say so."""


@pytest.mark.parametrize("soft", [False, True])
def test_a_frozen_holder_is_named_again_and_again(tmp_path, monkeypatch, soft):
    Store(tmp_path)
    if soft:
        (tmp_path / "locks" / locks.SOFT).write_text("")
    monkeypatch.setenv(locks.TELL_EVERY_VARIABLE, "0.3")
    process = holding(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    lines = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

    store = Store(tmp_path)
    store.say = say
    with store.working_on("k", wait=True) as mine:
        assert mine
    assert len(lines) >= 3
    ending = "soft" if soft else "lock"
    for line in lines[:3]:
        assert f"k.{ending}: waiting since" in line
        assert f"process {process.pid} on {socket.gethostname()}" in line
        assert f"kill -CONT {process.pid}" in line


def test_the_line_comes_every_minute_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv(locks.TELL_EVERY_VARIABLE, raising=False)
    assert locks.tell_every() == 60
    monkeypatch.setenv(locks.TELL_EVERY_VARIABLE, "often")
    assert locks.tell_every() == 60


def test_a_lock_of_nobody_known_is_waited_for_as_well(tmp_path):
    assert holder_of(tmp_path / "nothing.lock") == "another process"
    (tmp_path / "k.soft").write_text("77\nelsewhere\n")
    assert f"process 77 on elsewhere; if that host is gone, remove the file: rm {tmp_path}/k.soft" in holder_of(
        tmp_path / "k.soft"
    )


def test_locks_that_do_nothing_are_noticed_and_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", flock_that_does_nothing)
    first, second = Store(tmp_path), Store(tmp_path)
    said = capsys.readouterr().err.strip()
    assert re.search(r"locks keep nobody out; lock files are used instead.* rm .*/locks/\*\.soft$", said)
    assert "\n" not in said
    with first.working_on("k") as mine:
        assert mine
        with second.working_on("k") as also_mine:
            assert not also_mine
    with second.working_on("k") as mine:
        assert mine


def test_a_soft_lock_of_a_dead_process_of_this_host_is_broken_and_one_of_another_host_is_not(tmp_path):
    Store(tmp_path)
    (tmp_path / "locks" / locks.SOFT).write_text("")
    process = holding(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / "locks" / "k.soft").is_file()
    deadline = time.time() + 60
    with Store(tmp_path).working_on("k", wait=True) as mine:
        assert mine
        assert time.time() < deadline
    (tmp_path / "locks" / "k.soft").write_text("77\nelsewhere\n")
    with Store(tmp_path).working_on("k") as mine:
        assert not mine
    (tmp_path / "locks" / "k.soft").unlink()  # what the message tells the user to do
    with Store(tmp_path).working_on("k") as mine:
        assert mine


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("nfs4", "rw,vers=4.2,hard,local_lock=none", None),
        ("nfs", "rw,vers=3,nolock,local_lock=all", "local_lock=all"),
        ("nfs", "rw,vers=3,nolock", "nolock"),
        ("lustre", "rw,localflock,lazystatfs", "localflock"),
        ("lustre", "rw,flock,lazystatfs", None),
        ("ceph", "rw,noatime", None),
        ("beegfs", "rw,relatime", "beegfs"),
        ("fuse.sshfs", "rw,user_id=0", "fuse.sshfs"),
    ],
)
def test_mounts_on_which_locks_hold_on_one_host_only(tmp_path, monkeypatch, kind, options, expected):
    run = tmp_path / "a run" / "locks"
    run.mkdir(parents=True)
    mounted = str(tmp_path / "a run").replace(" ", "\\040")
    (tmp_path / "mounts").write_text(f"/dev/x / ext4 rw,nolock 0 0\nserver:/d {mounted} {kind} {options} 0 0\nbroken\n")
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "mounts")
    assert mounted_as(run) == (kind, set(options.split(",")))
    reason = why_flock_fails(run)
    assert reason is None if expected is None else reason is not None and f"{expected}" in reason
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EIO])
def test_errors_of_locks_do_not_speak_of_space(tmp_path, monkeypatch, number):
    store = Store(tmp_path)

    def fail(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with (
        pytest.raises(StoreError, match=r"k\.lock: cannot be locked \(.*\); choose another results folder"),
        store.working_on("k"),
    ):
        pass
    assert "has no locks" in str(why_flock_fails(tmp_path))


@pytest.mark.parametrize(("number", "about_space"), [(errno.ENOSPC, True), (errno.EROFS, False), (errno.EACCES, False)])
def test_only_a_full_disk_asks_for_space(tmp_path, number, about_space):
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(UserError, match="cannot be written") as caught:
        Store(tmp_path).finish("k", fail)
    assert ("free some space" in str(caught.value)) == about_space


def test_a_lock_can_be_taken_again_by_the_same_process(tmp_path):
    held = Locks(tmp_path)
    for _ in range(3):
        with held.hold("k", wait=False) as mine:
            assert mine


def test_no_sign_of_life_comes_after_the_last_lock_was_let_go(tmp_path, monkeypatch):
    touch, begun, done = Path.touch, threading.Event(), threading.Event()

    def slow_touch(path: Path) -> None:
        begun.set()
        time.sleep(0.1)
        touch(path)
        done.set()

    monkeypatch.setattr(Path, "touch", slow_touch)
    heartbeat = Heartbeat(tmp_path)
    heartbeat.start()
    assert begun.wait(60)
    heartbeat.end()
    assert done.is_set()
    assert list(tmp_path.iterdir()) == []
