"""Single layers at single tokens: what the model would answer if it ended after any of them (the logit lens).

    scores_l = U( state after layer l ),      U = final layer norm, then output projection

The states are those of the pass that is made anyway. Where one position's logits score all options of a query, only
the options' rows of U are multiplied, with the states of all layers in one product: which option is best, and how
likely each is among the options, does not depend on the other words. Labels of several tokens need their mean
log-probability, and so all of U for every layer.

And the last layer computes only what somebody reads: its feed-forward block at the tokens whose logits are wanted.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_icl.models import Model
from fairseq_icl.observing.layout import Layout


@contextmanager
def states_at(decoder: Any, sequence: Tensor, position: Tensor) -> Iterator[list[Tensor]]:
    """A list that fills with what each layer puts out at R tokens, (R, d), while the decoder runs without gradients.

    Row r is token `position[r]` of sequence `sequence[r]`. The decoder lists the outputs of all its layers, which would
    keep them all in memory: here each is written over the one before it, in the tensor that the first layer made.
    """
    states: list[Tensor] = []
    shared: list[Tensor] = []

    def look(
        layer: nn.Module, args: tuple[Any, ...], result: tuple[Tensor, Any, Any]
    ) -> tuple[Tensor, Any, Any] | None:
        output = result[0]  # (T, B, d)
        states.append(output[position, sequence])
        if not shared:
            shared.append(output)
            return None
        return (shared[0].copy_(output), *result[1:])

    with ExitStack() as hooks:
        for layer in decoder.layers:
            hooks.enter_context(layer.register_forward_hook(look))
        yield states


def inner_features(decoder: Any, states: Sequence[Tensor]) -> Tensor:
    """What the output projection would read after each layer but the last, (L - 1, R, d), of `states_at` R tokens."""
    x = torch.stack(list(states))[:-1]
    for module in (decoder.layer_norm, decoder.project_out_dim):
        x = x if module is None else module(x)
    return x


def scores_by_depth(model: Model, layout: Layout, features: Tensor, scores: Tensor) -> Tensor:
    """Score of every option after each layer, -inf where a query has fewer options: (n, L, C).

    `features` (L - 1, R, d) are those of `inner_features`. `scores` (n, C), those of the whole model, are the last
    layer's to the bit; the others are log-probabilities among the options, whatever the batch: only differences
    between the options of a query count.
    """
    decoder = model.lm.decoder
    is_one_matrix = decoder.adaptive_softmax is None and isinstance(decoder.output_projection, nn.Linear)
    if len(layout.logit_sequence) == len(scores) and is_one_matrix:
        tokens, place = layout.entry_token.unique(return_inverse=True)  # (K,), (E,)
        head = decoder.output_projection
        values = model.evaluate(
            lambda: F.linear(features, head.weight[tokens], None if head.bias is None else head.bias[tokens])
        )  # (L - 1, R, K)
        entries = values.float().cpu()[:, layout.entry_logits, place]  # (L - 1, E)
        inner = [layout.by_option(layer) for layer in entries]
    else:
        inner = []
        for layer in features:  # one at a time: all logits of all layers would not fit
            logits = model.evaluate(partial(decoder.output_layer, layer))  # (R, V)
            inner.append(layout.option_scores(decoder.get_normalized_probs((logits, None), log_probs=True)))
    return torch.stack([*(layer.log_softmax(dim=1) for layer in inner), scores], dim=1)


def last_feed_forward_at(decoder: Any, sequence: Tensor, position: Tensor) -> AbstractContextManager[None]:
    """Inside, the last feed-forward block runs at tokens `position[r]` of `sequence[r]`: nothing may read others."""
    layer = decoder.layers[-1]
    if not hasattr(layer, "feed_forward"):
        return only_at([layer.fc1], layer.fc2, position, sequence)
    if layer.feed_forward is None:  # one of transformers whose block was not recognised: it runs everywhere
        return nullcontext()
    enters, leaves = layer.feed_forward
    return only_at(enters, leaves, sequence, position)  # (B, T, d) inside


@contextmanager
def only_at(enters: Sequence[nn.Module], leaves: nn.Module, first: Tensor, second: Tensor) -> Iterator[None]:
    """Inside, what lies between some modules sees R rows of its input: [first[r], second[r]] of (S, T, d).

    `enters` see these rows alone, `leaves` (which may be one of them) puts its result back in their places and zeros
    elsewhere; what is between and around them is the model's own code.
    """
    shape: list[int] = []  # (S, T) of the pass that runs

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:  # (S, T, d) -> (1, R, d)
        shape[:] = args[0].shape[:2]
        return (args[0][first, second][None], *args[1:])

    def leave(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:  # (1, R, ...) -> (S, T, d)
        return result.new_zeros(*shape, result.size(-1)).index_put((first, second), result[0])

    with ExitStack() as hooks:
        for module in enters:
            hooks.enter_context(module.register_forward_pre_hook(enter))
        hooks.enter_context(leaves.register_forward_hook(leave))
        yield
