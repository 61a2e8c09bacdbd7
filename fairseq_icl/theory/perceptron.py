"""The root of the analogy: the perceptron in its primal and in its dual form.

Rosenblatt (1958) keeps a weight vector, Aizerman, Braverman and Rozonoer (1964) keep the examples. For labels
y_i = +-1, going through the examples one by one,

    primal   if y_t (w . x_t) <= 0:                     w <- w + y_t x_t
    dual     if y_t sum_i a_i y_i k(x_i, x_t) <= 0:     a_t <- a_t + 1

With k(x, z) = x . z both make the same mistakes, w = sum_i a_i y_i x_i, and the dual's output
f(x) = sum_i (a_i y_i) (x_i . x) is unnormalised attention of the query x to the examples, with keys x_i and values
a_i y_i. Learning has become remembering. Dai et al. (2023) and Irie et al. (2022) start from here.

Any other kernel k learns another function: attention through a softmax is no longer this perceptron.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]
"""(keys (n, d), query (d,)) -> scores (n,)"""


def dot_product(keys: Tensor, query: Tensor) -> Tensor:
    """k(x_i, x) = x_i . x: keys (n, d), query (d,) -> (n,)"""
    return keys @ query


def softmax_kernel(keys: Tensor, query: Tensor) -> Tensor:
    """Scores normalised over the examples, as in a transformer, which the dual form does not allow for: (n,)"""
    return torch.softmax(keys @ query, dim=0)


@dataclass(frozen=True)
class Primal:
    """The weight vector (d,) and the visits at which it changed, counted from 0 over all rounds."""

    weight: Tensor
    mistakes: list[int]

    def __call__(self, x: Tensor) -> Tensor:
        """w . x: (m, d) -> (m,)"""
        return x @ self.weight


@dataclass(frozen=True)
class Dual:
    """How often every example was mistaken (n,), and the examples themselves."""

    counts: Tensor  # (n,) a_i
    labels: Tensor  # (n,) y_i
    examples: Tensor  # (n, d) x_i
    mistakes: list[int]
    kernel: Kernel = dot_product

    def __call__(self, x: Tensor) -> Tensor:
        """sum_i a_i y_i k(x_i, x): (m, d) -> (m,)"""
        return torch.stack([self.kernel(self.examples, query) @ (self.counts * self.labels) for query in x])

    def weight(self) -> Tensor:
        """sum_i a_i y_i x_i, which is the primal's weight vector if the kernel is the dot product: (d,)"""
        return (self.counts * self.labels) @ self.examples


def train_primal(examples: Tensor, labels: Tensor, rounds: int = 5, keep: float = 1.0) -> Primal:
    """Perceptron on a weight vector that starts at zero.

    Args:
        examples: (n, d).
        labels: (n,), each -1 or 1.
        rounds: how often to go through all examples.
        keep: factor on the old weights at every mistake; below 1 it forgets, which the dual below knows nothing of.
    """
    weight, mistakes = torch.zeros_like(examples[0]), []
    for visit in range(rounds * len(examples)):
        x, y = examples[visit % len(examples)], labels[visit % len(examples)]
        if y * (weight @ x) <= 0:
            weight = keep * weight + y * x
            mistakes.append(visit)
    return Primal(weight, mistakes)


def train_dual(examples: Tensor, labels: Tensor, rounds: int = 5, kernel: Kernel = dot_product) -> Dual:
    """The same perceptron on counts of mistakes; arguments as in `train_primal`."""
    counts, mistakes = torch.zeros_like(examples[:, 0]), []
    for visit in range(rounds * len(examples)):
        index = visit % len(examples)
        if labels[index] * (kernel(examples, examples[index]) @ (counts * labels)) <= 0:
            counts[index] += 1
            mistakes.append(visit)
    return Dual(counts, labels, examples, mistakes, kernel)
