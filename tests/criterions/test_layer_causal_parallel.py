"""Under torch's DistributedDataParallel every process gets the mean of the gradients of all."""

from pathlib import Path

import torch
from fairseq.distributed import ModuleProxyWrapper
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from tests.criterions.tiny_model import build_model, criterion, gradients, sample_of

SEQUENCES = ([0, 5, 7, 4, 9, 11], [0, 8, 6])
LAYERS = (None, "1-")


def train(rank: int, folder: Path) -> None:
    """One process of two: for every layer range two steps, the gradients of the second are stored."""
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    for layers in LAYERS:
        model = build_model()
        wrapped = ModuleProxyWrapper(DistributedDataParallel(model, find_unused_parameters=layers is not None))
        for _ in range(2):  # a second pass fails unless the first was synchronised
            found = gradients(model, criterion(layers=layers)(wrapped, sample_of([SEQUENCES[rank]]))[0])
        torch.save(found, folder / f"{layers}_{rank}.pt")
    distributed.destroy_process_group()


def mean_gradients(layers: str | None) -> dict[str, Tensor]:
    model = build_model()
    parts = [gradients(model, criterion(layers=layers)(model, sample_of([tokens]))[0]) for tokens in SEQUENCES]
    return {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}


def test_both_processes_get_the_mean_gradient(tmp_path: Path):
    torch.multiprocessing.spawn(train, (tmp_path,), nprocs=2)
    for layers in LAYERS:
        expected = mean_gradients(layers)
        for rank in range(2):
            found = torch.load(tmp_path / f"{layers}_{rank}.pt")
            used = {name: gradient for name, gradient in found.items() if name in expected or gradient.any()}
            torch.testing.assert_close(used, expected)
