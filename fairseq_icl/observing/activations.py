"""Activations at any tokens of a few prompts: what `observe(..., positions=, record=)` adds to an observation.

Each prompt runs whole and by itself, by the decoder's own code, with hooks: slow beside the shared-prefix pass and
plain to check.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_icl.devices import within_memory
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.attention import Rule, band
from fairseq_icl.models.state_edits import edited
from fairseq_icl.observing.layout import filled_up, recorded_tokens
from fairseq_icl.observing.prefix import positions_from, replaced_attention, supports_prefix
from fairseq_icl.observing.probe import attention_modules
from fairseq_icl.prompts import Tokens
from fairseq_icl.prompts.build import Prompts, Query

RECORDS = ("attention_output", "residual", "mlp", "heads", "scores")
MAX_BYTES = 2**31  # that may be recorded at once


@dataclass(frozen=True)
class Activations:
    """n prompts of up to T tokens, P positions of each, L layers, H heads of width D, width d. CPU, fp32.

    A prompt is BOS or the demonstrations, then the query up to the token that an `Observation` is of. Where a prompt is
    shorter than the longest, tokens and positions are -1 and numbers NaN, on the right. What was not asked for is None.
    """

    tokens: Tensor  # (n, T) the prompts
    position: Tensor  # (n, P) which of its tokens were recorded, counted from 0
    attention_output: Tensor | None = None  # (n, L, P, d) with output projection and bias, before the residual
    residual: Tensor | None = None  # (n, L + 1, P, d) what enters the first layer, then what leaves each layer
    mlp: Tensor | None = None  # (n, L, P, d) what the feed-forward block puts out, before the residual
    heads: Tensor | None = None  # (n, L, H, P, D) what each head puts out, before the output projection
    scores: Tensor | None = None  # (n, L, H, P, T) before the softmax over the prompt's tokens; not seen ones have -inf
    words: tuple[tuple[str, ...], ...] = ()  # the tokens as texts, if the prompts are of `build_prompts`

    def __repr__(self) -> str:
        arrays = {name: getattr(self, name) for name in ("tokens", "position", *RECORDS)}
        shapes = [f"{name} {tuple(array.shape)}" for name, array in arrays.items() if array is not None]
        return f"Activations({', '.join(shapes)})"


@within_memory("observing")
@torch.no_grad()
def read_activations(
    model: Model,
    prompts: Prompts,
    queries: Sequence[Query],
    in_context: bool,
    positions: str | Sequence[int] | None,
    record: str | Sequence[str],
) -> Activations:
    """What `observe` says of `positions` and `record`; without positions the token that it observes anyway."""
    decoder, was_training, position = model.lm.decoder, model.lm.training, prompts.settings.position
    names = (record,) if isinstance(record, str) else tuple(record) or ("attention_output",)
    for name in names:
        if name not in RECORDS:
            raise UserError(f"record={name}: not something to record; choose from {', '.join(RECORDS)}")
    if "mlp" in names and any(_feed_forward_of(layer) is None for layer in decoder.layers):
        raise UserError("record=mlp: this model's feed-forward block was not recognised; leave it out")
    if {"heads", "scores"} & set(names) and not supports_prefix(decoder):
        raise UserError("record: this model's attention has extras (biases, xformers); leave out heads and scores")
    before = prompts.context if in_context else prompts.start
    prompted = [(*before, *recorded_tokens(query, position)) for query in queries]
    places = [_places((-1,) if positions is None else positions, len(tokens)) for tokens in prompted]
    most, longest = max(map(len, places)), max(map(len, prompted))
    attention = attention_modules(decoder)[0]
    width = max(attention.out_proj.weight.shape)  # of the model, or of all heads if they are wider
    each = sum(attention.num_heads * longest if name == "scores" else width for name in names)
    size = 4 * each * most * len(decoder.layers)  # bytes of a query
    if len(queries) * size > MAX_BYTES:
        fit = f"limit={MAX_BYTES // size}" if size <= MAX_BYTES else "a list of positions, or record less"
        raise UserError(
            f"positions: {len(queries)} queries with {most} positions each take {len(queries) * size / 2**30:.1f} GiB, "
            f"more than {MAX_BYTES / 2**30:.0f}; give {fit}"
        )
    model.lm.eval()
    arrays: dict[str, Any] = {name: [] for name in names}
    for query, tokens, at in zip(queries, prompted, places, strict=True):
        last = len(before) + len(query.inputs[query.gold if position == "gold" else 0]) - 1
        for name, array in _one_prompt(model, tokens, at, names, last).items():
            if name == "scores":
                array = F.pad(array, (0, longest - len(tokens)), value=-torch.inf)
            arrays[name].append(F.pad(array, (0, 0, 0, most - len(at)), value=torch.nan))
    model.lm.train(was_training)
    arrays = {name: torch.stack(parts) for name, parts in arrays.items()}
    words = () if prompts.spell is None else tuple(tuple(prompts.spell(tokens)) for tokens in prompted)
    return Activations(filled_up(prompted, -1), filled_up(places, -1), **arrays, words=words)


def _places(positions: str | Sequence[int], length: int) -> Tokens:
    """Which tokens of a prompt of `length` are meant; negative numbers count from its end."""
    if positions == "all":
        return tuple(range(length))
    if isinstance(positions, str) or not len(positions) or not all(isinstance(at, int) for at in positions):
        raise UserError(f'positions={positions!r}: give "all", or a list of whole numbers such as [0, -1]')
    for at in positions:
        if not -length <= at < length:
            raise UserError(f"positions: there is no token {at} in a prompt of {length}; count from 0, or from -1 back")
    return tuple(at % length for at in positions)


def _feed_forward_of(layer: Any) -> Any:
    """The module whose output is that of the layer's feed-forward block."""
    block = getattr(layer, "feed_forward", None)  # of a layer of transformers
    return getattr(layer, "fc2", None) if block is None else block[1]


def _one_prompt(model: Model, tokens: Tokens, places: Tokens, names: Sequence[str], last: int) -> dict[str, Tensor]:
    """By name (L, P, d), of heads (L, H, P, D), of scores (L, H, P, T); `last` is where the query's input ends."""
    decoder, at = model.lm.decoder, list(places)
    device = next(decoder.parameters()).device
    windows: dict[int, int | None] = {}

    def run() -> dict[str, Tensor]:
        kept: dict[str, list[Tensor]] = {name: [] for name in RECORDS}

        def keep(name: str, module: Any, args: Any, output: Any) -> None:  # of one: (T, 1, d), (1, T, d) or (T, d)
            output = output[0] if isinstance(output, tuple) else output
            kept[name].append(output.reshape(len(tokens), -1)[at].to(device))

        def attend(layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            attended = rule.attend(query, key, value, sinks)  # (1, H, T, D)
            scores = (query[0][:, at] @ key[0].transpose(1, 2)).float()  # (H, P, T)
            scores = scores if rule.cap is None else torch.tanh(scores / rule.cap) * rule.cap
            kept["scores"].append(scores.to(device))
            kept["heads"].append(attended[0][:, at].to(device))
            windows[layer] = rule.window
            return attended

        with ExitStack() as hooks:
            if model.edit is not None:
                hooks.enter_context(edited(decoder, model.edit, *torch.tensor([[0], [last]], device=device)))
            hooks.enter_context(positions_from(decoder, 0))
            hooks.enter_context(decoder.layers[0].register_forward_pre_hook(lambda m, x: keep("residual", m, x, x)))
            for layer, attention in zip(decoder.layers, attention_modules(decoder), strict=True):
                outputs = {"attention_output": attention, "mlp": _feed_forward_of(layer), "residual": layer}
                for name in set(names) & set(outputs):
                    hooks.enter_context(outputs[name].register_forward_hook(partial(keep, name)))
            if {"heads", "scores"} & set(names) or (model.edit is not None and model.edit.sees_heads):
                hooks.enter_context(replaced_attention(decoder, attend))
            decoder.extract_features(torch.tensor([tokens], device=device), None)
        return {name: torch.stack(kept[name]) for name in names}

    seen = {name: value.float().cpu() for name, value in model.evaluate(run).items()}
    for layer, window in windows.items() if "scores" in seen else ():
        seen["scores"][layer].masked_fill_(~band(len(tokens), window or len(tokens))[at], -torch.inf)
    return seen
