"""What the process of simulated GPUs runs first; nothing here may import torch before the simulation."""

from collections.abc import Callable
from typing import Any


def prepared() -> None:
    """Start the simulation, with the arithmetic of tests: one thread, and attention by the same kernel everywhere."""
    from tests.gpu import simulated_gpu

    simulated_gpu.start(2)  # fairseq takes the number of GPUs for a default while it is imported
    import torch

    torch.set_num_threads(1)


def called(function: Callable[..., Any], devices: int, arguments: tuple[Any, ...]) -> Any:
    """What the function returns on so many GPUs; counters begin at zero."""
    from tests.gpu.simulated_gpu import GPU

    GPU.reset(devices)
    return function(*arguments)
