"""Real commands in real processes, as a user types them."""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fairseq_icl.commands import COMMANDS
from tests.fork_server import Command, ForkServer

STARTING = threading.Lock()
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
BIN = Path(sys.executable).parent
PLUGIN = Path(__file__).parent.parent / "fairseq_icl"


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def run(
    command: str,
    *arguments: object,
    timeout: float = 600,
    cwd: Path | None = None,
    shell_prefix: str = "",
    **environment: str,
) -> Result:
    """Run one of the environment's console commands (fairseq-train, fairseq-icl ...), in a shell set up before it.

    It is a process of its own. Where nothing speaks against it, one forked from a process that has imported fairseq.
    """
    words = [str(BIN / command), *map(str, arguments)]
    variables = os.environ | ONE_THREAD | environment
    with STARTING:  # two threads may want the same server
        server = None if shell_prefix or not command.startswith("fairseq-") else server_for(command == "fairseq-icl")
    if server is not None and server.serves(variables):
        return _forked(server, Command(words[0], words[1:], str(cwd or Path.cwd()), variables), timeout)
    if shell_prefix:
        words = ["bash", "-c", f"{shell_prefix} exec {shlex.join(words)}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=variables, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


def run_script(script: Path, *arguments: object, timeout: float = 100) -> Result:
    """Run a file of Python in a process that has imported fairseq, not the plugin."""
    command = Command(str(script), list(map(str, arguments)), str(Path.cwd()), os.environ | ONE_THREAD)
    return _forked(server_for(plugin=False), command, timeout)


def run_unread(*words: str) -> Result:
    """`fairseq-icl WORDS` when nobody reads what it prints: what `| head -1` comes to."""
    reading, writing = os.pipe()
    os.close(reading)
    command = Command(str(BIN / "fairseq-icl"), list(words), str(Path.cwd()), os.environ | ONE_THREAD)
    try:
        return _forked(server_for(plugin=True), command, 120, writing)
    finally:
        os.close(writing)


def _forked(server: ForkServer, command: Command, timeout: float, writing: int | None = None) -> Result:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        code = server.run(command, stdout.fileno() if writing is None else writing, stderr.fileno(), timeout)
        stdout.seek(0)
        stderr.seek(0)
        return Result(code, stdout.read(), stderr.read())


@cache
def server_for(plugin: bool) -> ForkServer:
    """A server with the plugin imported, for our own command; without it for fairseq's, where `--user-dir` imports it.

    fairseq_cli is not imported ahead: it sets up logging.
    """
    libraries = ["fairseq.trainer", "fairseq.options", "hydra", "pandas", "pyarrow.parquet", "safetensors.torch"]
    own = ["fairseq_icl.api", *(f"fairseq_icl.commands.{name}" for name in COMMANDS)]
    return ForkServer(own if plugin else libraries, os.environ | ONE_THREAD)


def succeeded(result: Result) -> Result:
    """The result itself, after a check that the command ended well."""
    assert result.code == 0, result.text[-4000:]
    return result


def assert_one_clear_line(result: Result, *parts: str) -> None:
    """Exit code 2 and, as the last word on stderr, one line that holds all `parts`; no traceback anywhere."""
    assert result.code == 2, f"exit code {result.code}\n{result.text[-4000:]}"
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: "), result.text[-4000:]
    for part in parts:
        assert part in last, last
    assert "Traceback" not in result.text
