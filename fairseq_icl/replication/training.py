"""Fine-tune a model in memory as `fairseq-train` would: its parser, its Trainer, the plugin's task and criterions."""

import copy
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fairseq import options
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.data import iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import BaseFairseqModel
from fairseq.tasks import setup_task
from fairseq.trainer import Trainer
from hydra import version
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, flag_override
from torch import Tensor

from fairseq_icl.compat import TASK
from fairseq_icl.errors import UserError
from fairseq_icl.reading import CHOICES
from fairseq_icl.replication.cells import Cell
from fairseq_icl.replication.methods import get_method
from fairseq_icl.replication.model_files import ModelFiles
from fairseq_icl.tasks.demonstration_prompting import DemonstrationPromptingTask
from fairseq_icl.tasks.prompting_config import DemonstrationPromptingConfig

GRADIENTS = "gradients.parquet"


def train_arguments(cell: Cell, files: ModelFiles, data: Path, folder: Path | None = None) -> list[str]:
    """The command line of `fairseq-train` that fine-tunes as the cell says; gradients are recorded in `folder`."""
    settings = cell.settings
    method = get_method(cell.method)
    flags = {
        "--task": TASK,
        "--arch": "pretrained_lm",
        "--dataset": cell.source or cell.dataset,
        "--num-demonstrations": settings.num_demonstrations,
        "--seed": cell.seed,
        "--permutation": cell.permutation,
        "--init": cell.init,
        "--limit": settings.limit,
        "--train-parameters": settings.train_parameters,
        "--switch-labels": settings.switch_labels,
        "--switch-fraction": settings.switch_fraction,
        "--switch-seed": settings.switch_seed,
        "--layer-clip": settings.layer_clip,
        "--layer-clip-value": settings.layer_clip_value,
        "--clip-norm": settings.clip_norm,
        "--optimizer": "sgd",
        "--momentum": 0.0,
        "--weight-decay": 0.0,
        "--lr": settings.learning_rate,
        "--max-epoch": 1,
        "--batch-size": 1,
        "--num-workers": 0,
        "--log-format": "none",
        "--record-gradients": folder and folder / GRADIENTS,
        "--save-dir": folder,  # nothing is saved, but fairseq leaves a file there when training fails
    }
    for name in _reading_flags(method.flags):
        flags[f"--{name.replace('_', '-')}"] = getattr(settings.reading, name)
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return [str(data), *files.flags(), *words, *method.flags, "--record-queries", "--no-save", "--disable-validation"]


def _reading_flags(method_flags: tuple[str, ...]) -> list[str]:
    """The differences between code and paper that the task or the method's criterion has a flag for."""
    criterion = method_flags[method_flags.index("--criterion") + 1] if "--criterion" in method_flags else ""
    known = set(DemonstrationPromptingConfig.__dataclass_fields__)
    if criterion in CRITERION_DATACLASS_REGISTRY:
        known |= set(CRITERION_DATACLASS_REGISTRY[criterion].__dataclass_fields__)
    return [name for name in CHOICES if name in known]


def parse(arguments: list[str]) -> DictConfig:
    """fairseq's configuration for a command line of `fairseq-train`.

    fairseq's conversion of parsed flags takes a second, more than many a cell: command lines with the same flags
    share one conversion, into which the values that differ are put.
    """
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=arguments)
    shape = _flags_of(arguments)
    if shape not in _converted:
        with _outer_hydra():
            _converted[shape] = (copy.deepcopy(args), convert_namespace_to_omegaconf(args))
    earlier, config = _converted[shape]
    config = copy.deepcopy(config)
    changed = {name: value for name, value in vars(args).items() if value != getattr(earlier, name)}
    for title, section in config.items():
        if isinstance(section, DictConfig):
            for name in changed.keys() & section.keys():
                section[name] = changed[name]
        elif isinstance(section, Namespace):  # parts of fairseq older than its dataclasses, such as SGD
            with flag_override(config, "allow_objects", True):
                config[title] = Namespace(**vars(section) | changed)
    return config


_converted: dict[tuple[str, ...], tuple[Namespace, DictConfig]] = {}
STRUCTURAL = ("--task", "--arch", "--criterion", "--optimizer", "--lr-scheduler", "--bpe")
"""Flags whose value decides which other flags there are."""


def _flags_of(arguments: list[str]) -> tuple[str, ...]:
    """The flags of a command line without their values, but with those of the structural ones."""
    flags = []
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--"):
            flags.append(f"{word} {following}" if word in STRUCTURAL else word)
    return tuple(flags)


@contextmanager
def _outer_hydra() -> Iterator[None]:
    """Keep the Hydra that runs us: fairseq's conversion clears the global one and needs the rules of version 1.1."""
    instance = GlobalHydra.instance()
    outer, base = instance.hydra, version.getbase()
    version.setbase("1.1")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*validated against ConfigStore schema")
            yield
    finally:
        instance.clear()
        instance.hydra = outer
        version.setbase(str(base))


def build_task(config: DictConfig) -> DemonstrationPromptingTask:
    """The plugin's task for that configuration."""
    return setup_task(config.task)


def fine_tune(config: DictConfig, task: DemonstrationPromptingTask, model: BaseFairseqModel) -> dict[int, Tensor]:
    """Train `model` in place, one pass over the demonstrations.

    Returns file row -> scaled query vectors (layers, tokens, width) of that demonstration just before learning from it.
    """
    criterion = task.build_criterion(config.criterion)
    trainer = Trainer(config, task, model, criterion)
    epoch = trainer.get_train_iterator(epoch=1)
    steps = iterators.GroupedIterator(epoch.next_epoch_itr(shuffle=False), 1)
    trainer.begin_epoch(1)
    try:
        for samples in steps:
            trainer.train_step(samples)
    except FloatingPointError as error:
        raise UserError(f"fine-tuning diverged at step {trainer.get_num_updates() + 1} ({error}); lower lr") from error
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters() if parameter.requires_grad):
        raise UserError("fine-tuning left weights that are NaN or infinite; lower lr")
    task.finish_recording()
    return dict(task.training_queries)


@contextmanager
def undone_afterwards(model: BaseFairseqModel) -> Iterator[None]:
    """Whatever is trained inside, afterwards the weights that learn are what they were before."""
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in learning.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in learning.items():
                parameter.copy_(before[name])
                parameter.grad = None
