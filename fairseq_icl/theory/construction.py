"""One linear self-attention layer that is one step of gradient descent on a regression problem in its context.

von Oswald et al. (2023, arXiv 2212.07677, proposition 1 and section 3). A prompt is N tokens e_i = (x_i, y_i) and one
or more query tokens (x, -W_0 x). Linear self-attention with residual connection to the N examples only,

    e_j <- e_j + P sum_i (W_V e_i) (W_K e_i . W_Q e_j)

is one step of rate eta on L(W) = 1/(2N) sum_i |W x_i - y_i|^2 from W_0 when

    W_K = W_Q = [I 0; 0 0],     W_V = [0 0; W_0 -I],     P = (eta / N) I

because it makes y_j - dW x_j of y_j, with dW = -(eta / N) sum_i (W_0 x_i - y_i) x_i^T. The query's y part, negated, is
the prediction (W_0 + dW) x; the next layer meets the remaining targets. In GD++, with -(gamma / eta) I in the upper
left block of W_V, every layer also makes (I - gamma S) x_j of x_j, S = 1/N sum_i x_i x_i^T of its inputs. Seen from the
original inputs this is descent with a preconditioner, W <- W - eta dL/dW M_l^T M_l, M_l being the product of the maps
of the layers below l, and `gradient_descent` computes it in this form, without tokens.
Shapes: B tasks, N examples, Q queries, d inputs, m outputs.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.theory.dual_form import Kernel, dot_product


class Regression(NamedTuple):
    """B linear regression tasks; `answers` are what a learner should predict for `queries`."""

    inputs: Tensor  # (B, N, d)
    targets: Tensor  # (B, N, m)
    queries: Tensor  # (B, Q, d)
    answers: Tensor  # (B, Q, m)

    def loss(self, prediction: Tensor) -> Tensor:
        """1/2 |prediction - answer|^2, summed over outputs, averaged over tasks and queries; prediction (B, Q, m)"""
        return 0.5 * (prediction - self.answers).square().sum(-1).mean()


def random_tasks(
    tasks: int,
    examples: int,
    width: int,
    outputs: int = 1,
    queries: int = 1,
    noise: float = 0.0,
    generator: Generator | None = None,
    dtype: torch.dtype = torch.float64,
    variances: Tensor | None = None,
) -> Regression:
    """Tasks as in the paper: x uniform in [-1, 1]^d, or normal with `variances` (d,); y = W x (+ noise), W normal."""
    normal = partial(torch.randn, generator=generator, dtype=dtype)
    teacher = normal(tasks, width, outputs)
    x = 2 * torch.rand(tasks, examples + queries, width, generator=generator, dtype=dtype) - 1
    if variances is not None:
        x = normal(tasks, examples + queries, width) * variances.sqrt().to(dtype)
    y = x @ teacher + noise * normal(tasks, examples + queries, outputs)
    return Regression(x[:, :examples], y[:, :examples], x[:, examples:], y[:, examples:])


@dataclass(frozen=True)
class LinearSelfAttention:
    """The four matrices of one layer, (D, D) each with D = d + m."""

    key: Tensor
    query: Tensor
    value: Tensor
    projection: Tensor

    def __call__(self, tokens: Tensor, context: int, kernel: Kernel = dot_product) -> Tensor:
        """Tokens (B, N + Q, D) -> the same shape. Only the first N = `context` are attended to, so queries, which come
        last, do not learn from each other. With a `kernel` other than the dot product it is no step of descent on W.
        """
        seen = tokens[:, :context]
        scores = kernel(seen @ self.key.T, tokens @ self.query.T)  # (B, N + Q, N)
        return tokens + scores @ (seen @ self.value.T) @ self.projection.T


def gradient_step_layer(
    width: int, outputs: int, examples: int, rate: float, transform: float = 0.0, initial: Tensor | None = None
) -> LinearSelfAttention:
    """The construction's layer for d, m, N, eta, gamma of GD++ (0: plain descent) and W_0 (m, d), zero if not given."""
    if rate == 0:
        raise UserError("rate: a step of size 0 has no layer (gamma is written as a multiple of eta)")
    if transform and initial is not None:
        raise UserError("transform: GD++ starts from W_0 = 0; W_0 would meet inputs that the layers have changed")
    dtype = torch.float64 if initial is None else initial.dtype
    of_input, of_output = torch.eye(width, dtype=dtype), torch.eye(outputs, dtype=dtype)
    reads_input = torch.block_diag(of_input, 0 * of_output)
    value = torch.block_diag(-transform / rate * of_input, -of_output)
    if initial is not None:
        value[width:, :width] = initial
    return LinearSelfAttention(reads_input, reads_input, value, rate / examples * torch.block_diag(of_input, of_output))


def prompt_tokens(task: Regression, initial: Tensor | None = None) -> Tensor:
    """Tokens (x_i, y_i) of the examples, then (x, -W_0 x) of the queries: (B, N + Q, d + m)"""
    start = torch.zeros_like(task.answers) if initial is None else -task.queries @ initial.T
    examples = torch.cat([task.inputs, task.targets], dim=-1)
    return torch.cat([examples, torch.cat([task.queries, start], dim=-1)], dim=1)


def predict(
    layers: list[LinearSelfAttention], task: Regression, initial: Tensor | None = None, kernel: Kernel = dot_product
) -> Tensor:
    """What a stack of layers predicts for the queries: (B, Q, m)"""
    tokens, context = prompt_tokens(task, initial), task.inputs.shape[1]
    for layer in layers:
        tokens = layer(tokens, context, kernel)
    return -tokens[:, context:, task.inputs.shape[2] :]


def gradient_descent(
    task: Regression, rates: Tensor, transforms: Tensor | None = None, initial: Tensor | None = None
) -> Tensor:
    """Predictions (B, Q, m) of W after len(rates) explicit steps on L(W) = 1/(2N) sum_i |W x_i - y_i|^2.

    `rates` (steps,) are eta of every step, `transforms` (steps,) the gamma of GD++: W <- W - eta_l dL/dW M_l^T M_l and
    M <- (I - gamma_l M S M^T) M, with S the covariance of the original inputs; without them M = I. `initial` is W_0
    (m, d), zero if not given; each task has a W of its own.
    """
    batch, examples, width = task.inputs.shape
    weight = task.inputs.new_zeros(batch, task.targets.shape[2], width)  # (B, m, d)
    weight = weight if initial is None else weight + initial
    identity = torch.eye(width, dtype=weight.dtype)
    covariance = task.inputs.transpose(1, 2) @ task.inputs / examples  # (B, d, d)
    transform = identity.expand(batch, -1, -1)
    gammas = torch.zeros_like(rates) if transforms is None else transforms
    for rate, gamma in zip(rates.to(weight), gammas.to(weight), strict=True):
        residual = task.inputs @ weight.transpose(1, 2) - task.targets  # (B, N, m) W x_i - y_i
        gradient = residual.transpose(1, 2) @ task.inputs / examples  # (B, m, d)
        weight = weight - rate * gradient @ transform.transpose(1, 2) @ transform
        transform = (identity - gamma * transform @ covariance @ transform.transpose(1, 2)) @ transform
    return task.queries @ weight.transpose(1, 2)
