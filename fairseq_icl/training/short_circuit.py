"""Short-circuited fine-tuning: the model is cut after one layer and learns there by ordinary backpropagation.

    loss = CE( U( layer_l( ... layer_0(x) ) ), target ),     U = final layer norm, then output projection

Layers above the cut take no part and do not change. The second paper motivates layer-causal descent by it: there every
layer is such a cut, but for its own weights alone. How the cut model answers is part of every observation
(observing/depth.py), so the model that was trained is scored cut and whole in one pass.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from fairseq_icl.errors import UserError
from fairseq_icl.models.attention import replaced_forward
from fairseq_icl.training.layer_causal import parse_layers


def layer_of_cut(layers: str | None, num_layers: int) -> int:
    """The layer after which the model is cut: the one that the setting `layers` names, by default the last."""
    if layers is None:
        return num_layers - 1
    chosen = parse_layers(layers, num_layers)
    if len(chosen) > 1:
        raise UserError(f"layers={layers}: a short circuit is after one layer; give one of 0-{num_layers - 1}")
    return chosen[0]


def cut_after(decoder: Any, layer: int) -> AbstractContextManager[None]:
    """While open, the layers above `layer` (from 0) hand on what they are given."""
    return skipped(list(decoder.layers)[layer + 1 :])


@contextmanager
def skipped(layers: Iterable[nn.Module]) -> Iterator[None]:
    """While open, these layers of a decoder give back what they get."""
    with replaced_forward({layer: lambda _: lambda x, *_, **__: (x, None, None) for layer in layers}):
        yield
