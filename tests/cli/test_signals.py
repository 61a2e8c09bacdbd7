"""Ctrl-C, SIGTERM and readers that stop reading: one line or none, the right exit code, and a folder to go on with."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import BIN, run, run_unread, succeeded
from tests.replication.toy_run import settings
from tests.world import World

CELLS = ("experiment=deutch2024", "init=pretrained", "method=gd,lcgd", "limit=6")


def started(out: Path, world: World, ready: str) -> "subprocess.Popen[str]":
    """A run in a process of its own, once something matching `ready` is in its folder."""
    words = [str(BIN / "fairseq-icl"), "replicate", *settings(world, out, *CELLS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, text=True, env=environment, **pipes)
    deadline = time.time() + 120
    while not list(out.glob(ready)) and process.poll() is None and time.time() < deadline:
        time.sleep(0.005)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("ready", ["plans/*.json", "observations/*"])
def test_interrupted_it_says_so_in_one_line_and_goes_on_later(world, tmp_path, number, code, ready):
    out = tmp_path / "run"
    process = started(out, world, ready)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert stdout == ""
    assert len(stderr.strip().splitlines()) == 1, stderr
    assert "what is finished is kept" in stderr
    assert "2 of 2 cells finished" in succeeded(run("fairseq-icl", "replicate", *settings(world, out, *CELLS))).stdout
    leftovers = [path for name in ("cells", "observations", "plans") for path in (out / name).glob(".*")]
    assert leftovers == []


def test_a_second_signal_does_not_end_in_a_traceback(world, tmp_path):
    for pause in (0.0, 0.002, 0.02):
        process = started(tmp_path / f"run{pause}", world, "observations/*")
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode in (130, 143), stderr
        assert "Traceback" not in stderr
        assert len(stderr.strip().splitlines()) <= 1, stderr


def test_a_signal_that_a_library_turns_into_an_error_is_still_a_signal(tmp_path):
    script = """
import os, signal
from fairseq_icl.commands import command_line as commands
from fairseq_icl.errors import UserError
def run(words):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:
        raise UserError("something else") from error
commands.run = run
commands.main(["report"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (143, "terminated; what is finished is kept\n")


def test_a_signal_that_comes_inside_a_callback_is_not_lost():
    script = """
import os, signal, time, weakref
from fairseq_icl.commands import command_line as commands
class Thing: pass
def run(words):
    thing = Thing()
    watch = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del thing  # the callback runs here, and what it raises Python only prints
    time.sleep(60)
commands.run = run
commands.main(["report"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (143, "terminated; what is finished is kept\n")


def test_a_reader_that_stops_reading_is_no_error(world, tmp_path):
    out = tmp_path / "run"
    succeeded(run("fairseq-icl", "replicate", *settings(world, out, *CELLS)))
    for words in (["--help"], ["datasets"], ["report", str(out)], ["replicate", "--help"]):
        done = run_unread(*words)
        assert done.code in (0, 141), (words, done.stderr)
        assert "Traceback" not in done.stderr
        assert "BrokenPipe" not in done.stderr
    assert (out / "report" / "report.html").is_file()
