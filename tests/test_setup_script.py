"""scripts/setup.sh refuses in one line what cannot work, and leaves nothing behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def set_up(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "scripts").mkdir(exist_ok=True)
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **environment}
    command = ["bash", "scripts/setup.sh"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def old_python(tmp_path: Path) -> str:
    """An interpreter that says what Python 3.9 says of its version."""
    script = tmp_path / "python3.9"
    script.write_text("#!/bin/sh\necho 3.9\n")
    script.chmod(0o755)
    return str(script)


def test_an_old_python_and_one_that_is_not_there_are_refused(tmp_path: Path, old_python: str):
    for python, told in (
        (old_python, "is Python 3.9, 3.11 to 3.13 is needed: PYTHON="),
        ("/none", "/none: not found;"),
    ):
        done = set_up(tmp_path, PYTHON=python)
        assert done.returncode == 2
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / ".venv").exists()


def test_a_missing_compiler_is_told(tmp_path: Path):
    done = set_up(tmp_path, PYTHON=sys.executable, CXX="/none/c++")
    assert done.returncode == 2
    assert done.stderr.startswith("setup: /none/c++: no C++ compiler, or no Python.h for")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / ".venv").exists()


def test_an_environment_of_an_old_python_is_made_anew(tmp_path: Path, old_python: str):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(old_python, tmp_path / ".venv" / "bin" / "python")
    assert set_up(tmp_path, PYTHON=old_python).returncode == 2
    assert not (tmp_path / ".venv").exists()
