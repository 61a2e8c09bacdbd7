"""Linear layers on dual numbers (x + ε dx, W + ε dW) without the products whose tangent is zero.

Where only one of x and W has a tangent, torch's forward differentiation fills the other one up with zeros and
multiplies by them. Most weights of a linearized model are frozen, so a third of its tangent pass would be that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

_linear = functional.linear


def dual_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b with the tangent dx Wᵀ + x dWᵀ + db, of which only the terms that exist are computed."""
    (x, dx), (w, dw) = forward_ad.unpack_dual(input), forward_ad.unpack_dual(weight)
    b, db = (None, None) if bias is None else forward_ad.unpack_dual(bias)
    value = _linear(x, w, b)
    terms = [_linear(dx, w)] if dx is not None else []
    if dw is not None:
        terms.append(_linear(x, dw, db))
    elif db is not None:
        terms.append(db.expand_as(value))
    return forward_ad.make_dual(value, sum(terms[1:], terms[0])) if terms else value


@contextmanager
def linear_without_zero_tangents() -> Iterator[None]:
    """Inside, torch's linear layers and its fused attention multiply by `dual_linear`.

    The function is replaced in torch's own module because both look it up there; a torch function mode would not do,
    since the fused attention calls itself without end under one that is still active within it.
    """
    functional.linear = dual_linear
    try:
        yield
    finally:
        functional.linear = _linear
