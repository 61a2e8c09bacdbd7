"""What a causal language model of transformers is made of, found by one pass and not by the family's name.

`examine` runs a few tokens and notes who is called with what. What it cannot make out, or what this package could not
observe exactly, is refused in one line.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.compat.models import replaced
from fairseq_icl.errors import UserError
from fairseq_icl.models.transformers_lm import attention
from fairseq_icl.models.transformers_lm.attention import NAME, Call

FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv")
"""Names of one matrix that makes queries, keys and values."""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_multiplier")
"""Keys of config.json by which families multiply or divide their logits."""


@dataclass(frozen=True)
class Anatomy:
    """Where the parts are that this package looks at."""

    tokens: Tensor  # (1, 8), from all over the vocabulary
    logits: Tensor  # (1, 8, V), what the model makes of them
    body: nn.Module
    """The module that runs the layers."""
    layers: nn.ModuleList
    attention: Sequence[Call]
    """That of each layer."""
    others: Mapping[nn.Module, int]
    """How many things a module returns beside its output."""
    after_attention: str | None
    """The part of a layer that receives the state after attention; None if there is no such state."""
    feed_forward: str | None
    """The part of a layer that is its whole feed-forward block; None if there is no such part."""
    final_norm: str | None
    """The part of `body` that receives the last layer's output, and the one that receives what this puts out."""
    projection: str | None
    scale: float
    cap: float | None
    """Logits are cap * tanh(scale * U x / cap); None: scale * U x."""


Seen = Mapping[nn.Module, tuple[Any, Any, int]]
"""Module -> (first input, output, number of things returned beside it) of its last call in one pass."""


@contextmanager
def _watched(model: nn.Module) -> Iterator[Seen]:
    """While open, a mapping fills with what is called; modules that are not are (None, None, 0)."""
    seen: dict[nn.Module, tuple[Any, Any, int]] = defaultdict(lambda: (None, None, 0))

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        output, *others = result if isinstance(result, tuple) else (result,)
        seen[module] = (args[0] if args else kwargs.get("hidden_states"), output, len(others))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(look, with_kwargs=True))
        yield seen


@torch.no_grad()
def examine(model: Any, name: str) -> Anatomy:
    """The anatomy of a model whose attention is eager; `name` begins the messages. Fused matrices are separated."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.linspace(vocabulary // 3, vocabulary - 1, 8).long()[None].to(model.device)
    logits = model(tokens, use_cache=False).logits
    model.set_attn_implementation(NAME)
    calls: list[Call] = []
    try:
        with replaced(attention, calls=calls), _watched(model) as seen:
            own_logits = model(tokens, use_cache=False).logits
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:  # a window is no mask
        seeing = "which tokens see each other is neither causal nor a window"
        raise UserError(f"{name}: {seeing}; use another model") from error
    layers = _layers(model, calls, name)
    for call in calls:
        _separate(call, seen, name)
    if not agree(own_logits, logits):
        raise UserError(f"{name}: attention computed here is not that of the model's own code; use another model")
    body = next(m for m in model.modules() if any(child is layers for child in m._modules.values()))
    norm, state = _reader(body, seen, seen[layers[-1]][1])
    projection, state = _reader(body, seen, state) if norm is not None else (None, state)
    scale, cap = _head(model, state, logits, name)
    others = {module: count for module, (_, _, count) in seen.items()}
    after_attention = _after_attention(layers[0], calls[0].module, seen)
    feed_forward = _feed_forward(layers[0], calls[0].module, seen)
    return Anatomy(
        tokens, logits, body, layers, calls, others, after_attention, feed_forward, norm, projection, scale, cap
    )


def positions_of(config: Any) -> int:
    """The longest prompt: as far as positions were trained, or do not yet depend on a prompt's length."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    limits = [getattr(text, "max_position_embeddings", None) or 2**20]
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limits.append(rope.get("original_max_position_embeddings") or limits[0])
    return int(min(limits))


def agree(found: Tensor, expected: Tensor, rtol: float = 0.0) -> bool:
    """Whether two ways to compute the same differ by no more than rounding."""
    precision = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 3e-2
    return torch.allclose(found, expected, rtol=rtol, atol=precision * max(1.0, float(expected.abs().max())))


def _layers(model: nn.Module, calls: Sequence[Call], name: str) -> nn.ModuleList:
    """The list of which every entry holds one attention module, in the order of the calls."""
    other = "use a model of another family"
    if not calls:
        raise UserError(f"{name}: its attention is not open to other code in transformers; {other}")
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        holders = [[n for n, layer in enumerate(layers) if call.module in set(layer.modules())] for call in calls]
        if all(len(found) == 1 for found in holders):
            numbers = [found[0] for found in holders]
            if numbers == list(range(len(layers))):
                return layers
            missing = sorted(set(range(len(layers))) - set(numbers))
            if missing:
                shown = f"layers {', '.join(map(str, missing[:4]))}{', ...' * (len(missing) > 4)} have no attention"
                raise UserError(f"{name}: {shown} (a hybrid model); use one of attention layers only")
    raise UserError(f"{name}: its layers do not have one attention module each; {other}")


class Separated(nn.Module):
    """In place of one matrix for queries, keys and values: three, of which each may learn by itself."""

    parts: dict[str, nn.Linear]
    """q_proj, k_proj and v_proj."""

    def __init__(self, parts: dict[str, nn.Linear], heads: int | None) -> None:
        super().__init__()
        self.__dict__["parts"] = parts  # registered by the attention module
        self.heads = heads  # None: queries, keys, values; else all three of one head after the other

    def forward(self, x: Tensor) -> Tensor:
        made = [part(x) for part in self.parts.values()]
        if self.heads is None:
            return torch.cat(made, dim=-1)
        return torch.stack([part.unflatten(-1, (self.heads, -1)) for part in made], dim=-2).flatten(-3)


def _separate(call: Call, seen: Seen, name: str) -> None:
    """Separate queries, keys and values where one matrix makes them; refuse where they are not made by matrices."""
    parts_of: dict[str, Any] = call.module._modules
    fused = next((part for part in FUSED if isinstance(parts_of.get(part), nn.Linear)), None)
    if fused is None:
        if not all(isinstance(parts_of.get(part), nn.Linear) for part in ("q_proj", "k_proj", "v_proj")):
            raise UserError(f"{name}: keys and values are not made by one matrix each; use a model of another family")
        return
    whole: nn.Linear = parts_of[fused]
    heads, groups, width = call.query.size(1), call.key.size(1), call.query.size(3)
    sizes = [heads * width, groups * width, call.value.size(1) * call.value.size(3)]
    for by_head in (False, True):
        if sum(sizes) != whole.out_features or (by_head and len(set(sizes)) > 1):
            continue
        rows = torch.arange(whole.out_features)
        chosen = rows.view(heads, 3, width).transpose(0, 1).flatten(1) if by_head else rows.split(sizes)
        weight, bias = whole.weight.detach(), None if whole.bias is None else whole.bias.detach()
        parts = {
            f"{kind}_proj": linear_of(weight[part], None if bias is None else bias[part])
            for kind, part in zip("qkv", chosen, strict=True)
        }
        value = parts["v_proj"](seen[whole][0]).unflatten(-1, (call.value.size(1), -1)).transpose(1, 2)
        if agree(value, call.value, rtol=1e-2):
            parts_of[fused] = Separated(parts, heads if by_head else None)
            return
    raise UserError(f"{name}: its {fused} holds queries, keys and values in an unknown order; use another model")


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer of these values, (outputs, inputs) and (outputs,)."""
    linear = nn.Linear(1, 1, bias=bias is not None)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def place_of(model: nn.Module, wanted: nn.Module) -> tuple[nn.Module, str]:
    """A module by its parent and its name there."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is wanted:
                return parent, name
    raise LookupError(type(wanted).__name__)


def _reader(body: nn.Module, seen: Seen, state: Tensor) -> tuple[str | None, Tensor]:
    """The part of `body` that was called with this very tensor, and what it made of it."""
    for name, child in body.named_children():
        given, output, _ = seen[child]
        if given is state:
            return name, output
    return None, state


def _head(model: Any, features: Tensor, logits: Tensor, name: str) -> tuple[float, float | None]:
    """(factor, cap) of logits = cap * tanh(factor * U x / cap); a refusal if the head is anything else."""
    config, plain = model.config.get_text_config(), model.get_output_embeddings()(features)
    cap = getattr(config, "final_logit_softcapping", None)
    numbers: list[Any] = [getattr(config, key, None) for key in SCALES]
    numbers = [number for number in numbers if isinstance(number, int | float) and number]
    for factor in (1.0, *(factor for number in numbers for factor in (float(number), 1.0 / number))):
        found = plain * factor
        found = found if cap is None else torch.tanh(found / cap) * cap
        if agree(found, logits):
            return factor, cap
    raise UserError(f"{name}: its logits are more than a norm and a matrix; use a model of another family")


def _after_attention(layer: nn.Module, attention: nn.Module, seen: Seen) -> str | None:
    """The part that receives x + attention(x), or that with a norm on what attention put out."""
    x, out = seen[layer][0], seen[attention][1]
    if not isinstance(x, Tensor):
        return None
    calls = {name: (child, *seen[child]) for name, child in layer.named_children()}
    normed = [output for _, given, output, _ in calls.values() if given is out and isinstance(output, Tensor)]
    for name, (child, given, _, _) in calls.items():
        fits = isinstance(given, Tensor) and given.shape == x.shape and child is not attention
        if fits and any(agree(given, x + part, rtol=1e-4) for part in (out, *normed)):
            return name
    return None


def _feed_forward(layer: nn.Module, attention: nn.Module, seen: Seen) -> str | None:
    """The one part with matrices beside attention, if it takes and gives (B, T, d)."""
    found = []
    for name, child in layer.named_children():
        if attention not in set(child.modules()) and any(p.dim() > 1 for p in child.parameters()):
            given, output, others = seen[child]
            whole = isinstance(given, Tensor) and isinstance(output, Tensor) and given.dim() == 3 and not others
            found.append(name if whole and output.shape == given.shape else None)
    return found[0] if len(found) == 1 else None
