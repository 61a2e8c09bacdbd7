"""From a checkpoint and the flags of a command line to the task and the model that score it."""

from itertools import chain
from pathlib import Path
from typing import Any

from fairseq import tasks
from fairseq.models import BaseFairseqModel
from fairseq.registry import REGISTRIES
from fairseq.tasks import FairseqTask
from omegaconf import MISSING, DictConfig, OmegaConf
from torch import Tensor

from fairseq_icl.compat.command_line import TASK
from fairseq_icl.criterions.icl_similarity import read_finetuned
from fairseq_icl.errors import UserError, naming
from fairseq_icl.models.checkpoints import BASE_REFERENCE
from fairseq_icl.models.files import TOKENIZER_FILES
from fairseq_icl.models.pretrained_lm import PretrainedLMConfig
from fairseq_icl.settings import SETTINGS, check_reading
from fairseq_icl.tasks.demonstration_prompting import DemonstrationPromptingConfig

TAKEN = ("_name", "reading", "data", "dataset", "linearize", "dict", "bpe", *chain(*TOKENIZER_FILES.values()))
"""Options besides the settings that scoring takes from a fine-tuned checkpoint where no flag says otherwise."""


def restore(path: str, flags: dict[str, Any]) -> tuple[list[BaseFairseqModel], DictConfig, FairseqTask]:
    """(models, configuration, task) for `fairseq-validate --path PATH`; `flags` are those explicitly given.

    A fine-tuned checkpoint supplies its own flags as defaults and its base; any other checkpoint is a base model of
    which only architecture and weights count, so that `args` and `cfg` files of one model cannot differ.
    """
    state = read_finetuned(path)
    saved = saved_settings(state["cfg"], path) if state else {}
    task_options = _options(DemonstrationPromptingConfig, saved.get("task", {}), flags)
    if not flags.get("base_model"):
        task_options["base_model"] = _find_base(state, path) if state else path
    if isinstance(task_options.get("seed"), str | None):  # the interpolation of the default
        task_options["seed"] = int(flags.get("seed") or 1)
    if state and len(state["model"]) == 0:
        raise UserError(f"{path}: a fine-tuned checkpoint without weights; train again")
    model_options = {"_name": "pretrained_lm", **_options(PretrainedLMConfig, {}, {})}
    criterion = _criterion(saved.get("criterion", {}), flags)
    cfg = OmegaConf.create({"task": {"_name": TASK, **task_options}, "model": model_options, "criterion": criterion})
    task = tasks.setup_task(cfg.task)
    if not state:
        return [task.build_model(cfg.model)], cfg, task
    with naming(path):
        task.load_state_dict(state["task_state"])
        model = task.build_model(cfg.model)
        model.load_state_dict(state["model"])
        _check_queries(task.training_queries, model, path)
    return [model], cfg, task


def saved_settings(cfg: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """What a fine-tuned checkpoint may say of how it is scored: the settings, the data and the model's files.

    A checkpoint is foreign data: no path to write is taken from it and no interpolation (`${...}`), which would read
    environment variables.
    """
    taken = {}
    for section in ("task", "criterion"):
        options = cfg.get(section)
        if not isinstance(options, dict) or not isinstance(options.get("_name"), str):
            raise UserError(f"{path}: its 'cfg' has no section '{section}': it was altered; train again")
        taken[section] = {name: options[name] for name in (*SETTINGS, *TAKEN) if options.get(name) is not None}
        if section == "criterion" or taken[section].get("seed") == "${common.seed}":
            taken[section].pop("seed", None)
        for name, value in taken[section].items():
            _check_plain(value, name, path)
    return taken


def _check_plain(value: Any, name: str, path: str) -> None:
    """Refuse what is no number or plain text, or not what the setting may be."""
    if not isinstance(value, str | int | float) or len(str(value)) > 5000:
        raise UserError(f"{path}: its option {name} is a {type(value).__name__}: it was altered; train again")
    if isinstance(value, str) and ("${" in value or value == MISSING or (value and not value.isprintable())):
        raise UserError(f"{path}: its option {name} is {value[:80]!r}: only plain texts are taken from a checkpoint")
    if name in SETTINGS or name == "reading":
        try:
            check_reading(value) if name == "reading" else SETTINGS[name].check(value)
        except UserError as error:
            raise UserError(f"{path}: its option {error}; it was altered, train again") from error


def _check_queries(recorded: Any, model: Any, path: str) -> None:
    """The query vectors that the checkpoint recorded are: row -> (layers, tokens, width), of the model's sizes."""
    if not isinstance(recorded, dict):
        raise UserError(f"{path}: its training queries are no mapping: it was altered; train again")
    attention = model.decoder.layers[0].self_attn
    layers, width = len(model.decoder.layers), attention.num_heads * attention.head_dim  # not always the model's width
    for row, vectors in recorded.items():
        right = isinstance(vectors, Tensor) and vectors.dim() == 3 and vectors.is_floating_point()
        if isinstance(row, bool) or not isinstance(row, int) or row < 0 or not right or not vectors.isfinite().all():
            raise UserError(f"{path}: its training queries of row {str(row)[:20]} are damaged or altered; train again")
        if (vectors.size(0), vectors.size(2)) != (layers, width):
            raise UserError(f"{path}: its training queries are not of {layers} layers of width {width}; train again")


def _find_base(state: dict[str, Any], path: str) -> str:
    """The base checkpoint a fine-tuned one names: where it was, or beside the fine-tuned one."""
    named = state["task_state"][BASE_REFERENCE]["path"]
    for candidate in (Path(named), Path(path).parent / Path(named).name):
        if candidate.exists():
            return str(candidate)
    raise UserError(f"{path}: fine-tuned from {named}, which is not there any more; say where it is with --base-model")


def _options(dataclass: Any, saved: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Fields of a configuration class: its defaults, overlaid by the saved values, overlaid by the flags."""
    options = {name: field.default for name, field in dataclass.__dataclass_fields__.items() if name[0] != "_"}
    for source in (saved, flags):
        options |= {name: source[name] for name in options if source.get(name) is not None}
    return options


def _criterion(saved: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The criterion of the command line, or else the one saved with the checkpoint."""
    name = flags.get("criterion") or saved.get("_name") or "cross_entropy"
    dataclass = REGISTRIES["criterion"]["dataclass_registry"].get(name)
    if dataclass is None:
        raise UserError(f"--criterion {name}: not usable here; use icl_similarity or cross_entropy")
    options = _options(dataclass, saved if saved.get("_name") == name else {}, flags)
    interpolated = {key: False for key, value in options.items() if isinstance(value, str) and value.startswith("${")}
    return {"_name": name} | options | interpolated
