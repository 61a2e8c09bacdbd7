"""Preconditioned, autoregressive and functional descent: each holds with its premise, and only with it."""

import pytest
import torch
from torch import Tensor

from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.construction import Regression, gradient_step_layer, predict, random_tasks
from fairseq_icl.theory.descent import (
    all_normal_prompts,
    best_rate,
    expected_gradient,
    exponential,
    functional_descent,
    next_states,
    optimal_preconditioner,
    preconditioned_layer,
    random_states,
    rbf,
    run_descent,
    transition_layer,
    transitions,
    tuned_transitions,
)
from fairseq_icl.theory.dual_form import dot_product

COVARIANCE = torch.tensor([[2.0, 0.5], [0.5, 0.4]], dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expected_loss(preconditioner: Tensor, examples: int) -> float:
    task, weights = all_normal_prompts(COVARIANCE, examples)
    error = predict([preconditioned_layer(preconditioner, examples)], task) - task.answers
    return float(weights @ error.square().sum((1, 2)) / 2)


def test_the_listed_prompts_have_the_moments_of_normal_ones() -> None:
    task, weights = all_normal_prompts(COVARIANCE, 2)
    sample = 2 * weights / weights.sum() / 2
    second = torch.einsum("b,bi,bj->ij", sample, task.inputs[:, 0], task.inputs[:, 0])
    assert relative_error(second, COVARIANCE) < 1e-12
    fourth = torch.einsum("b,bi,bi,bj,bj->ij", sample, *[task.inputs[:, 1]] * 4)
    diagonal = COVARIANCE.diag()
    assert relative_error(fourth, torch.outer(diagonal, diagonal) + 2 * COVARIANCE.square()) < 1e-12


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_the_closed_form_is_where_the_expected_gradient_is_zero(examples: int) -> None:
    best = optimal_preconditioner(COVARIANCE, examples)
    assert expected_gradient(preconditioned_layer(best, examples), COVARIANCE, examples) < 1e-10
    least = expected_loss(best, examples)
    moves = torch.randn(10, 2, 2, generator=generator(), dtype=torch.float64)
    assert all(expected_loss(best + 0.01 * move, examples) > least for move in moves)
    newton = torch.linalg.inv(COVARIANCE)  # as if examples were many
    plain = best_rate(COVARIANCE, examples) * torch.eye(2, dtype=torch.float64)
    for other in (newton, plain, optimal_preconditioner(COVARIANCE, examples + 1)):
        assert expected_gradient(preconditioned_layer(other, examples), COVARIANCE, examples) > 1e-3
        assert expected_loss(other, examples) > least
    rates = [expected_loss(by * plain, examples) for by in (0.99, 1.0, 1.01)]
    assert rates[1] == min(rates)


def test_inputs_of_another_covariance_want_another_preconditioner() -> None:
    layer = preconditioned_layer(optimal_preconditioner(COVARIANCE, 2), 2)
    assert expected_gradient(layer, COVARIANCE + 0.5 * torch.eye(2, dtype=torch.float64), 2) > 1e-3


def test_states_keep_their_covariance_and_follow_one_matrix() -> None:
    variances = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
    states = random_states(20_000, generator(), variances)
    for time in (0, 4, 9):
        assert relative_error(states[:, time].T @ states[:, time] / len(states), variances.diag()) < 0.05
    one = states[0]  # (T + 2, d)
    weight = torch.linalg.lstsq(one[:-1], one[1:]).solution
    assert relative_error(one[:-1] @ weight, one[1:]) < 1e-10


def test_a_preconditioner_is_worth_having_only_where_states_vary_unevenly() -> None:
    gains = []
    for variances in (torch.ones(3), torch.tensor([9.0, 1.0, 0.1])):
        tuning, unseen = (transitions(random_states(4_000, generator(seed), variances.double())) for seed in (1, 2))
        plain, best = (
            unseen.loss(next_states(transition_layer(tuned_transitions(tuning, kind)), unseen))
            for kind in (True, False)
        )
        gains.append(float(plain / best))
    assert gains[0] == pytest.approx(1, abs=0.05)
    assert gains[1] > 1.2


def test_a_token_without_the_state_before_cannot_make_the_step() -> None:
    states = random_states(50, generator(), torch.ones(4, dtype=torch.float64))
    task = transitions(states)
    layer = transition_layer(torch.eye(4, dtype=torch.float64))
    same_state_twice = transitions(states.repeat_interleave(2, dim=1))
    assert relative_error(next_states(layer, task), next_states(layer, same_state_twice)[:, ::2][:, :8]) > 0.1


def tasks() -> Regression:
    return random_tasks(30, 9, 3, 2, queries=2, generator=generator(3))


def test_functional_descent_with_the_dot_product_is_descent_on_weights() -> None:
    rates = torch.tensor([0.4, 0.9, 0.6], dtype=torch.float64)
    layers = [gradient_step_layer(3, 2, 9, rate) for rate in rates.tolist()]
    assert relative_error(functional_descent(tasks(), rates, dot_product), predict(layers, tasks())) < 1e-10


@pytest.mark.parametrize("kernel", [rbf, exponential])
def test_kernel_layers_are_functional_steps_of_their_own_kernel_only(kernel) -> None:
    rates = torch.tensor([0.4, 0.9], dtype=torch.float64)
    layers = [gradient_step_layer(3, 2, 9, rate) for rate in rates.tolist()]
    prediction = predict(layers, tasks(), kernel=kernel)
    for explicit in (rbf, exponential, dot_product):
        error = relative_error(prediction, functional_descent(tasks(), rates, explicit))
        assert error < 1e-10 if explicit is kernel else error > 1e-2


def test_many_functional_steps_reach_kernel_regression() -> None:
    task = tasks()
    weights = torch.linalg.solve(rbf(task.inputs, task.inputs), task.targets)
    interpolated = rbf(task.inputs, task.queries) @ weights
    errors = [
        relative_error(functional_descent(task, torch.full((steps,), 2.0).double(), rbf), interpolated)
        for steps in (10, 1_000, 20_000)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.01


def test_what_one_layer_learns_is_nearer_to_the_preconditioned_step() -> None:
    ahn, mesa, cheng = run_descent()
    assert ahn.value < 0.2 * ahn.broken
    assert mesa.value < 0.8 * mesa.broken
    assert cheng.value < 0.8 * cheng.broken
