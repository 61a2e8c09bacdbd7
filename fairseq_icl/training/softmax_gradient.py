"""What learns, and the derivative through the attention weights, kept or stopped.

    attention(x) = softmax(Q K^T) V,     Q, K, V projections of x

`softmax_gradient=stopped` takes softmax(Q K^T) for a constant: the loss reaches V alone. So queries and keys get no
gradient, and below an attention module it arrives through the values and the residual stream only. Outputs do not
change by one bit. A linearized model still moves by the true derivative J delta; what is stopped is learning, which is
backward.
"""

import re
from typing import Any

from fairseq.modules import MultiheadAttention
from torch import nn
from torch.utils.hooks import RemovableHandle

from fairseq_icl.errors import UserError
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing.probe import attention_modules, detached, is_plain
from fairseq_icl.settings import SETTINGS, Settings


def choose_what_learns(model: PretrainedLM, settings: Settings) -> str:
    """Freeze all but what the settings let learn: in words "4 tensors, layers 28 to 29, 0.9 million parameters"."""
    is_lora = settings.train_parameters == "lora"  # key and value projections in a random subspace (gradients.py)
    parts = SETTINGS["train_parameters"].default if is_lora else settings.train_parameters
    model.freeze_all_but(parts, biases=not is_lora and settings.biases == "trained")
    if settings.softmax_gradient == "stopped":
        for module in attention_modules(model.decoder):
            for name, parameter in module.named_parameters():
                if name.startswith(("q_", "k_")):  # before the softmax: q_proj, k_proj, q_norm, k_norm
                    parameter.requires_grad_(False)
        if not model.trained_names:
            raise UserError(
                f"softmax_gradient=stopped: leaves nothing to learn of train_parameters={settings.train_parameters}; "
                "add self_attn.v_proj"
            )
    names = model.trained_names
    layers = sorted({int(found[1]) for name in names if (found := re.search(r"\.layers\.(\d+)\.", name))})
    number = sum(model.get_parameter(name).numel() for name in names)
    place = f"layers {', '.join(map(str, layers))}" if layers else "outside the layers"
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        place = f"layers {layers[0]} to {layers[-1]}"
    size = f"{number / 1e6:.1f} million" if number >= 100_000 else f"{number:,}"
    return f"{len(names)} tensors, {place}, {size} parameters"


def stop_softmax_gradient(decoder: Any) -> list[RemovableHandle]:
    """Hooks on a decoder of which queries and keys are frozen; they act in passes that keep a graph."""
    hooks: list[RemovableHandle] = []

    def detach_query_and_key(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_name = {name: detached(kwargs[name]) for name in ("query", "key") if name in kwargs}
        return (*map(detached, args[:2]), *args[2:]), kwargs | by_name

    for module in attention_modules(decoder):
        if is_plain(module):
            # fairseq's fused attention never calls q_proj and k_proj, but projects the three inputs it is given.
            hooks.append(module.register_forward_pre_hook(detach_query_and_key, with_kwargs=True))
        elif isinstance(module, MultiheadAttention):
            raise UserError(
                "softmax_gradient=stopped: not implemented for this model's attention (extra keys, or xformers); "
                "use softmax_gradient=kept"
            )
        else:
            parts = (module.q_proj, module.k_proj)
            hooks += [part.register_forward_hook(lambda _, __, output: detached(output)) for part in parts]
    return hooks
