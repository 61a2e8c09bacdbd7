"""Cross entropy behind a frozen unembedding matrix, for many layers at once and without keeping any logits.

The gradient of one row's loss with respect to its features x is  U^T (softmax(U x) - onehot(target)). U is frozen, so
this is all that backward ever needs: the forward pass computes it chunk by chunk and lets the logits go.

Why not `F.linear_cross_entropy`: its chunked path forms a sum over all rows, so the losses of single layers would need
one call a layer, and a product with the 30 rows of one layer is bound by reading U (50,264 x 768 floats) from memory.
On two busy CPU cores at that shape its own choice of chunks took 10 s for 12 layers, this file 0.5 s.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad

ROWS_PER_CHUNK = 192
"""At most so many rows share one pass over U: 39 MB of logits at a vocabulary of 50,264; more hardly save time."""
ROW_MULTIPLE = 16
"""Rows are padded to this: CPU kernels take half as long again for numbers of rows that fill no vector register."""


def unembedding_losses(unembedding: Tensor, target: Tensor, features: tuple[Tensor, ...]) -> Tensor:
    """losses[l, n] = cross_entropy(unembedding @ features[l][n], target[n]) in fp32 (fp64 for fp64 features).

    unembedding: (vocabulary, dim), gets no gradient.  target: (tokens,).  features: one (tokens, dim) a layer.
    Returns (layers, tokens).
    """
    return _UnembeddingLosses.apply(unembedding.detach(), target, *features)


class _UnembeddingLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, unembedding: Tensor, target: Tensor, *features: Tensor) -> Tensor:
        count = len(features) * len(target)
        rows = pad(torch.cat(features), (0, 0, 0, -count % ROW_MULTIPLE))  # (count and padding, dim)
        targets = pad(target.repeat(len(features)), (0, -count % ROW_MULTIPLE))
        losses = rows.new_empty(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
        gradient = torch.empty_like(rows) if any(ctx.needs_input_grad) else None
        for chunk in _chunks(len(rows)):
            part = None if gradient is None else gradient[chunk]
            _fill(losses[chunk], part, unembedding, rows[chunk], targets[chunk])
        if gradient is not None:
            ctx.save_for_backward(gradient[:count])
        return losses[:count].view(len(features), len(target))

    @staticmethod
    def backward(ctx: FunctionCtx, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        layers, tokens = grad_losses.shape
        # A tensor of its own for each layer, not a view: it is freed as soon as that layer has used it.
        parts = zip(gradient.view(layers, tokens, -1), grad_losses.unsqueeze(-1), strict=True)
        return None, None, *((part * grad).to(gradient.dtype) for part, grad in parts)


def _chunks(rows: int) -> list[slice]:
    """Chunks of nearly equal size, multiples of ROW_MULTIPLE: a small last one would cost as much as a large one."""
    number = max(1, math.ceil(rows / ROWS_PER_CHUNK))
    size = math.ceil(rows / number / ROW_MULTIPLE) * ROW_MULTIPLE
    return [slice(start, start + size) for start in range(0, rows, size)] if rows else []


def _fill(losses: Tensor, gradient: Tensor | None, unembedding: Tensor, rows: Tensor, targets: Tensor) -> None:
    """Write the `losses` (n,) and, if wanted, the `gradient` (n, dim) of a chunk of rows (n, dim)."""
    # The vocabulary comes first: with few rows both products are a fifth faster on CPU in this layout.
    scores = torch.mm(unembedding, rows.t()).to(losses.dtype)  # (vocabulary, n)
    target_scores = scores.gather(0, targets.unsqueeze(0)).squeeze(0)  # (n,)
    largest = scores.amax(0)  # (n,)
    # In place from here: one array of this size is alive, whatever the number of layers.
    total = scores.sub_(largest).exp_().sum(0)  # (n,)
    losses.copy_(total.log() + largest - target_scores)
    if gradient is not None:
        probabilities = scores.div_(total)
        minus_one = probabilities.new_full((1, len(targets)), -1.0)
        error = probabilities.scatter_add_(0, targets.unsqueeze(0), minus_one)  # softmax - onehot
        gradient.copy_(torch.mm(unembedding.t(), error.to(rows.dtype)).t())
