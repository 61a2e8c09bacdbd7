"""The constructed layers are explicit gradient descent, and stop being it when a matrix is wrong."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.construction import (
    LinearSelfAttention,
    Regression,
    gradient_descent,
    gradient_step_layer,
    predict,
    prompt_tokens,
    random_tasks,
)
from fairseq_icl.theory.dual_form import softmax_kernel

WIDTH, OUTPUTS, EXAMPLES = 6, 2, 11


@pytest.fixture
def tasks() -> Regression:
    return random_tasks(100, EXAMPLES, WIDTH, OUTPUTS, queries=3, generator=torch.Generator().manual_seed(4))


def layers(rates: Tensor, transforms: Tensor | None = None, initial: Tensor | None = None) -> list[LinearSelfAttention]:
    gammas = torch.zeros_like(rates) if transforms is None else transforms
    pairs = zip(rates.tolist(), gammas.tolist(), strict=True)
    return [gradient_step_layer(WIDTH, OUTPUTS, EXAMPLES, eta, gamma, initial) for eta, gamma in pairs]


def descend_with_autograd(task: Regression, rates: Tensor, initial: Tensor) -> Tensor:
    predictions = []
    for x, y, query in zip(task.inputs, task.targets, task.queries, strict=True):
        weight = initial
        for rate in rates:
            weight = weight.detach().requires_grad_()
            loss = (x @ weight.T - y).square().sum() / (2 * len(x))
            weight = weight.detach() - rate * torch.autograd.grad(loss, weight)[0]
        predictions.append(query @ weight.T)
    return torch.stack(predictions)


@pytest.mark.parametrize("depth", range(1, 6))
def test_layers_are_steps_of_gradient_descent_on_100_tasks(tasks: Regression, depth: int) -> None:
    rates = torch.linspace(0.3, 1.2, depth, dtype=torch.float64)
    initial = torch.randn(OUTPUTS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    claimed = predict(layers(rates, initial=initial), tasks, initial)
    assert relative_error(claimed, gradient_descent(tasks, rates, initial=initial)) < 1e-10
    assert relative_error(claimed, descend_with_autograd(tasks, rates, initial)) < 1e-10
    assert relative_error(predict(layers(rates), tasks), gradient_descent(tasks, rates)) < 1e-10


@pytest.mark.parametrize("depth", range(1, 6))
def test_layers_with_transform_are_steps_of_gd_plus_plus(tasks: Regression, depth: int) -> None:
    rates = torch.linspace(0.3, 1.2, depth, dtype=torch.float64)
    gammas = torch.linspace(0.9, 0.2, depth, dtype=torch.float64)
    claimed = predict(layers(rates, gammas), tasks)
    assert relative_error(claimed, gradient_descent(tasks, rates, gammas)) < 1e-10
    gap = relative_error(claimed, gradient_descent(tasks, rates))
    assert gap > 1e-2 if depth > 1 else gap < 1e-10  # the first step sees inputs that nothing has transformed yet


def test_wrong_projection_or_value_is_not_the_step(tasks: Regression) -> None:
    rates = torch.tensor([0.7, 0.7], dtype=torch.float64)
    truth, right = gradient_descent(tasks, rates), layers(rates)
    wrong_rate = [replace(layer, projection=2 * layer.projection) for layer in right]
    wrong_sign = [replace(layer, value=-layer.value) for layer in right]
    for wrong in (wrong_rate, wrong_sign):
        assert relative_error(predict(wrong, tasks), truth) > 0.1


def test_softmax_is_not_the_step(tasks: Regression) -> None:
    rates = torch.tensor([0.7], dtype=torch.float64)
    tokens = layers(rates)[0](prompt_tokens(tasks), EXAMPLES, kernel=softmax_kernel)
    assert relative_error(-tokens[:, EXAMPLES:, WIDTH:], gradient_descent(tasks, rates)) > 0.1


def test_queries_that_are_attended_to_spoil_the_second_step(tasks: Regression) -> None:
    rates = torch.tensor([0.7, 0.7], dtype=torch.float64)
    tokens = prompt_tokens(tasks)
    for layer in layers(rates):
        tokens = layer(tokens, tokens.shape[1])
    assert relative_error(-tokens[:, EXAMPLES:, WIDTH:], gradient_descent(tasks, rates)) > 1e-2


def test_more_steps_come_closer(tasks: Regression) -> None:
    losses = [float(tasks.loss(gradient_descent(tasks, torch.full((n,), 1.0).double()))) for n in (0, 1, 3, 10, 300)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.02 * losses[0]


def test_what_has_no_construction_is_refused() -> None:
    with pytest.raises(UserError, match="size 0"):
        gradient_step_layer(2, 1, 5, rate=0.0)
    with pytest.raises(UserError, match="starts from W_0 = 0"):
        gradient_step_layer(2, 1, 5, rate=0.1, transform=0.1, initial=torch.ones(1, 2))
