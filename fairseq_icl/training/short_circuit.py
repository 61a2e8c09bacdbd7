"""Short-circuited fine-tuning: the model is cut after one layer and learns there by ordinary backpropagation.

    loss = CE( U( layer_l( ... layer_0(x) ) ), target ),     U = final layer norm, then output projection

Layers above the cut take no part and do not change. The second paper motivates layer-causal descent by it: there every
layer is such a cut, but for its own weights alone. How the cut model answers is part of every observation
(observing/depth.py), so the model that was trained is scored cut and whole in one pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fairseq_icl.errors import UserError
from fairseq_icl.training.layer_causal import parse_layers


def layer_of_cut(layers: str | None, num_layers: int) -> int:
    """The layer after which the model is cut: the one that the setting `layers` names, by default the last."""
    if layers is None:
        return num_layers - 1
    chosen = parse_layers(layers, num_layers)
    if len(chosen) > 1:
        raise UserError(f"layers={layers}: a short circuit is after one layer; give one of 0-{num_layers - 1}")
    return chosen[0]


@contextmanager
def cut_after(decoder: Any, layer: int) -> Iterator[None]:
    """While open, the layers above `layer` (from 0) hand on what they are given."""
    above = list(decoder.layers)[layer + 1 :]
    for module in above:
        module.forward = lambda x, *_, **__: (x, None, None)
    try:
        yield
    finally:
        for module in above:
            del module.forward
