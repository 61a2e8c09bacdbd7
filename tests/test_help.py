"""Help: complete, and there at once, which means that nothing slow is imported for it."""

import os
import subprocess
import sys

import pytest

from fairseq_icl.commands import COMMANDS, main
from fairseq_icl.commands.command_line import replicate
from fairseq_icl.replication.configuration import ClusterSettings, RunConfiguration
from fairseq_icl.settings import SETTINGS

SLOW = ("torch", "fairseq", "hydra", "transformers")
SCRIPT = """
import sys
from fairseq_icl.commands import main
try:
    code = main([sys.argv[1], "--help"])
except SystemExit as end:
    code = end.code
print("imported:", *(name for name in sys.argv[2:] if name in sys.modules))
sys.exit(code)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command: str):
    run = [sys.executable, "-c", SCRIPT, command, *SLOW]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("imported:\n")
    assert "usage: fairseq-icl" in done.stdout


def test_help_of_replicate_has_every_key_with_choices_and_defaults():
    text = " ".join(replicate().format_help().split())
    keys = [name for name in RunConfiguration.model_fields if name != "datasets"]
    for name in (*keys, "dataset", "k", *(f"cluster.{key}" for key in ClusterSettings.model_fields), *SETTINGS):
        assert f" {name}: " in text, name
    assert "out: results folder; finished cells in it are not computed again (default: runs/${name})" in text
    assert "number of demonstrations k (default: as the paper says)" in text
    assert "one of fp32, fp16, bf16 (default: fp32)" in text
    assert "none (ZSL and ICL only) (default: [gd])" in text


def test_openmp_threads_of_commands_do_not_spin_unless_the_user_says_how_they_wait(monkeypatch: pytest.MonkeyPatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert main(["--version"]) == 0
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert main(["--version"]) == 0
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert main(["--version"]) == 0
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
