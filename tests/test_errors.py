"""One line and exit code 2, however deep the error was raised."""

import subprocess
import sys

import pytest
import torch

from fairseq_icl.errors import UserError, find_user_error


def raised(action) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        action()
    return caught.value


def test_wrapped_errors_are_found():
    def wrap() -> None:
        try:
            raise UserError("rows.jsonl:3: not JSON")
        except UserError:
            raise Exception("Cannot load") from None

    assert find_user_error(raised(wrap)) == "rows.jsonl:3: not JSON"


def test_a_full_gpu_is_one_line_wherever_it_happens():
    def wrap() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB. See docs")
        except torch.OutOfMemoryError:
            raise Exception("in the library") from None

    found = find_user_error(raised(wrap))
    assert found is not None
    assert found.startswith("CUDA out of memory; observe fewer rows (limit=N)")


def test_other_errors_are_not_taken_for_user_errors():
    assert find_user_error(raised(lambda: 1 / 0)) is None


def test_error_of_a_child_process_is_found_in_its_text():
    class ProcessRaisedException(Exception):
        pass

    error = ProcessRaisedException("-- Process 1 --\nTraceback\nfairseq_icl.errors.UserError: give --dict\n")
    assert find_user_error(error) == "give --dict"


def test_a_command_ends_in_one_line_even_with_threads_alive():
    code = """
import threading, time
from fairseq_icl.errors import exit_with
threading.Thread(target=time.sleep, args=(60,)).start()
print("so far")
exit_with("first line\\nsecond line")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert done.stdout == "so far\n"
    assert done.stderr == "error: first line second line\n"
