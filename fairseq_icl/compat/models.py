"""Checkpoints and modules: what may be unpickled, what is saved and taken up again, initialised and multiplied."""

import argparse
import collections
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer
from omegaconf import DictConfig, ListConfig, base, nodes
from torch import Tensor, nn
from torch.nn import functional

from fairseq_icl.errors import UserError, find_user_error

CHECKPOINT_CLASSES: list[Any] = [
    argparse.Namespace,
    *(DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, typing.Any),
    *(getattr(nodes, name) for name in dir(nodes) if name.endswith("Node")),
    *(collections.defaultdict, dict, list, int),
]
"""What `args` checkpoints, and old ones whose `cfg` is an OmegaConf tree, hold besides tensors and plain containers.

These classes hold data and run nothing when they are rebuilt; anything else in a checkpoint stays refused.
"""


def resume_tasks() -> None:
    """Give a training that goes on its task's state back: fairseq saves it, as `task_state`, and never reads it."""
    load = Trainer.load_checkpoint

    def load_checkpoint(self: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        extra_state = load(self, filename, *args, **kwargs)
        if getattr(self.task, "resumes", False) and self.get_num_updates() > 0:  # others were not written for it
            self.task.load_state_dict(checkpoint_utils.load_checkpoint_to_cpu(filename).get("task_state", {}))
        return extra_state

    Trainer.load_checkpoint = load_checkpoint


def tell_failed_saves() -> None:
    """One clear line, and nothing left behind, where fairseq cannot write to `--save-dir` or training was refused.

    fairseq logs a traceback of torch's file writer, leaves a `.tmp` behind, and writes a whole `crash.pt` for every
    exception of a training step, a UserError included (fairseq/checkpoint_utils.py, fairseq/trainer.py).
    """
    save, verify = checkpoint_utils.torch_persistent_save, checkpoint_utils.verify_checkpoint_directory

    def torch_persistent_save(obj: Any, filename: str, *args: Any, **kwargs: Any) -> None:
        if Path(filename).name == "crash.pt" and find_user_error(sys.exc_info()[1]) is not None:
            return
        try:
            save(obj, filename, *args, **kwargs)
        except (OSError, RuntimeError) as error:
            Path(f"{filename}.tmp").unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else "is the disk full?"
            said = f"{filename}: the checkpoint cannot be written ({reason})"
            raise UserError(f"{said}; free space or change --save-dir") from error

    def verify_checkpoint_directory(save_dir: str) -> None:
        try:
            verify(save_dir)
        except OSError as error:
            raise UserError(f"--save-dir {save_dir}: cannot be written ({error.strerror}); choose another") from error

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    checkpoint_utils._torch_persistent_save = torch.save
    checkpoint_utils.verify_checkpoint_directory = verify_checkpoint_directory


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """While open, attributes of `owner` (a module, an object) have other values."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def without_initialisation() -> AbstractContextManager[None]:
    """Skip the random initialisation of weights that are read from a file anyway: 20 s at 1.3B."""
    # fairseq's modules initialise themselves when they are made; torch's own `skip_init` reaches single modules only.
    names = ("normal_", "uniform_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "constant_")
    return replaced(nn.init, **dict.fromkeys(names, lambda tensor, *args, **kwargs: tensor))


def replaced_linear(linear: Callable[..., Tensor]) -> AbstractContextManager[None]:
    """Inside, torch's linear layers and its fused attention multiply by `linear`.

    The function is replaced in torch's own module because both look it up there; a torch function mode would not do,
    since the fused attention calls itself without end under one that is still active within it.
    """
    return replaced(functional, linear=linear)
