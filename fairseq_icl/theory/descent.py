"""Beyond the plain step: the best preconditioner, descent on a sequence of states, descent in a space of functions.

**Ahn et al. (2023, arXiv 2306.00297, theorem 1).** Inputs x ~ N(0, S), teachers w ~ N(0, I), N examples. Of all layers
of linear self-attention one that minimises the expected loss makes one preconditioned step,

    prediction = 1/N sum_i y_i (x_i . A x),        A = ((N + 1)/N S + tr(S)/N I)^-1

because the loss of a given A is tr((C A - I) S (C A - I)^T) with C = 1/N sum_i x_i x_i^T, least at A = E[C^2]^-1 S, and
E[C^2] = ((N + 1) S + tr(S) I) S / N for normal inputs. With few examples it is not S^-1, the step of Newton's method.

**von Oswald et al. (2023b, arXiv 2309.05858).** States s_{t+1} = W s_t with another W in every sequence. Over tokens
(s_t, s_{t-1}) causal linear self-attention can predict every next state by one step, with a preconditioner A or with
A = eta I, from W = 0 on the loss of all transitions seen so far, 1/2 sum_{t' <= t} |s_t' - W s_{t'-1}|^2:

    prediction_t = sum_{t' <= t} s_t' (s_{t'-1} . A s_t)        W_V reads s_t', W_K reads s_{t'-1}, W_Q makes A s_t

Here W = D O D^-1 with O a random rotation, so that states have the covariance D^2 at all times.

**Cheng et al. (2024, arXiv 2312.06528).** Where scores are a kernel K(x_i, x_j) in place of the dot product, the layers
of `construction` are steps in K's space of functions, f <- f + eta/N sum_i (y_i - f(x_i)) K(x_i, .)
"""

from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Generator, Tensor

from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.construction import LinearSelfAttention, Regression, gradient_step_layer, predict, random_tasks
from fairseq_icl.theory.dual_form import Kernel, dot_product
from fairseq_icl.theory.statements import AHN, CHENG, MESA, Normal, Pairs, Record, exact, hundred_tasks
from fairseq_icl.theory.trained import BATCH, LinearSelfAttentionModel, agreement, train

VARIANCES = torch.tensor([4.0, 1.0, 1.0, 0.25, 0.25], dtype=torch.float64)  # of the inputs, in what is trained here
EXAMPLES, LENGTH = 10, 8


def optimal_preconditioner(covariance: Tensor, examples: int) -> Tensor:
    """A = ((N + 1)/N S + tr(S)/N I)^-1: (d, d)"""
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    return torch.linalg.inv(((examples + 1) * covariance + covariance.trace() * identity) / examples)


def preconditioned_layer(preconditioner: Tensor, examples: int) -> LinearSelfAttention:
    """The layer that predicts 1/N sum_i y_i (x_i . A x), for one output."""
    plain = gradient_step_layer(len(preconditioner), 1, examples, rate=1.0)
    return replace(plain, query=torch.block_diag(preconditioner, torch.zeros(1, 1, dtype=preconditioner.dtype)))


def best_rate(covariance: Tensor, examples: int) -> float:
    """The eta that minimises the expected loss of a step without preconditioner: tr(S S) / tr(E[C^2] S)"""
    inverse = optimal_preconditioner(covariance, examples)
    return float((covariance @ covariance).trace() / torch.linalg.solve(inverse, covariance @ covariance).trace())


def all_normal_prompts(covariance: Tensor, examples: int) -> tuple[Regression, Tensor]:
    """Prompts and their weights (B,) over which the mean loss of a layer *is* its expectation over normal prompts.

    The loss is a polynomial, of degree 4 in an example and 2 in the query, so the three nodes of Gauss and Hermite in
    every direction are enough; for the teacher, of which no power above the third counts in a gradient at such a layer,
    the unit vectors and their negatives are.
    """
    width, dtype = len(covariance), covariance.dtype
    nodes, weights = (-(3**0.5), 0.0, 3**0.5), (1 / 6, 2 / 3, 1 / 6)
    grid, shares = (torch.tensor([*product(of, repeat=width)], dtype=dtype) for of in (nodes, weights))  # (3^d, d) each
    points, masses = grid @ torch.linalg.cholesky(covariance).T, shares.prod(1)
    chosen = torch.tensor([*product(range(len(points)), repeat=examples + 1)])  # (B, N + 1)
    units = torch.eye(width, dtype=dtype)
    teachers = torch.cat([units, -units]).repeat_interleave(len(chosen), dim=0)  # (B, d)
    chosen = chosen.repeat(2 * width, 1)
    x = points[chosen]
    y = x @ teachers[..., None]  # (B, N + 1, 1)
    return Regression(x[:, :-1], y[:, :-1], x[:, -1:], y[:, -1:]), masses[chosen].prod(1) / 2


def expected_gradient(layer: LinearSelfAttention, covariance: Tensor, examples: int) -> float:
    """|gradient| / loss of a layer's expected loss over normal prompts, in all entries of its four matrices; exact."""
    matrices = [matrix.clone().requires_grad_() for matrix in vars(layer).values()]
    task, weights = all_normal_prompts(covariance, examples)
    loss = weights @ (predict([LinearSelfAttention(*matrices)], task) - task.answers).square().sum((1, 2)) / 2
    return float(torch.cat([part.flatten() for part in torch.autograd.grad(loss, matrices)]).norm() / loss.detach())


@exact(
    "The best layer for normal inputs is one step with the preconditioner ((N + 1)/N S + tr(S)/N I)^-1.",
    AHN,
    "|gradient| / loss, expected over all prompts of N = 3 examples in 2 dimensions, in all entries of its matrices",
    "no preconditioner, best rate",
)
def best_preconditioner(normal: Normal) -> Pairs:
    root = normal(2, 2)
    covariance = root @ root.T + 0.2 * torch.eye(2, dtype=root.dtype)
    plain = best_rate(covariance, 3) * torch.eye(2, dtype=root.dtype)
    best, other = (preconditioned_layer(matrix, 3) for matrix in (optimal_preconditioner(covariance, 3), plain))
    yield expected_gradient(best, covariance, 3), expected_gradient(other, covariance, 3)


def random_states(count: int, generator: Generator, variances: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """s_{t+1} = D O D^-1 s_t, (B, T + 2, d), with a rotation O for every sequence and D^2 = diag(variances)."""
    width = len(variances)
    normal = torch.randn(count, width, width + 1, generator=generator, dtype=dtype)
    rotation = torch.linalg.qr(normal[..., :-1])[0]  # (B, d, d)
    states = [normal[..., -1]]
    for _ in range(LENGTH + 1):
        states.append((rotation @ states[-1][..., None])[..., 0])
    return torch.stack(states, dim=1) * variances.sqrt().to(dtype)


def transitions(states: Tensor) -> Regression:
    """States (B, T + 2, d) as tasks: examples s_{t-1} -> s_t, of which the query s_t may see those up to its own."""
    return Regression(states[:, :-2], states[:, 1:-1], states[:, 1:-1], states[:, 2:])


def next_states(layer: LinearSelfAttention, task: Regression, causal: bool = True) -> Tensor:
    """What linear self-attention over the tokens (s_t, s_{t-1}) predicts for the next states: (B, T, d)"""
    tokens = torch.cat([task.targets, task.inputs], dim=-1)  # (B, T, 2 d)
    scores = dot_product(tokens @ layer.key.T, tokens @ layer.query.T)  # (B, T, T)
    attended = (scores.tril() if causal else scores) @ (tokens @ layer.value.T) @ layer.projection.T
    return attended[..., : task.inputs.shape[2]]


class TransitionModel(LinearSelfAttentionModel):
    """One layer of causal linear self-attention, all four matrices free."""

    def forward(self, task: Regression) -> Tensor:
        return next_states(self.layers()[0], task)


def transition_layer(preconditioner: Tensor) -> LinearSelfAttention:
    """The layer that predicts sum_{t' <= t} s_t' (s_{t'-1} . A s_t)."""
    zero, identity = torch.zeros_like(preconditioner), torch.eye(len(preconditioner)).to(preconditioner)
    now, before = torch.cat([identity, zero], dim=1), torch.cat([zero, identity], dim=1)  # (d, 2 d) each
    return LinearSelfAttention(before, preconditioner @ now, now, identity)


def descended_transitions(task: Regression, preconditioner: Tensor) -> Tensor:
    """The same predictions by explicit steps on the loss of the transitions so far, by autograd: (B, T, d)"""
    predictions = []
    for now in range(1, task.inputs.shape[1] + 1):
        weight = task.inputs.new_zeros(len(task.inputs), *preconditioner.shape).requires_grad_()  # (B, d, d)
        loss = (task.targets[:, :now] - task.inputs[:, :now] @ weight.transpose(1, 2)).square().sum() / 2
        step = -torch.autograd.grad(loss, weight)[0] @ preconditioner
        predictions.append((step @ task.queries[:, now - 1, :, None])[..., 0])
    return torch.stack(predictions, dim=1)


@exact(
    "Causal linear self-attention predicts every next state by one preconditioned step on all transitions so far.",
    MESA,
    "relative error against explicit steps by autograd, 50 sequences of 8 states in 4 dimensions",
    "no causal mask: later transitions are learned from too",
)
def autoregressive_step(normal: Normal) -> Pairs:
    generator = Generator().manual_seed(int(normal(1).abs() * 1e6))
    task, preconditioner = transitions(random_states(50, generator, torch.ones(4))), normal(4, 4)
    truth, layer = descended_transitions(task, preconditioner), transition_layer(preconditioner)
    yield relative_error(next_states(layer, task), truth), relative_error(next_states(layer, task, False), truth)


def tuned_transitions(task: Regression, plain: bool) -> Tensor:
    """The A (d, d), or with `plain` the eta I, of least squared error over the given sequences."""
    before, now = task.inputs, task.queries
    seen = (now[..., None] * before[..., None, :]).cumsum(1)  # (B, T, d, d) sum of s_t' s_{t'-1}^T
    made = torch.einsum("btia,btk->btiak", seen, now).flatten(0, 2).flatten(1)  # of every entry of A
    identity = torch.eye(now.shape[2], dtype=now.dtype)
    made = made @ identity.reshape(-1, 1) if plain else made
    found = torch.linalg.lstsq(made, task.answers.reshape(-1, 1)).solution
    return found * identity if plain else found.view_as(identity)


def rbf(keys: Tensor, queries: Tensor) -> Tensor:
    """exp(-|x_i - x|^2 / 2)"""
    return torch.exp(-torch.cdist(queries, keys).square() / 2)


def exponential(keys: Tensor, queries: Tensor) -> Tensor:
    """exp(x_i . x), the kernel of softmax attention before it is normalised"""
    return torch.exp(dot_product(keys, queries))


def functional_descent(task: Regression, rates: Tensor, kernel: Kernel) -> Tensor:
    """Predictions (B, Q, m) of f after len(rates) steps f <- f + eta/N sum_i (y_i - f(x_i)) K(x_i, .) from f = 0."""
    inside, outside = kernel(task.inputs, task.inputs), kernel(task.inputs, task.queries)  # (B, N, N), (B, Q, N)
    learned, prediction = torch.zeros_like(task.targets), torch.zeros_like(task.answers)
    for rate in rates / task.inputs.shape[1]:
        residual = task.targets - learned
        learned, prediction = learned + rate * inside @ residual, prediction + rate * outside @ residual
    return prediction


@exact(
    "Layers whose scores are a kernel are steps of gradient descent in that kernel's space of functions.",
    CHENG,
    "largest relative error of predictions, kernels exp(-|x - z|^2 / 2) and exp(x . z), L = 1..5, 100 random tasks",
    "the layers attend by the dot product",
)
def functional_steps(normal: Normal) -> Pairs:
    task = hundred_tasks(normal)
    for kernel, depth in product((rbf, exponential), range(1, 6)):
        rates = torch.linspace(0.3, 1.0, depth, dtype=torch.float64)
        truth = functional_descent(task, rates, kernel)
        layers = [gradient_step_layer(6, 2, 12, rate) for rate in rates.tolist()]
        right, wrong = (relative_error(predict(layers, task, kernel=k), truth) for k in (kernel, dot_product))
        yield right, wrong


def run_descent(seed: int = 0) -> list[Record]:
    """What one layer learns where a preconditioner, or a kernel, is worth having; on data that it has not seen."""
    return [_trained_preconditioner(seed), _trained_on_states(seed), _matching_kernel(seed)]


def _trained_preconditioner(seed: int) -> Record:
    generator = Generator().manual_seed(seed)
    width, covariance = len(VARIANCES), VARIANCES.diag()
    tasks = partial(random_tasks, examples=EXAMPLES, width=width, generator=generator, variances=VARIANCES)
    model = LinearSelfAttentionModel(width, 1, 1, generator=generator)
    with torch.no_grad():  # from a start of the other sign it often ends in a worse minimum
        model.matrices[:, 1] = model.matrices[:, 0]
        model.matrices[:, 3] = -model.matrices[:, 2].transpose(1, 2)
    train(model, lambda: tasks(BATCH, dtype=torch.float32), 800)
    unseen = tasks(20_000)
    plain = best_rate(covariance, EXAMPLES) * torch.eye(width, dtype=torch.float64)
    layers = [preconditioned_layer(A, EXAMPLES) for A in (optimal_preconditioner(covariance, EXAMPLES), plain)]
    best, other = (agreement(model.double(), partial(predict, [layer]), unseen) for layer in layers)
    return Record(
        "Trained on inputs that vary more in some directions, one layer finds the preconditioned step.",
        AHN,
        f"mean distance of predictions from the step with the closed form's preconditioner; {best}",
        best.prediction_distance,
        f"no preconditioner, best rate; {other}",
        other.prediction_distance,
        kind="measured",
    )


def _trained_on_states(seed: int) -> Record:
    generator = Generator().manual_seed(seed)
    model = TransitionModel(4, 4, 1, generator=generator)
    train(model, lambda: transitions(random_states(BATCH, generator, VARIANCES[:4], dtype=torch.float32)), 800)
    tuning, unseen = (transitions(random_states(4_000, generator, VARIANCES[:4])) for _ in range(2))
    with torch.no_grad():
        found = model.double()(unseen)
    steps = [next_states(transition_layer(tuned_transitions(tuning, plain)), unseen) for plain in (False, True)]
    losses = [float(unseen.loss(part)) for part in (found, *steps)]
    best, other = (float((found - step).norm(dim=-1).mean()) for step in steps)
    return Record(
        "Trained to predict the next state of linear systems, a layer comes near to one step on the transitions seen.",
        MESA,
        "mean distance of predictions from the best step with a preconditioner; "
        f"losses {losses[0]:.4f} (layer) and {losses[1]:.4f} (step)",
        best,
        f"no preconditioner, best rate: loss {losses[2]:.4f}",
        other,
        kind="measured",
    )


def _matching_kernel(seed: int) -> Record:
    generator = Generator().manual_seed(seed)
    task = random_tasks(1_000, EXAMPLES, 2, generator=generator, queries=4)
    x = 3 * torch.cat([task.inputs, task.queries], dim=1)  # (B, N + Q, d)
    root = torch.linalg.cholesky(rbf(x, x) + 1e-8 * torch.eye(x.shape[1], dtype=x.dtype))
    y = root @ torch.randn(len(x), x.shape[1], 1, generator=generator, dtype=x.dtype)  # a random function's values
    drawn = Regression(x[:, :EXAMPLES], y[:, :EXAMPLES], x[:, EXAMPLES:], y[:, EXAMPLES:])
    rates = torch.logspace(-2, 0.5, 11, dtype=x.dtype)
    matched, linear = (
        min(float(drawn.loss(functional_descent(drawn, rate.expand(8), kernel))) for rate in rates)
        for kernel in (rbf, dot_product)
    )
    return Record(
        "Attention predicts random functions best with the kernel that they were drawn with.",
        CHENG,
        "loss of 8 layers at their best rate, functions from a Gaussian process with the kernel exp(-|x - z|^2 / 2)",
        matched,
        "the dot product in place of that kernel, at its best rate",
        linear,
        kind="measured",
    )
