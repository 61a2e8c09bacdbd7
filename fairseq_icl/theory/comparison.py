"""The two numbers by which every statement is judged: how far two tensors are apart, and whether they point alike."""

from torch import Tensor

from fairseq_icl.metrics.vectors import l2_norm


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| over all entries (Euclidean norm); the plain |value| if the reference is zero.

    Args:
        value: what the statement claims, any shape.
        reference: what was computed directly, same shape.
    """
    scale, distance = l2_norm(reference), l2_norm(value - reference)
    return float(distance / scale) if scale > 0 else float(distance)


def cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of two tensors of the same shape, taken as long vectors (for matrices: Frobenius inner product).

    0 if one of them is zero: it points nowhere.
    """
    norms = l2_norm(first) * l2_norm(second)
    return float((first * second).sum() / norms) if norms > 0 else 0.0
