"""The two numbers by which every statement is judged: how far two tensors are apart, and whether they point alike."""

import torch
from torch import Tensor


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| over all entries (Euclidean norm); the plain |value| if the reference is zero.

    Args:
        value: what the statement claims, any shape.
        reference: what was computed directly, same shape.
    """
    scale = torch.linalg.vector_norm(reference)
    distance = torch.linalg.vector_norm(value - reference)
    return float(distance / scale) if scale > 0 else float(distance)


def cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of two tensors of the same shape, taken as long vectors (for matrices: Frobenius inner product).

    0 if one of them is zero: it points nowhere.
    """
    norms = torch.linalg.vector_norm(first) * torch.linalg.vector_norm(second)
    return float((first * second).sum() / norms) if norms > 0 else 0.0
