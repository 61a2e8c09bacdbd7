"""From a checkpoint and the flags of a command line to the task and the model that score it."""

from pathlib import Path
from typing import Any

from fairseq import tasks
from fairseq.models import BaseFairseqModel
from fairseq.registry import REGISTRIES
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf

from fairseq_icl.compat import TASK
from fairseq_icl.errors import UserError
from fairseq_icl.models.checkpoints import base_reference, read_checkpoint
from fairseq_icl.models.hugging_face import is_hugging_face
from fairseq_icl.models.pretrained_lm import PretrainedLMConfig
from fairseq_icl.tasks.demonstration_prompting import DemonstrationPromptingConfig


def restore(path: str, flags: dict[str, Any]) -> tuple[list[BaseFairseqModel], DictConfig, FairseqTask]:
    """(models, configuration, task) for `fairseq-validate --path PATH`; `flags` are those explicitly given.

    A fine-tuned checkpoint supplies its own flags as defaults and its base; any other checkpoint is a base model of
    which only architecture and weights count, so that `args` and `cfg` files of one model cannot differ.
    """
    state = {} if is_hugging_face(path) else read_checkpoint(path)
    reference = base_reference(state)
    saved = state["cfg"] if reference else {}
    task_options = _options(DemonstrationPromptingConfig, saved.get("task"), flags)
    if reference and not flags.get("base_model"):
        task_options["base_model"] = find_base(reference, path)
    elif not reference:
        task_options["base_model"] = flags.get("base_model") or path
    if isinstance(task_options.get("seed"), str | None):  # the interpolation of the default
        task_options["seed"] = int(flags.get("seed") or 1)
    cfg = OmegaConf.create(
        {
            "task": {"_name": TASK, **task_options},
            "model": {"_name": "pretrained_lm", **_options(PretrainedLMConfig, None, {})},
            "criterion": _criterion(saved.get("criterion"), flags),
        }
    )
    task = tasks.setup_task(cfg.task)
    if reference:
        task.load_state_dict(state["task_state"])
    model = task.build_model(cfg.model)
    if reference:
        model.load_state_dict(state["model"])
    return [model], cfg, task


def find_base(reference: dict[str, str], path: str) -> str:
    """The base checkpoint a fine-tuned one names: where it was, or beside the fine-tuned one."""
    beside = Path(path).parent / Path(reference["path"]).name
    for candidate in (Path(reference["path"]), beside):
        if candidate.exists():
            return str(candidate)
    raise UserError(
        f"{path}: fine-tuned from {reference['path']}, which is not there any more; say where it is with --base-model"
    )


def _options(dataclass: Any, saved: dict[str, Any] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Fields of a configuration class: its defaults, overlaid by the saved values, overlaid by the flags."""
    options = {}
    for name, field in dataclass.__dataclass_fields__.items():
        if not name.startswith("_"):
            options[name] = field.default
            for source in (saved or {}, flags):
                if source.get(name) is not None:
                    options[name] = source[name]
    return options


def _criterion(saved: dict[str, Any] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """The criterion of the command line, or else the one saved with the checkpoint."""
    name = flags.get("criterion") or (saved or {}).get("_name") or "cross_entropy"
    dataclass = REGISTRIES["criterion"]["dataclass_registry"].get(name)
    if dataclass is None:
        raise UserError(f"--criterion {name}: not usable here; use icl_similarity or cross_entropy")
    same = saved if (saved or {}).get("_name") == name else None
    options = _options(dataclass, same, flags)
    interpolated = {key for key, value in options.items() if isinstance(value, str) and value.startswith("${")}
    return {"_name": name} | {k: (False if k in interpolated else v) for k, v in options.items()}
