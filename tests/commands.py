"""Real commands in real processes, as a user types them."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
    """Run one of the environment's console commands (fairseq-train, fairseq-icl ...), in a shell set up before it."""
    words = [str(BIN / command), *map(str, arguments)]
    if shell_prefix:
        words = ["bash", "-c", f"{shell_prefix} exec {shlex.join(words)}"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | environment
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=variables, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


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
