"""The last layer computes only what somebody reads: its feed-forward block at the tokens whose logits are wanted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def last_feed_forward_at(decoder: Any, sequence: Tensor, position: Tensor) -> Iterator[None]:
    """Inside, the last layer's feed-forward block runs at R tokens only: number `position[r]` of `sequence[r]`.

    The others leave the layer without its contribution, so nothing may read them. The first products of the block see
    the R rows alone, its last one puts its result back in their places; norms, activation and residual between and
    around them are the layer's own code.
    """
    layer = decoder.layers[-1]
    enters = [module for module in (layer.fc1, getattr(layer, "gate_proj", None)) if module is not None]
    leaves = layer.fc2
    shape: list[int] = []  # (T, B) of the pass that runs

    def at_rows(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:  # (T, B, d) -> (R, hidden)
            shape[:] = x.shape[:2]
            return forward(x[position, sequence])

        return run

    def put_back(x: Tensor, forward: Callable[[Tensor], Tensor] = leaves.forward) -> Tensor:  # (R, hidden) -> (T, B, d)
        result = forward(x)
        return result.new_zeros(*shape, result.size(-1)).index_put((position, sequence), result)

    for module in enters:
        module.forward = at_rows(module.forward)
    leaves.forward = put_back
    try:
        yield
    finally:
        for module in (*enters, leaves):
            del module.forward
