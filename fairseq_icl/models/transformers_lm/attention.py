"""The one attention function that stands in for that of nearly every decoder of transformers, and who looks at it.

transformers asks a registered function for the output of attention and hands it queries, keys and values, (B, H, T, D)
each, after norms and rotation: exactly what a `Seam` wants. Which tokens see which is no longer its masks' business but
that of the rule: an examined pass finds out which windows the masks stand for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import ORDINARY, Seam

NAME = "fairseq_icl"
IGNORED = ("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "is_causal")
"""Arguments that some families hand on and no kind of attention uses."""


class FamilySeam(Seam):
    """The seam of an attention module of transformers, with what the module does not say when it asks."""

    def __init__(self, scaling: float, window: int | None, heads_per_key: int) -> None:
        self.scaling, self.window, self.heads_per_key, self.rule = scaling, window, heads_per_key, ORDINARY


@dataclass(frozen=True)
class Call:
    """One call of the attention function in an examined pass."""

    module: nn.Module
    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, H_kv, T, D)
    value: Tensor  # (B, H_kv, T, D_v)
    scaling: float  # of the scores, wherever the family multiplies by it
    window: int | None


calls: list[Call] | None = None
"""While a model that has no seams yet is examined, what is asked of the attention function; None otherwise."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers asks for it: (B, T, H, D), and no weights. Dropout is off in everything run here."""
    for name, argument in others.items():
        if argument is not None and name not in IGNORED and not name.startswith(("output_", "return_")):
            said = f"{type(module).__name__} hands {name}={str(argument)[:40]} to attention"
            raise UserError(f"{said}, which is unknown here; use another model")
    scaling = query.size(-1) ** -0.5 if scaling is None else scaling
    seam: FamilySeam | None = module.__dict__.get("seam")
    # The masks are what counts in transformers; not every family says its window as well.
    window = seam.window if seam is not None else sliding_window if attention_mask is None else attention_mask.window
    rule = replace(ORDINARY if seam is None else seam.rule, window=window, cap=softcap)
    if seam is None and calls is not None:
        own = getattr(module, "scaling", None)
        whole = own if isinstance(own, float) and scaling == 1.0 else scaling  # OPT multiplies before it asks
        calls.append(Call(module, query, key, value, whole, window))
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if rule.linear and seam is not None:
        scaling = scaling / seam.scaling  # without scale: 1, or what undoes it
    query = query if scaling == 1.0 else query * scaling
    attend = Seam().attend if seam is None else seam.attend
    return attend(rule, query, key, value, s_aux).transpose(1, 2), None


def mask_function(*_: Any, mask_function: Callable[..., Any], config: Any = None, **__: Any) -> SimpleNamespace | None:
    """transformers' question for a mask: there is none; examined passes find out which `window` it stands for."""
    if calls is None:
        return None
    longest = min(getattr(config, "max_position_embeddings", None) or 2**14, 2**17)
    return SimpleNamespace(window=window_of(mask_function, longest))


def window_of(mask: Callable[..., Any], longest: int) -> int | None:
    """The window of a mask by which i sees j if j <= i and i - j < window; None: all before; any other: ValueError."""

    def seen(rows: Tensor) -> Tensor:  # (rows, longest)
        zero, columns = torch.zeros((), dtype=torch.long), torch.arange(longest)[None]
        return torch.as_tensor(mask(zero, zero, rows[:, None], columns)).expand(len(rows), longest)

    window = int(seen(torch.tensor([longest - 1])).sum())
    rows = torch.tensor([0, 1, window - 1, window, window + 1, longest // 2, longest - 1]).clamp(0, longest - 1)
    distance = rows[:, None] - torch.arange(longest)[None]
    if not torch.equal(seen(rows), (distance >= 0) & (distance < window)):
        raise ValueError("neither causal nor a window")
    return window if window < longest else None
