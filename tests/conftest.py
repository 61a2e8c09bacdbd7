"""Options and settings of the whole test run."""

import importlib.util
import os
import secrets
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

SET_A = Path(__file__).parent / "golden" / "set_a"

NOT_WITH_SIMULATED_GPUS = {
    "tests/gpu/": "starts simulations of its own",
    "tests/benchmarks/": "measures time and memory of the CPU",
    "tests/browser/": "looks at pages, computes nothing",
    "tests/cli/test_scoring.py::test_batches_and_processes_change_nothing": "torch.cuda.ByteTensor is not simulated",
    "tests/cli/test_slurm.py": "its jobs run on a cluster of CPUs",
    "tests/test_setup_script.py": "makes environments, which import nothing of ours",
    "tests/test_wheel.py": "makes an environment of its own, without the simulation",
    "tests/test_help.py::test_help_imports_nothing_slow": "the simulation imports torch before anything else",
    "tests/test_import.py": "the simulation imports torch before anything else",
    "tests/criterions/test_layer_causal_parallel.py": "DistributedDataParallel asks CUDA itself",
    "tests/models/test_dual_linear.py::test_a_frozen_layer_costs_two_products": "the profiler sees operators twice",
}
"""Beginnings of the names of tests that say nothing where every process has simulated GPUs, and why."""

# print_blob: a failing case prints what reproduces it; no deadline: the machine may be busy with other tests.
settings.register_profile("project", print_blob=True, deadline=None)
settings.load_profile("project")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With SIMULATED_GPUS (see CONTRIBUTING.md), leave out what has nothing to do with them."""
    for item in items if "SIMULATED_GPUS" in os.environ else []:
        for name, reason in NOT_WITH_SIMULATED_GPUS.items():
            if item.nodeid.startswith(name):
                item.add_marker(pytest.mark.skip(reason=f"with simulated GPUs: {reason}"))


def pytest_report_header(config: pytest.Config) -> str:
    shown = chromium() or "none, so the tests of the report's page are skipped; install chromium and playwright"
    slurm = "here" if has_slurm() else "none, so the tests of cluster=slurm are skipped; see scripts/slurm.sh install"
    return f"fuzzing: repeat with --hypothesis-seed={config.option.hypothesis_seed}\nbrowser: {shown}\nslurm: {slurm}"


def chromium() -> str | None:
    """A Chromium that tests can drive, if there is one."""
    if importlib.util.find_spec("playwright") is None:
        return None
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def has_slurm() -> bool:
    """Whether a SLURM can be started for the tests (scripts/slurm.sh)."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    return os.getuid() == 0 and all(shutil.which(program, path=path) for program in programs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir", type=Path, default=SET_A, help="folder of golden numbers in the layout of tests/golden/set_a"
    )
