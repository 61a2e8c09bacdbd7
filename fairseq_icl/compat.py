"""Every workaround for a version of fairseq or torch, each with its reason. Nothing of the kind stands elsewhere.

Written against fairseq-fixed 0.12.3.1 (fairseq 0.12.2 repaired for Python 3.11) and torch 2.13. `apply` is called when
the package is imported, which fairseq does for `--user-dir`, and may be called again harmlessly.
"""

import argparse
import collections
import logging
import sys
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before fairseq is imported, which announces at once that an optional package of its speech tasks is missing, and turns
# on the debug messages of every package.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
_level = logging.getLogger().level

import torch
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.registry import REGISTRIES
from omegaconf import DictConfig, ListConfig, base, nodes

from fairseq_icl.errors import UserError, find_user_error

logging.getLogger().setLevel(_level)

TASK = "demonstration_prompting"


def apply() -> None:
    """Install all of them, once."""
    if getattr(apply, "done", False):
        return
    apply.done = True
    silence_warnings_about_fairseq()
    allow_checkpoint_classes()
    show_plugin_in_help()
    honour_flags_in_validate()
    gather_without_cuda()
    tell_failed_saves()


def silence_warnings_about_fairseq() -> None:
    """Hide warnings that fairseq 0.12 raises against newer hydra and torch: the user can do nothing about them.

    They would bury our own one-line errors. Each pattern names one known message; others still show.
    """
    for message in (
        r"hydra\.experimental\.",
        r"\s*The version_base parameter is not specified",
        r".*Usage of deprecated keyword in package header",
        r"\s*'config' is validated against ConfigStore schema",
        r"\s*The strict flag in the compose API is deprecated",
        r".*torch\.cuda\.amp\.autocast",
        r"'pin_memory' argument is set as true but no accelerator is found",
        r"Support for mismatched key_padding_mask and attn_mask is deprecated",
        r"`torch\.jit\.script` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=message)


def allow_checkpoint_classes() -> None:
    """Let `args` checkpoints, and old ones whose `cfg` is an OmegaConf tree, load with `weights_only=True`.

    torch >= 2.6 unpickles tensors and plain containers only. These classes hold data and run nothing when they are
    rebuilt; anything else in a checkpoint stays refused.
    """
    omegaconf_nodes = [getattr(nodes, name) for name in dir(nodes) if name.endswith("Node")]
    omegaconf_trees = [DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, typing.Any]
    containers = [collections.defaultdict, dict, list, int]
    torch.serialization.add_safe_globals([argparse.Namespace, *omegaconf_trees, *omegaconf_nodes, *containers])


def show_plugin_in_help() -> None:
    """Make `--help` show the plugin's flags.

    fairseq answers `--help` in its first parse, before the chosen task, model and criterion have added their flags
    (fairseq/options.py, parse_args_and_arch), so that plugin flags never show.
    """
    original = options.parse_args_and_arch

    def parse_args_and_arch(parser: argparse.ArgumentParser, input_args: Any = None, *args: Any, **kwargs: Any) -> Any:
        words = sys.argv[1:] if input_args is None else input_args
        if "-h" in words or "--help" in words:
            _add_plugin_groups(parser)
            parser.parse_args(["--help"])
        return original(parser, input_args, *args, **kwargs)

    options.parse_args_and_arch = parse_args_and_arch


def _add_plugin_groups(parser: argparse.ArgumentParser) -> None:
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    criterions = REGISTRIES["criterion"]
    components = {f"task {TASK}": TASK_DATACLASS_REGISTRY[TASK]} | {
        f"criterion {name}": dataclass
        for name, dataclass in criterions["dataclass_registry"].items()
        if criterions["registry"][name].__module__.startswith("fairseq_icl.")
    }
    for title, dataclass in components.items():
        gen_parser_from_dataclass(parser.add_argument_group(title), dataclass())
    plain = {f"--{name.replace('_', '-')}": f"which registered {name.replace('_', ' ')} to use" for name in REGISTRIES}
    for action in parser._actions:
        if "--task" in action.option_strings:
            action.help = f"which registered task to use, among them {TASK}: {', '.join(sorted(TASK_REGISTRY))}"
        if "--arch" in action.option_strings:
            action.help = (
                "model architecture; pretrained_lm takes it, and the weights, from the checkpoint --pretrained"
            )
        if not action.help:
            name = (action.option_strings or [action.dest])[0]
            action.help = plain.get(name, "an option of fairseq's own, which its authors left without description")


def honour_flags_in_validate() -> None:
    """Make `fairseq-validate --task demonstration_prompting --criterion ... --any-plugin-flag` mean what it says.

    fairseq goes on with the task, criterion and model saved in a `cfg` checkpoint and silently drops the flags
    (fairseq/dataclass/utils.py, overwrite_args_by_name never changes a group's `_name`). With our task the checkpoint
    is data about the model, and everything else comes from the command line.
    """
    original: Callable[..., Any] = checkpoint_utils.load_model_ensemble_and_task

    def load_model_ensemble_and_task(
        filenames: list[str], arg_overrides: dict[str, Any] | None = None, task: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if task is None and (arg_overrides or {}).get("task") == TASK:
            from fairseq_icl.restore import restore

            return restore(filenames[0], arg_overrides)
        return original(filenames, arg_overrides, task, *args, **kwargs)

    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task


def gather_without_cuda() -> None:
    """Let several processes validate without GPUs: fairseq's `all_gather_list` always takes CUDA buffers."""
    original = distributed_utils.all_gather_list

    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        if torch.cuda.is_available():
            return original(data, group, max_size)
        group = distributed_utils.get_global_group() if group is None else group
        gathered = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(gathered, data, group=group)
        return gathered

    distributed_utils.all_gather_list = all_gather_list


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
            raise UserError(
                f"{filename}: the checkpoint cannot be written ({reason}); free space or change --save-dir"
            ) from error

    def verify_checkpoint_directory(save_dir: str) -> None:
        try:
            verify(save_dir)
        except OSError as error:
            raise UserError(f"--save-dir {save_dir}: cannot be written ({error.strerror}); choose another") from error

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    checkpoint_utils._torch_persistent_save = torch.save
    checkpoint_utils.verify_checkpoint_directory = verify_checkpoint_directory
