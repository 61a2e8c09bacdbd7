"""fairseq's command line: our flags in it and in its help, values checked and honoured, errors of one line."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from types import TracebackType
from typing import Any, NoReturn, Optional

from fairseq import checkpoint_utils, options
from fairseq.dataclass import ChoiceEnum
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.registry import REGISTRIES
from omegaconf import DictConfig

from fairseq_icl.errors import UserError, exit_with, find_user_error
from fairseq_icl.settings import SETTINGS

TASK = "demonstration_prompting"


def flag(name: str, kind: Any, default: Any, text: str, **metadata: Any) -> tuple[str, Any, Any]:
    """(name, type, field) of one flag, for fairseq's dataclasses."""
    return name, kind, field(default=default, metadata={"help": text, **metadata})


def flags_of(component: str) -> list[tuple[str, Any, Any]]:
    """(name, type, field) of the settings that are flags of our task or of a criterion, for fairseq's dataclasses."""
    flags = []  # fairseq's parser knows Optional[X], not X | None, and wants choices as an enumeration of its own
    for known in SETTINGS.values():
        if known.is_flag_of(component):
            kind: Any = ChoiceEnum(list(known.choices)) if known.choices else known.kind
            text, default = known.help, known.default
            if known.paper is not None:
                text += f" (authors' code: {known.default}; paper: {known.paper}; default: as --reading says)"
                default = None
            kind = Optional[kind] if known.optional or known.paper is not None else kind  # noqa: UP045
            flags.append(flag(known.name, kind, default, text))
    return flags


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
    """Let --precision and fairseq's --fp16 and --bf16 say the same, whichever was given."""
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
        parsed.tpu = False  # fairseq takes --bf16 for a wish to run on one, which it then looks for


def log_configurations_at_debug_level() -> None:
    """fairseq-train's line of its whole configuration, 12 kB, is shown with LOGLEVEL=DEBUG only, fairseq's variable."""

    def look(record: logging.LogRecord) -> bool:
        if not isinstance(record.msg, DictConfig):
            return True
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return os.environ.get("LOGLEVEL", "INFO").upper() == "DEBUG"

    logging.getLogger("fairseq_cli.train").addFilter(look)


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
