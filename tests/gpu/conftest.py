"""The process in which tests meet simulated GPUs: torch has to be imported there after the simulation."""

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.started import called, prepared
from tests.world import World, make_world

OnGPUs = Callable[..., Any]
"""on_gpus(function, *arguments, devices=1): what a module's function returns where there are so many GPUs."""


def missing() -> str | None:
    """Why GPUs cannot be simulated here."""
    if not torch.__version__.startswith("2.13."):
        return f"GPUs are simulated with private parts of torch 2.13; this is {torch.__version__}"
    if torch.version.cuda is not None:
        return "this torch has CUDA of its own; the simulation needs a build for CPUs"
    return None if shutil.which("g++") else "GPUs are simulated with thirty lines of C++; install g++"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if reason is not None and item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason=reason))


def simulated(devices: int, memory: int | None = None) -> dict[str, str]:
    """Variables with which a command, and all that it starts, has so many simulated GPUs of so many bytes."""
    path = [str(Path(__file__).parent / "at_start"), *filter(None, [os.environ.get("PYTHONPATH")])]
    limit = {} if memory is None else {"SIMULATED_MEMORY": str(memory)}
    return {"PYTHONPATH": os.pathsep.join(path), "SIMULATED_GPUS": str(devices), **limit}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("gpu") / "w")


@pytest.fixture(scope="session")
def on_gpus() -> Iterator[OnGPUs]:
    """One process with two simulated GPUs for all tests."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned, initializer=prepared) as pool:

        def run(function: Callable[..., Any], *arguments: Any, devices: int = 1) -> Any:
            return pool.submit(called, function, devices, arguments).result()

        yield run
