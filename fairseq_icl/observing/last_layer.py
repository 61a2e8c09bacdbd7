"""The last layer computes only what somebody reads: its feed-forward block at the tokens whose logits are wanted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from fairseq_icl.models.attention import replaced_forward


def last_feed_forward_at(decoder: Any, sequence: Tensor, position: Tensor) -> AbstractContextManager[None]:
    """Inside, the last layer's feed-forward block runs at R tokens only: number `position[r]` of `sequence[r]`.

    The others leave the layer without its contribution, so nothing may read them.
    """
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

    def at_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any) -> Tensor:  # (S, T, d) -> (1, R, ...)
            shape[:] = x.shape[:2]
            return forward(x[first, second][None], *args)

        return run

    def put_back(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any) -> Tensor:  # (1, R, ...) -> (S, T, d)
            result = forward(x, *args)[0]
            return result.new_zeros(*shape, result.size(-1)).index_put((first, second), result)

        return run

    replaced = dict.fromkeys(enters, at_rows)
    replaced[leaves] = (lambda forward: put_back(at_rows(forward))) if leaves in enters else put_back
    with replaced_forward(replaced):
        yield
