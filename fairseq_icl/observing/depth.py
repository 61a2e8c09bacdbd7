"""Short circuits: what the model would answer if it ended after any one of its layers (the logit lens).

    scores_l = U( state after layer l ),      U = final layer norm, then output projection

The states are those of the pass that is made anyway. Where one position's logits score all options of a query, only
the options' rows of U are multiplied, with the states of all layers in one product: which option is best, and how
likely each is among the options, does not depend on the other words. Labels of several tokens need their mean
log-probability, and so all of U for every layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

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

    def look(layer: Module, args: tuple[Any, ...], result: tuple[Tensor, Any, Any]) -> tuple[Tensor, Any, Any] | None:
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
    if len(layout.logit_sequence) == len(scores) and _is_one_matrix(decoder):
        tokens, place = layout.entry_token.unique(return_inverse=True)  # (K,), (E,)
        values = model.evaluate(lambda: _option_logits(decoder, features, tokens))  # (L - 1, R, K)
        entries = values.float().cpu()[:, layout.entry_logits, place]  # (L - 1, E)
        inner = [layout.by_option(layer) for layer in entries]
    else:
        inner = []
        for layer in features:  # one at a time: all logits of all layers would not fit
            logits = model.evaluate(partial(decoder.output_layer, layer))  # (R, V)
            inner.append(layout.option_scores(decoder.get_normalized_probs((logits, None), log_probs=True)))
    return torch.stack([*(layer.log_softmax(dim=1) for layer in inner), scores], dim=1)


def _is_one_matrix(decoder: Any) -> bool:
    return decoder.adaptive_softmax is None and isinstance(decoder.output_projection, torch.nn.Linear)


def _option_logits(decoder: Any, features: Tensor, tokens: Tensor) -> Tensor:
    """Logits of some tokens alone: features (..., d), tokens (K,) -> (..., K)."""
    head = decoder.output_projection
    return F.linear(features, head.weight[tokens], None if head.bias is None else head.bias[tokens])
