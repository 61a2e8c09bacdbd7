"""Every workaround for a version of fairseq, torch or Hydra, each with its reason. There are none elsewhere.

Written against fairseq-fixed 0.12.3.1 (fairseq 0.12.2 repaired for Python 3.11) and torch 2.13. The rooms that use
fairseq import this module first. `apply` changes fairseq's own commands; it is called when our task is registered
(fairseq does that for `--user-dir`), never by `import fairseq_icl`, and may be called again harmlessly.
"""

import argparse
import collections
import importlib
import logging
import os
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, Optional

# Before fairseq is imported, which announces at once that an optional package of its speech tasks is missing, and turns
# on the debug messages of every package.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
_level = logging.getLogger().level

# Before torch multiplies: products in bf16 would use AMX where the processor announces it, and virtual machines exist
# that announce it and then kill the process (Illegal instruction). fp32 does not use it. A value of the user's stays.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _called_later(name: str) -> ModuleType:
    """A stand-in for a module: each of its functions imports it when it is called."""

    def function(attribute: str) -> Callable[..., Any]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *args, **kwargs: getattr(importlib.import_module(name), attribute)(*args, **kwargs)

    module = ModuleType(name)
    vars(module)["__getattr__"] = function
    return module


# While fairseq is imported, which imports these for the scores of two tasks, of audio and of sentence pairs: it would
# be a third of the time in which a command starts.
_later: dict[str, ModuleType] = {}
for _package, _part in (("scipy", "stats"), ("sklearn", "metrics")):
    if _package not in sys.modules:
        _later |= {name: _called_later(name) for name in (_package, f"{_package}.{_part}")}
        vars(_later[_package])[_part] = _later[f"{_package}.{_part}"]
sys.modules.update(_later)

import torch
from fairseq import checkpoint_utils, options
from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.optim import FP16Optimizer
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from fairseq.registry import REGISTRIES
from fairseq.trainer import Trainer
from omegaconf import DictConfig, ListConfig, base, nodes
from torch import Tensor, nn
from torch.nn import functional

from fairseq_icl.errors import UserError, exit_with, find_user_error
from fairseq_icl.settings import SETTINGS

logging.getLogger().setLevel(_level)
for _name in _later:
    del sys.modules[_name]

TASK = "demonstration_prompting"
CHECKPOINT_CLASSES: list[Any] = [
    argparse.Namespace,
    *(DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, typing.Any),
    *(getattr(nodes, name) for name in dir(nodes) if name.endswith("Node")),
    *(collections.defaultdict, dict, list, int),
]
"""What `args` checkpoints, and old ones whose `cfg` is an OmegaConf tree, hold besides tensors.

torch >= 2.6 unpickles tensors and plain containers only. These classes hold data and run nothing when they are
rebuilt; anything else in a checkpoint stays refused.
"""


def apply(restore: Callable[[str, dict[str, Any]], Any]) -> None:
    """Change fairseq's commands, once; `restore` makes model and task of a checkpoint for `fairseq-validate`."""
    global _applied
    if _applied:
        return
    _applied = True
    silence_warnings_about_fairseq()
    torch.serialization.add_safe_globals(CHECKPOINT_CLASSES)  # for fairseq's own reading of checkpoints
    watch_command_lines()
    honour_flags_in_validate(restore)
    resume_tasks()
    gather_without_cuda()
    tell_failed_saves()
    train_in_half_precision_without_cuda()
    tell_lost_loss_scale()


_applied = False


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


def watch_command_lines() -> None:
    """In fairseq's commands: `--help` shows the plugin's flags, and a UserError is one line and exit code 2.

    fairseq answers `--help` in its first parse, before the chosen task, model and criterion have added their flags
    (fairseq/options.py, parse_args_and_arch), so that plugin flags never show. Nothing happens where no command line
    is parsed: in a notebook or a script exceptions stay what they are.
    """
    original = options.parse_args_and_arch

    def parse_args_and_arch(parser: argparse.ArgumentParser, input_args: Any = None, *args: Any, **kwargs: Any) -> Any:
        words = sys.argv[1:] if input_args is None else input_args
        if input_args is None:
            show_user_errors_in_one_line()
        if "-h" in words or "--help" in words:
            _add_plugin_groups(parser)
            parser.parse_args(["--help"])
        if TASK not in words and f"--task={TASK}" not in words:
            try:
                return original(parser, input_args, *args, **kwargs)
            except argparse.ArgumentError as error:  # two parts want one flag: attention_lm's and SGD's --momentum
                raise UserError(f"{error}; choose another --optimizer or --arch") from error
        parser.error = _refuse  # type: ignore[method-assign]
        _refuse_two_precisions(words)
        try:
            parsed = original(parser, input_args, *args, **kwargs)
        except UserError:
            raise
        except Exception as error:  # fairseq evaluates lists, and --lr abc, 1/0 or 10**999 end in any way
            reason = str(error)[:200] or type(error).__name__
            raise UserError(f"the command line cannot be read ({reason}); --help shows the flags") from error
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        _check_own_settings(namespace)
        _agree_on_precision(namespace, words)
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


def _refuse(message: str) -> NoReturn:
    """In the place of argparse's `error`, which prints the usage of all of fairseq, 139 lines."""
    raise UserError(f"{message}; --help shows the flags")


def _check_own_settings(parsed: argparse.Namespace) -> None:
    """The settings among the flags, fairseq's own (--lr, --clip-norm, --seed) included, are inside their bounds."""
    for name, known in SETTINGS.items():
        value = getattr(parsed, name, None)
        if value == []:
            raise UserError(f"--{name} []: give a number")
        for single in value if name == "lr" and isinstance(value, list) else [value]:
            if single is not None:
                known.check(str(single) if known.choices else single)


def _refuse_two_precisions(words: Iterable[str]) -> None:
    given = sorted({word[2:] for word in words} & set(SETTINGS["precision"].choices))
    if len(given) > 1:
        raise UserError(f"--precision, --fp16, --bf16: {' and '.join(given)} at once; give one of them")


def _agree_on_precision(parsed: argparse.Namespace, words: Sequence[str]) -> None:
    """Let --precision and fairseq's --fp16 and --bf16 say the same, whichever was given.

    fairseq takes --bf16 for a wish to run on a TPU, which it then looks for.
    """
    given = {name for name in ("fp16", "bf16") if getattr(parsed, name, False)}
    if any(word.split("=")[0] == "--precision" for word in words):
        given.add(str(parsed.precision))
    _refuse_two_precisions([f"--{name}" for name in given])
    memory_efficient = [name for name in ("fp16", "bf16") if getattr(parsed, f"memory_efficient_{name}", False)]
    if memory_efficient and getattr(parsed, "optimizer", None) == "sgd":
        name = memory_efficient[0]
        raise UserError(f"--memory-efficient-{name}: fairseq does not have it for SGD; use --precision {name}")
    for name in given:
        parsed.precision = name
        parsed.fp16, parsed.bf16 = name == "fp16", name == "bf16"
    if getattr(parsed, "bf16", False) and "--tpu" not in words:
        parsed.tpu = False


def show_user_errors_in_one_line() -> None:
    """Make an uncaught UserError end this command in one line and exit code 2 (fairseq has no place of its own)."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        message = find_user_error(error)
        if message is not None:
            exit_with(message)
        previous(kind, error, traceback)

    sys.excepthook = excepthook


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
                "model architecture; pretrained_lm takes it, and the weights, from the checkpoint --pretrained; "
                "attention_lm is transformer_lm with --attention softmax, or momentum with --momentum ETA"
            )
        if not action.help:
            name = (action.option_strings or [action.dest])[0]
            action.help = plain.get(name, "an option of fairseq's own, which its authors left without description")


def honour_flags_in_validate(restore: Callable[[str, dict[str, Any]], Any]) -> None:
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
            return restore(filenames[0], arg_overrides or {})
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


def resume_tasks() -> None:
    """Give a training that goes on its task's state back: fairseq saves it, as `task_state`, and never reads it.

    Only tasks that say so (`resumes`) get theirs: others were not written for it.
    """
    load = Trainer.load_checkpoint

    def load_checkpoint(self: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        extra_state = load(self, filename, *args, **kwargs)
        if getattr(self.task, "resumes", False) and self.get_num_updates() > 0:
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


def train_in_half_precision_without_cuda() -> None:
    """Let fairseq's FP16Optimizer and its skipping of overflows work on the CPU.

    The optimizer asks CUDA for the device of its flat fp32 copy (fairseq/optim/fp16_optimizer.py), and after an
    overflow the trainer puts a zero on the GPU (fairseq/trainer.py, train_step), if there is one or not.
    """
    build, step = FP16Optimizer.build_fp32_params.__func__, Trainer.train_step

    def build_fp32_params(cls: Any, args: Any, params: Any, flatten: bool = True) -> Any:
        if not flatten or params[0].is_cuda:
            return build(cls, args, params, flatten)
        flat = nn.Parameter(torch.cat([parameter.detach().float().flatten() for parameter in params]))
        flat.grad = torch.zeros_like(flat)
        return {params[0].device.index: flat}

    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.cuda:
            return step(self, *args, **kwargs)
        original = Tensor.cuda
        Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
        try:
            return step(self, *args, **kwargs)
        finally:
            Tensor.cuda = original  # type: ignore[method-assign]

    FP16Optimizer.build_fp32_params = classmethod(build_fp32_params)
    Trainer.train_step = train_step


def tell_lost_loss_scale() -> None:
    """One clear line where no loss scale is small enough; fairseq would write a crash.pt and a traceback."""
    original = DynamicLossScaler.check_overflow

    def check_overflow(self: Any, grad_norm: Any) -> None:
        try:
            original(self, grad_norm)
        except FloatingPointError as error:
            raise UserError(
                f"the gradient overflows fp16 at every loss scale down to {self.min_loss_scale:g}; lower the learning "
                "rate, or use precision=bf16 or fp32"
            ) from error

    DynamicLossScaler.check_overflow = check_overflow


def checkpoint_classes_allowed() -> Any:
    """A context in which torch unpickles CHECKPOINT_CLASSES; torch's own forgets at its end what was allowed before."""
    known = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([kind for kind in CHECKPOINT_CLASSES if kind not in known])


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Skip the random initialisation of weights that are read from a file anyway: 20 s at 1.3B.

    fairseq's modules initialise themselves when they are made, and torch's own `skip_init` reaches single modules only.
    """
    names = ("normal_", "uniform_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "constant_")
    originals = {name: getattr(nn.init, name) for name in names}
    try:
        for name in names:
            setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


@contextmanager
def replaced_linear(linear: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, torch's linear layers and its fused attention multiply by `linear`.

    The function is replaced in torch's own module because both look it up there; a torch function mode would not do,
    since the fused attention calls itself without end under one that is still active within it.
    """
    original = functional.linear
    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = original


def true_gradients(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[list[Tensor | None], float]:
    """(gradients, factor): `optimizer` will step with factor * gradients; changing them in place changes the step.

    In fp32 these are the parameters' own gradients and 1. fairseq's fp16 optimizers keep loss-scaled gradients and
    apply the scale, the average and --clip-norm as one pending factor; the plain one steps with fp32 copies. None of
    that can be asked for, so it is read from their private attributes.
    """
    factor = float(getattr(optimizer, "_multiply_factor", 1.0))
    masters = getattr(optimizer, "fp32_params", None)
    if masters is None:
        return [parameter.grad for parameter in parameters], factor
    optimizer._sync_fp16_grads_to_fp32()
    if optimizer.has_flat_params:
        copies = _slices_of_flat(optimizer.fp16_params, masters)
    else:
        copies = {id(half): full.grad for half, full in zip(optimizer.fp16_params, masters, strict=True)}
    return [copies[id(parameter)] for parameter in parameters], factor


def loss_scale(optimizer: Any) -> float:
    """What fairseq multiplies the loss with before `backward`: 1, or the scale of fp16 or of mixed precision."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale() if hasattr(scaler, "get_scale") else scaler.loss_scale)


def _slices_of_flat(halves: list[nn.Parameter], masters: dict[Any, nn.Parameter]) -> dict[int, Tensor]:
    """id of an fp16 parameter -> its part of the flat fp32 gradient, which lies in parameter order on each device."""
    copies: dict[int, Tensor] = {}
    offsets = dict.fromkeys(masters, 0)
    for half in halves:
        device = half.device.index
        gradient = masters[device].grad
        assert gradient is not None
        copies[id(half)] = gradient[offsets[device] : offsets[device] + half.numel()]
        offsets[device] += half.numel()
    return copies


def flag(name: str, kind: Any, default: Any, text: str, **metadata: Any) -> tuple[str, Any, Any]:
    """(name, type, field) of one flag, for fairseq's dataclasses."""
    return name, kind, field(default=default, metadata={"help": text, **metadata})


def flags_of(component: str) -> list[tuple[str, Any, Any]]:
    """(name, type, field) of the settings that are flags of our task or of a criterion, for fairseq's dataclasses.

    fairseq's parser knows Optional[X], not X | None, and wants choices as an enumeration of its own.
    """
    flags = []
    for known in SETTINGS.values():
        if known.is_flag_of(component):
            kind: Any = ChoiceEnum(list(known.choices)) if known.choices else known.kind
            text, default = known.help, known.default
            if known.is_reading:
                text += f" (authors' code: {known.default}; paper: {known.paper}; default: as --reading says)"
                default = None
            kind = Optional[kind] if known.optional or known.is_reading else kind  # noqa: UP045
            flags.append(flag(known.name, kind, default, text))
    return flags
