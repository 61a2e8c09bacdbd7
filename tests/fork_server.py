"""A process that has imported fairseq, and forks for every command: a start takes a moment instead of four seconds.

    python fork_server.py NAME MODULE ...

imports the modules, and only that: no thread runs and nothing is computed before it forks. Whoever connects to the
socket NAME sends a `Command` as JSON, with files for its stdin, stdout and stderr, and is told the process id, then the
exit code. The new process runs the console script, as `__main__`, and ends as any Python process does.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "COVERAGE")
"""Beginnings of the names of variables that are read once, when the interpreter or a library starts."""


@dataclass(frozen=True)
class Command:
    """A console script with its arguments, and where and with what variables it runs."""

    script: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]


class ForkServer:
    """The server as those see it who want a command run; it ends with the process that made it."""

    def __init__(self, modules: list[str], environment: dict[str, str]) -> None:
        self._name, self._environment = f"fork-server-{uuid.uuid4()}", environment
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [sys.executable, __file__, self._name, *modules]
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)} does not start")

    def serves(self, environment: dict[str, str]) -> bool:
        """Whether a process with these variables would have started as the server has."""
        names = {name for name in (*environment, *self._environment) if name.startswith(AT_START)}
        return all(environment.get(name) == self._environment.get(name) for name in names)

    def run(self, command: Command, stdout: int, stderr: int, timeout: float) -> int:
        """Run the command to its end; returns its exit code, or minus the number of the signal that ended it."""
        with socket.socket(socket.AF_UNIX) as connection, open(os.devnull) as nothing:
            connection.connect(f"\0{self._name}")
            socket.send_fds(connection, [b"files"], [nothing.fileno(), stdout, stderr])
            connection.sendall(json.dumps(asdict(command)).encode() + b"\n")
            connection.settimeout(timeout)
            answers = connection.makefile()
            process = int(answers.readline())
            try:
                return int(answers.readline())
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                raise


def serve(name: str) -> tuple[Command, list[int]]:
    """Fork for every connection until stdin ends. Returns in the new processes alone, with what each is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes below that wait for a command
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen(16)
        print("ready", flush=True)
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _, files, _, _ = socket.recv_fds(connection, len(b"files"), 3)
                message = connection.makefile().readline()
                process = os.fork()
                if process == 0:
                    connection.close()
                    return Command(**json.loads(message)), files
                connection.sendall(f"{process}\n".encode())
                connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n".encode())
                os._exit(0)
            connection.close()
    sys.exit()


def become(command: Command, files: list[int]) -> None:
    """Run the script in this process as if the process had just been started for it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.argv = [command.script, *command.arguments]
    sys.path[0] = str(Path(command.script).parent)
    runpy.run_path(command.script, run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    if len(threads - {"jemalloc_bg_thd"}) > 1:  # Arrow's allocator starts its thread again after a fork; others do not
        sys.exit(f"threads run, which a fork would lose: {threads}")
    gc.freeze()  # what is there already is not searched for garbage when a command ends, which would take a second
    become(*serve(sys.argv[1]))
