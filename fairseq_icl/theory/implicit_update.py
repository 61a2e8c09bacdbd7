"""A context, seen from the MLP behind the attention, is a rank-one change of the MLP's first matrix.

Dherin et al. (2025, arXiv 2507.16003). A block feeds a = A(C, x), what attention makes of the last token x in context
C, into an MLP f(W a + b). With a_0 = A(x) without context and dA = A(C, x) - A(x),

    dW = (W dA) a_0^T / |a_0|^2            f((W + dW) a_0 + b) = f(W A(C, x) + b)

exactly, for this token. The residual stream around the MLP carries its own change dR, which the last bias takes over
(Innocenti and Achour 2025, arXiv 2512.11255, for layer norms and all positions):

    out = R + f_2(W a + b) + b_2:        W <- W + dW,   b_2 <- b_2 + dR

An MLP with a gate, f_2(g(W_g a) * W a), has two matrices that read a; both get their own dW by the same formula. As
contexts grow, the differences of their dW are gradient steps of rate 1/|a_0|^2 on L_k(W) = trace(D_k^T W), D_k =
W (A(C_k, x) - A(C_k+1, x)) a_0^T. What the statement is not: one dW that serves several tokens. `joint_update` finds
that one where it exists.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError


def implicit_update(weight: Tensor, without: Tensor, with_context: Tensor) -> Tensor:
    """dW = (W dA) a_0^T / |a_0|^2 (..., out, in), of rank one for every token.

    `weight` is W (out, in), `without` a_0 (..., in) and `with_context` A(C, x) (..., in).
    """
    size = without.square().sum(-1, keepdim=True)
    if bool((size == 0).any()):
        raise UserError("the MLP's input without context is zero: no change of W acts on it")
    pushed = (with_context - without) @ weight.T  # (..., out)
    return pushed[..., None] * (without / size)[..., None, :]


def joint_update(weight: Tensor, without: Tensor, with_context: Tensor) -> Tensor:
    """The smallest single dW that serves n tokens at once, W dA A_0^+: (n, in) inputs -> (out, in)

    Exact if the n inputs without context are linearly independent (n <= in); of rank up to n.
    """
    inverse: Tensor = torch.linalg.pinv(without.T)  # (n, in)
    return weight @ (with_context - without).T @ inverse


@dataclass(frozen=True)
class BlockUpdate:
    """What to add to a block without context so that it equals the block with context at one token."""

    weights: list[Tensor]  # (hidden, d) dW, to the first linear layer of the MLP and, if it has one, to its gate
    last_bias: Tensor  # (d,) dR, to the bias of its second


@contextmanager
def recorded_mlp(block: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """([a], [R]) of every pass: inputs of a layer's MLP (`fc1`, `fc2`), and the residual stream around it.

    With the norm in front (GPT-2's order) the residual stream is the layer's output without the MLP's, also where the
    MLP runs beside attention; with the norm behind it is the MLP's own input. Tensors come as the layer sees them,
    (length, batch, d) in fairseq.
    """
    for name in ("fc1", "fc2"):
        if not isinstance(getattr(block, name, None), nn.Module):
            raise UserError(f"{type(block).__name__} has no {name}: not a decoder layer of fairseq's kind")
    inputs: list[Tensor] = []
    residuals: list[Tensor] = []
    first, last = block.fc1, block.fc2
    outputs: list[Tensor] = []
    hooks = [first.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))]
    if block.normalize_before:
        hooks.append(last.register_forward_hook(lambda _, __, out: outputs.append(out.detach())))
        hooks.append(
            block.register_forward_hook(
                lambda _, __, out: residuals.append(out[0].detach() - outputs.pop().view_as(out[0]))
            )
        )
    else:
        hooks.append(first.register_forward_pre_hook(lambda _, args: residuals.append(args[0].detach())))
    try:
        yield inputs, residuals
    finally:
        for hook in hooks:
            hook.remove()


def block_update(block: Any, inputs: Sequence[Tensor], residuals: Sequence[Tensor]) -> BlockUpdate:
    """The update of a decoder layer from what its MLP saw at one token, (d,) each: [without, with context]"""
    updates = [implicit_update(weight.detach(), inputs[0], inputs[1]) for weight in _first_weights(block)]
    return BlockUpdate(updates, residuals[1] - residuals[0])


@contextmanager
def applied(block: Any, update: BlockUpdate, bias: bool = True) -> Iterator[None]:
    """While open, the layer runs with the update; without its bias part if `bias` is False."""
    weights, last = _first_weights(block), block.fc2
    old_weights, old_bias = [weight.detach().clone() for weight in weights], last.bias
    with torch.no_grad():
        for weight, change in zip(weights, update.weights, strict=True):
            weight.add_(change)
        if bias:  # a layer without bias gets one for as long
            last.bias = nn.Parameter(update.last_bias if old_bias is None else old_bias + update.last_bias)
    try:
        yield
    finally:
        last.bias = old_bias
        with torch.no_grad():  # the old values, not a subtraction, which would leave rounding errors behind
            for weight, old in zip(weights, old_weights, strict=True):
                weight.copy_(old)


def _first_weights(block: Any) -> list[nn.Parameter]:
    """The matrices (hidden, d) that read the MLP's input: fc1's and, in a gated MLP, the gate's."""
    gate = getattr(block, "gate_proj", None)
    return [part.get_parameter("weight") for part in (block.fc1, gate) if part is not None]
