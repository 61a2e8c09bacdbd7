"""What a fine-tuned checkpoint tells the criterion that measures: how it was trained, and its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.checkpoints import base_reference, read_checkpoint
from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import LINEARIZED_MARK


def method_of(path: str | None) -> str:
    """gd, lcgd, linearized or linearized_lcgd; none for a base checkpoint."""
    state = read_checkpoint(path) if path else {}
    if base_reference(state) is None:
        return "none"
    layer_causal = state["cfg"]["criterion"]["_name"] == "layer_causal_ce"
    if state["task_state"].get("linearized"):
        return "linearized_lcgd" if layer_causal else "linearized"
    return "lcgd" if layer_causal else "gd"


def read_other(path: str, task: Any) -> dict[str, Tensor]:
    """The weights of a second fine-tuned checkpoint, which must have the same base and kind as the task's."""
    state = read_checkpoint(path)
    reference = base_reference(state)
    if reference is None or reference["sha256"] != task.base_sha256:
        raise UserError(f"--other-finetuned {path}: not fine-tuned from the same base model")
    if bool(state["task_state"].get("linearized")) != bool(task.cfg.linearize):
        raise UserError(f"--other-finetuned {path}: one of the two models is linearized and the other is not")
    return {name: tensor for name, tensor in state["model"].items() if name != LINEARIZED_MARK}


@contextmanager
def weights_in_place(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the trained parameters of the model have these values."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in model.trained_names}
    if parameters.keys() != weights.keys():
        different = sorted(parameters.keys() ^ weights.keys())[0]
        raise UserError(f"--other-finetuned: the two models trained different parameters, for example {different}")
    own = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = torch.as_tensor(weights[name]).to(parameter)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
