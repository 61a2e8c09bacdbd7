"""What a causal language model of transformers is made of, found by one pass and not by the family's name.

`examine` runs a few tokens and notes who is called with what. What it cannot make out, or what this package could not
observe exactly, is refused in one line.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.transformers_lm.attention import NAME, Call, examined

FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv")
"""Names of one matrix that makes queries, keys and values."""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_multiplier")
"""Keys of config.json by which families multiply or divide their logits."""
Place = tuple[nn.Module, str]
"""A module by its parent and its name there."""


@dataclass(frozen=True)
class Heads:
    """The attention of one layer."""

    place: Place
    heads: int
    heads_per_key: int
    head_dim: int
    scaling: float
    window: int | None
    others: int
    """What its module returns beside the output."""


@dataclass(frozen=True)
class Anatomy:
    """Where the parts are that this package looks at."""

    embedding: Place
    body: nn.Module
    """The module that runs the layers."""
    layers: nn.ModuleList
    others: int
    """What a layer returns beside its output."""
    attention: Sequence[Heads]
    after_attention: str | None
    """The part of a layer that receives the state after attention; None if there is no such state."""
    feed_forward: str | None
    """The part of a layer that is its whole feed-forward block; None if there is no such part."""
    final_norm: Place | None
    projection: Place | None
    scale: float
    cap: float | None
    positions: int


@dataclass
class _Pass:
    """Every call of a module in one pass, in order."""

    calls: list[tuple[nn.Module, Any, Any]]

    def of(self, module: nn.Module) -> tuple[Any, Any]:
        """(first input, output) of a module's last call; (None, None) if it was not called."""
        return next(((given, out) for called, given, out in reversed(self.calls) if called is module), (None, None))


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Pass]:
    seen = _Pass([])

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.calls.append((module, args[0] if args else kwargs.get("hidden_states"), output))

    hooks = [module.register_forward_hook(look, with_kwargs=True) for module in model.modules()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def first_tokens(vocabulary: int) -> Tensor:
    """A few tokens from all over the vocabulary: (1, 8)"""
    return torch.linspace(vocabulary // 3, vocabulary - 1, 8).long()[None]


@torch.no_grad()
def examine(model: Any, name: str) -> Anatomy:
    """The anatomy of a model whose attention is eager; `name` begins the messages. Fused matrices are separated."""
    tokens = first_tokens(model.config.get_text_config().vocab_size).to(model.device)
    logits = model(tokens, use_cache=False).logits
    model.set_attn_implementation(NAME)
    try:
        with examined() as calls, _watched(model) as seen:
            own_logits = model(tokens, use_cache=False).logits
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:  # a Mask is no tensor
        raise UserError(
            f"{name}: which tokens see each other is neither causal nor a window; use another model"
        ) from error
    layers = _layers(model, calls, name)
    for call in calls:
        _check_projections(call, seen, name)
    if not torch.allclose(own_logits, logits, rtol=0, atol=_tolerance(logits)):
        raise UserError(f"{name}: attention computed here is not that of the model's own code; use another model")
    body = next(m for m in model.modules() if any(child is layers for child in m._modules.values()))
    state = _output(seen.of(layers[-1])[1])
    norm, state = _reader(body, seen, state)
    projection, state = _reader(body, seen, state) if norm is not None else (None, state)
    scale, cap = _head(model, state, logits, name)
    embedding = model.get_input_embeddings()
    return Anatomy(
        embedding=_place(model, embedding),
        body=body,
        layers=layers,
        others=_others(seen.of(layers[0])[1]),
        attention=[_heads(block, call, seen) for block, call in zip(layers, calls, strict=True)],
        after_attention=_after_attention(layers[0], calls[0].module, seen),
        feed_forward=_feed_forward(layers[0], calls[0].module, seen),
        final_norm=None if norm is None else (body, norm),
        projection=None if projection is None else (body, projection),
        scale=scale,
        cap=cap,
        positions=positions_of(model.config),
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


def _tolerance(logits: Tensor) -> float:
    precision = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 3e-2
    return precision * max(1.0, float(logits.abs().max()))


def _layers(model: nn.Module, calls: Sequence[Call], name: str) -> nn.ModuleList:
    """The list of which every entry holds one attention module, in the order of the calls."""
    if not calls:
        raise UserError(
            f"{name}: its attention is not open to other code in transformers; use a model of another family"
        )
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        holders = [[n for n, layer in enumerate(layers) if call.module in set(layer.modules())] for call in calls]
        if all(len(found) == 1 for found in holders):
            numbers = [found[0] for found in holders]
            if numbers == list(range(len(layers))):
                return layers
            missing = sorted(set(range(len(layers))) - set(numbers))
            if missing:
                shown = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
                raise UserError(
                    f"{name}: layers {shown} have no attention (a hybrid model); use one of attention layers only"
                )
    raise UserError(f"{name}: its layers do not have one attention module each; use a model of another family")


def _check_projections(call: Call, seen: _Pass, name: str) -> None:
    """Separate queries, keys and values where one matrix makes them; refuse where they are not made by matrices."""
    module = call.module
    for fused in FUSED:
        if isinstance(getattr(module, fused, None), nn.Linear):
            _separate(module, fused, call, seen, name)
            return
    if not all(isinstance(getattr(module, part, None), nn.Linear) for part in ("q_proj", "k_proj", "v_proj")):
        raise UserError(f"{name}: keys and values are not made by one matrix each; use a model of another family")


class Separated(nn.Module):
    """In place of one matrix for queries, keys and values: three, of which each may learn by itself."""

    def __init__(self, parts: dict[str, nn.Linear], heads: int | None) -> None:
        super().__init__()
        self.__dict__["parts"] = parts  # registered by the attention module
        self.heads = heads  # None: queries, keys, values; else all three of one head after the other

    def forward(self, x: Tensor) -> Tensor:
        made = [part(x) for part in self.__dict__["parts"].values()]
        if self.heads is None:
            return torch.cat(made, dim=-1)
        return torch.stack([part.unflatten(-1, (self.heads, -1)) for part in made], dim=-2).flatten(-3)

    @property
    def parts(self) -> dict[str, nn.Linear]:
        """q_proj, k_proj and v_proj."""
        found: dict[str, nn.Linear] = self.__dict__["parts"]
        return found


def _separate(module: nn.Module, fused: str, call: Call, seen: _Pass, name: str) -> None:
    whole: nn.Linear = getattr(module, fused)
    x = seen.of(whole)[0]
    heads, groups, width = call.query.size(1), call.key.size(1), call.query.size(3)
    sizes = [heads * width, groups * width, call.value.size(1) * call.value.size(3)]
    for by_head in (False, True):
        if sum(sizes) != whole.out_features or (by_head and len(set(sizes)) > 1):
            continue
        rows = torch.arange(whole.out_features)
        chosen = rows.view(heads, 3, width).transpose(0, 1).flatten(1) if by_head else rows.split(sizes)
        parts = {f"{kind}_proj": _rows_of(whole, part) for kind, part in zip("qkv", chosen, strict=True)}
        value = parts["v_proj"](x).unflatten(-1, (call.value.size(1), -1)).transpose(1, 2)
        if torch.allclose(value, call.value, rtol=1e-2, atol=_tolerance(call.value)):
            module._modules[fused] = Separated(parts, heads if by_head else None)
            return
    raise UserError(f"{name}: its {fused} holds queries, keys and values in an unknown order; use another model")


def _rows_of(whole: nn.Linear, rows: Tensor) -> nn.Linear:
    part = nn.Linear(1, 1, bias=whole.bias is not None)
    part.in_features, part.out_features = whole.in_features, len(rows)
    part.weight = nn.Parameter(whole.weight.detach()[rows])
    if whole.bias is not None:
        part.bias = nn.Parameter(whole.bias.detach()[rows])
    return part


def _heads(block: nn.Module, call: Call, seen: _Pass) -> Heads:
    output = seen.of(call.module)[1]
    heads, width = call.query.size(1), call.query.size(3)
    shared = heads // call.key.size(1)
    return Heads(_place(block, call.module), heads, shared, width, call.scaling, call.window, _others(output))


def _place(model: nn.Module, wanted: nn.Module) -> Place:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is wanted:
                return parent, name
    raise LookupError(type(wanted).__name__)


def _output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _others(result: Any) -> int:
    return len(result) - 1 if isinstance(result, tuple) else 0


def _reader(body: nn.Module, seen: _Pass, state: Tensor) -> tuple[str | None, Tensor]:
    """The part of `body` that was called with this very tensor, and what it made of it."""
    for name, child in body.named_children():
        given, output = seen.of(child)
        if given is state:
            return name, output
    return None, state


def _head(model: Any, features: Tensor, logits: Tensor, name: str) -> tuple[float, float | None]:
    """(factor, cap) of logits = cap * tanh(factor * U x / cap); a refusal if the head is anything else."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    plain = head(features)
    cap = getattr(config, "final_logit_softcapping", None)
    factors = [1.0]
    for key in SCALES:
        number = getattr(config, key, None)
        if isinstance(number, int | float) and number:
            factors += [float(number), 1.0 / number]
    for factor in factors:
        found = plain * factor
        found = found if cap is None else torch.tanh(found / cap) * cap
        if torch.allclose(found, logits, rtol=0, atol=_tolerance(logits)):
            return factor, cap
    raise UserError(f"{name}: its logits are more than a norm and a matrix; use a model of another family")


def _after_attention(block: nn.Module, attention: nn.Module, seen: _Pass) -> str | None:
    """The part that receives x + attention(x), or that with a norm on what attention put out."""
    x = seen.of(block)[0]
    if not isinstance(x, Tensor):
        return None
    out = _output(seen.of(attention)[1])
    added = [out]
    for child in block.children():
        given, output = seen.of(child)
        if given is out and isinstance(output, Tensor):
            added.append(output)
    for name, child in block.named_children():
        given, _ = seen.of(child)
        fits = isinstance(given, Tensor) and given.shape == x.shape and child is not attention
        if fits and any(torch.allclose(given, x + part, rtol=1e-4, atol=_tolerance(x)) for part in added):
            return name
    return None


def _feed_forward(block: nn.Module, attention: nn.Module, seen: _Pass) -> str | None:
    """The one part with matrices beside attention, if it takes and gives (B, T, d)."""
    found = []
    for name, child in block.named_children():
        if attention not in set(child.modules()) and any(p.dim() > 1 for p in child.parameters()):
            given, output = seen.of(child)
            whole = isinstance(given, Tensor) and isinstance(output, Tensor) and given.dim() == 3
            found.append(name if whole and output.shape == given.shape else None)
    return found[0] if len(found) == 1 else None
