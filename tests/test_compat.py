"""What the plugin changes in fairseq's commands, and what it leaves alone outside them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from fairseq_icl.compat.models import replaced_linear, without_initialisation
from tests.commands import Result, run_script

COMMAND = """
import contextlib, sys, threading, time
import fairseq_icl.tasks
from fairseq import options
from fairseq_icl.errors import UserError
sys.argv = ["fairseq-train", "data"]
%s
threading.Thread(target=time.sleep, args=(%d,)).start()
try:
    raise UserError("first line\\nsecond line")
except UserError as error:
    raise Exception("Cannot load") from error
"""


def run(code: str) -> subprocess.CompletedProcess:
    """In a new interpreter, where nothing is imported."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


def run_with_fairseq(folder: Path, code: str) -> Result:
    (folder / "script.py").write_text(code)
    return run_script(folder / "script.py")


def test_importing_the_plugin_turns_on_nobodys_debug_messages():
    done = run("import fairseq_icl.api, logging; print(logging.getLogger().level == logging.WARNING)")
    assert done.stdout.strip() == "True"


def test_uncaught_error_ends_a_command_in_one_line_even_with_threads_alive(tmp_path: Path):
    parse = "with contextlib.suppress(RuntimeError): options.parse_args_and_arch(options.get_training_parser())"
    done = run_with_fairseq(tmp_path, COMMAND % (parse, 60))
    assert done.code == 2
    assert done.stderr.strip().splitlines()[-1] == "error: first line second line"
    assert "Traceback" not in done.stderr


def test_uncaught_error_of_a_script_stays_an_exception(tmp_path: Path):
    done = run_with_fairseq(tmp_path, COMMAND % ("", 0))
    assert done.code == 1
    assert "Traceback" in done.stderr
    assert "UserError: first line" in done.stderr
    assert done.stderr.strip().splitlines()[-1] == "Exception: Cannot load"


def test_other_errors_of_a_command_keep_their_traceback(tmp_path: Path):
    code = "from fairseq_icl.compat.command_line import show_user_errors_in_one_line as show; show(); 1 / 0"
    done = run_with_fairseq(tmp_path, code)
    assert done.code == 1
    assert done.stderr.strip().splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_torch_gets_its_function_back_after_an_error():
    before = functional.linear
    with replaced_linear(lambda *arguments: arguments[0]):
        assert nn.Linear(2, 3)(torch.ones(2)).tolist() == [1, 1]
    assert functional.linear is before
    with pytest.raises(KeyError), replaced_linear(lambda *arguments: arguments[0]):
        raise KeyError("stop")
    assert functional.linear is before


def test_initialisation_is_skipped_inside_and_back_after_an_error():
    tensor, before = torch.zeros(3), nn.init.normal_
    with without_initialisation():
        assert nn.init.normal_(tensor) is tensor
    assert not tensor.any()
    with pytest.raises(KeyError), without_initialisation():
        raise KeyError("stop")
    assert nn.init.normal_ is before


def test_what_fairseq_needs_for_other_tasks_is_imported_when_it_is_used():
    code = """
import sys, fairseq_icl.compat
from fairseq.criterions import sentence_prediction as pairs
from fairseq.tasks import audio_classification as audio
print([name for name in sys.modules if name.split(".")[0] in ("scipy", "sklearn")])
print(pairs.f1_score([1, 1, 0, 0], [1, 1, 1, 0]), audio.sklearn_metrics.f1_score([1, 0], [1, 1]))
import scipy.stats, sklearn.metrics
print(sklearn.metrics.f1_score([1, 1, 0, 0], [1, 1, 1, 0]), scipy.stats.pearsonr([1, 2, 3], [1, 2, 4]).statistic > 0.9)
"""
    done = run(code)
    assert (done.stdout.splitlines(), done.stderr) == (["[]", "0.8 0.6666666666666666", "0.8 True"], "")
