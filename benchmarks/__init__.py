"""`python -m benchmarks`: our way and the authors' way, measured on the same model, prompts and machine in one run.

Our way is `observe`, `fine_tuned` and `compare`, called as anybody would call them; the authors' way is in authors.py.
Needs a clone of the repository.
"""

import subprocess
import sys
from pathlib import Path

from fairseq_icl import compat  # noqa: F401 - before anything imports fairseq

CLONE = Path(__file__).resolve().parents[1]


def last_line_of(module: str, *arguments: str) -> str:
    """What `python -m benchmarks.MODULE ARGUMENTS` prints last: measured in a process that nothing else has used."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=CLONE).stdout.splitlines()[-1]
