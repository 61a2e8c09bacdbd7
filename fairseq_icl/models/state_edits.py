"""Edits of states: what a method that changes no weight does to a model, at one token of every sequence of a pass.

The token is the last one of a query's input, which predicts the label. In each layer an edit sees, and may change, in
this order:

    heads       (R, H, D)   what the heads put out, before the output projection
    attention   (R, d)      the attention's output, before the residual
    layer       (R, d)      the layer's output

of the R such tokens of a batch. An edit that gives back what it was given leaves every number as it is, to the bit.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_icl.models.attention import RuledAttention


class StateEdit:
    """Changes nothing; subclasses override what they change, or only look."""

    def heads(self, layer: int, heads: Tensor) -> Tensor:
        """What the heads of a layer put out, (R, H, D), instead of `heads`."""
        return heads

    def attention(self, layer: int, output: Tensor, received: Tensor, state: Tensor) -> Tensor:
        """The attention's output, instead of `output`; it got `received`, the layer got `state`: (R, d) each."""
        return output

    def layer(self, layer: int, state: Tensor) -> Tensor:
        """The layer's output, (R, d), instead of `state`."""
        return state

    @property
    def sees_heads(self) -> bool:
        """Whether it has a say before the output projection."""
        return type(self).heads is not StateEdit.heads


@contextmanager
def edited(decoder: Any, edit: StateEdit, sequence: Tensor, position: Tensor) -> Iterator[None]:
    """While open, passes of the decoder, and hooks set inside, see the edit at token `position[r]` of `sequence[r]`."""
    states: dict[int, Tensor] = {}  # of each layer, before it
    by_time, by_batch = (position, sequence), (sequence, position)

    def before(number: int, layer: nn.Module, args: tuple[Any, ...]) -> None:
        states[number] = args[0][by_time]

    def heads(number: int, module: Any, projection: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The attention of fairseq lays out (T, B, H * D), that of transformers (B, T, H * D).
        place = by_time if isinstance(module, MultiheadAttention | RuledAttention) else by_batch
        given = args[0][place].unflatten(1, (module.num_heads, -1))  # (R, H, D)
        return (args[0].index_put(place, edit.heads(number, given).flatten(1).to(args[0])), *args[1:])

    def attention(number: int, module: nn.Module, args: Any, kwargs: dict[str, Any], result: tuple[Any, ...]) -> Any:
        received = kwargs["query"] if "query" in kwargs else args[0]
        changed = edit.attention(number, result[0][by_time], received[by_time], states[number])
        return (result[0].index_put(by_time, changed.to(result[0])), *result[1:])

    def after(number: int, layer: nn.Module, args: tuple[Any, ...], result: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = edit.layer(number, result[0][by_time])
        return (result[0].index_put(by_time, changed.to(result[0])), *result[1:])

    with ExitStack() as hooks:
        for number, layer in enumerate(decoder.layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(before, number)))
            hooks.enter_context(layer.self_attn.register_forward_hook(partial(attention, number), with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(partial(after, number)))
            if edit.sees_heads:
                see = partial(heads, number, layer.self_attn)
                hooks.enter_context(layer.self_attn.out_proj.register_forward_pre_hook(see))
        yield


class Recorder(StateEdit):
    """Changes nothing and keeps what passes: a list for each layer, with one entry a pass."""

    sees_heads = False

    def __init__(self, wants_heads: bool = False) -> None:
        self.states: dict[int, list[Tensor]] = {}  # what the layer puts out, (R, d)
        self.received: dict[int, list[Tensor]] = {}
        self.after_attention: dict[int, list[Tensor]] = {}  # the layer's input and the attention's output added, (R, d)
        self.head_outputs: dict[int, list[Tensor]] = {}
        self.sees_heads = wants_heads

    def heads(self, layer: int, heads: Tensor) -> Tensor:
        self.head_outputs.setdefault(layer, []).append(heads)
        return heads

    def attention(self, layer: int, output: Tensor, received: Tensor, state: Tensor) -> Tensor:
        self.received.setdefault(layer, []).append(received)
        self.after_attention.setdefault(layer, []).append(state + output)
        return output

    def layer(self, layer: int, state: Tensor) -> Tensor:
        self.states.setdefault(layer, []).append(state)
        return state

    def stacked(self, kept: dict[int, list[Tensor]]) -> Tensor:
        """One of its records, passes joined and layers first: (L, R, ...)."""
        return torch.stack([torch.cat(kept[layer]) for layer in sorted(kept)])


MakeEdit = Callable[..., StateEdit]
"""(model, prompts, settings) -> the edit that a method makes from the demonstrations."""
