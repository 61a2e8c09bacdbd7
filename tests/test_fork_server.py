"""Commands that the tests start by forking are processes like any others."""

import os
from pathlib import Path

import pytest

from tests.commands import Result, run, run_script, server_for

SCRIPT = """
import os, signal, sys
print(os.getpid(), os.getcwd(), sys.argv[1:], os.environ.get("WORD"), sys.path[0], __name__, sys.stdin.read() == "")
print("to stderr", file=sys.stderr)
{end}
"""


def forked(folder: Path, end: str, timeout: float = 60) -> Result:
    (folder / "script").write_text(SCRIPT.format(end=end))
    return run_script(folder / "script", "a", "b c", timeout=timeout)


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGTERM)", -15), ("os._exit(3)", 3), ("1 / 0", 1)],
)
def test_a_forked_command_has_its_own_place_and_its_own_end(
    tmp_path: Path, end: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORD", "word")
    result = forked(tmp_path, f"sys.stdout.flush(); {end}")
    process, *rest = result.stdout.split(" ", 1)
    assert int(process) != os.getpid()
    assert rest == [f"{tmp_path} ['a', 'b c'] word {tmp_path} __main__ True\n"]
    assert result.stderr.startswith("to stderr\n")
    assert ("ZeroDivisionError" in result.stderr) == (end == "1 / 0")
    assert result.code == code


def test_what_one_does_another_does_not_see(tmp_path: Path) -> None:
    assert forked(tmp_path, "sys.modules['json'].seen = True").code == 0
    assert forked(tmp_path, "assert not hasattr(sys.modules['json'], 'seen')").code == 0


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        forked(tmp_path, "import time; time.sleep(60)", timeout=0.5)


def test_the_plugin_is_left_to_user_dir_in_fairseqs_commands(tmp_path: Path) -> None:
    assert forked(tmp_path, "assert 'fairseq' in sys.modules and 'fairseq_icl' not in sys.modules").code == 0


def test_variables_that_count_at_the_start_get_a_start_of_their_own() -> None:
    server = server_for(plugin=True)
    variables = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="default")
    assert server.serves(variables)
    assert server.serves(variables | {"WORD": "word"})
    assert not server.serves(variables | {"PYTHONPATH": "elsewhere"})
    assert run("fairseq-icl", "--version", PYTHONWARNINGS="ignore").code == 0
