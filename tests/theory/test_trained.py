"""What linear self-attention learns on regression prompts: one layer, one step; deeper ones, GD++."""

from collections.abc import Callable

import pytest
import torch

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.construction import Regression, gradient_descent, predict, random_tasks
from fairseq_icl.theory.trained import (
    LinearSelfAttentionModel,
    agreement,
    line_searched_rate,
    sensitivities,
    train,
    tune_descent,
)

WIDTH, EXAMPLES = 5, 10


def tasks(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Regression:
    return random_tasks(count, EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def stream(seed: int, batch: int = 512) -> Callable[[], Regression]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: random_tasks(batch, EXAMPLES, WIDTH, generator=generator, dtype=torch.float32)


@pytest.fixture(scope="module")
def unseen() -> Regression:
    return tasks(20_000, seed=99)


def trained_model(depth: int, tied: bool, steps: int) -> LinearSelfAttentionModel:
    model = LinearSelfAttentionModel(WIDTH, 1, depth, tied, torch.Generator().manual_seed(0))
    train(model, stream(seed=1), steps)
    return model


def test_one_trained_layer_is_the_tuned_step(unseen: Regression) -> None:
    model, step = trained_model(1, False, 800), tune_descent(tasks(20_000, seed=5), 1, plus=False)
    seen = agreement(model, step, unseen)
    print(seen)
    assert abs(seen.loss / seen.reference_loss - 1) < 0.05
    assert seen.prediction_distance < 0.1
    assert seen.sensitivity_cosine > 0.999


def test_untrained_layer_is_not(unseen: Regression) -> None:
    model = LinearSelfAttentionModel(WIDTH, 1, 1, generator=torch.Generator().manual_seed(0))
    seen = agreement(model, tune_descent(tasks(4_000, seed=5), 1, plus=False), unseen)
    assert seen.loss > 2 * seen.reference_loss
    assert seen.sensitivity_cosine < 0.9


@pytest.mark.parametrize("tied", [True, False])
def test_two_trained_layers_beat_gradient_descent_and_agree_with_gd_plus_plus(unseen: Regression, tied: bool) -> None:
    model = trained_model(2, tied, 1200)
    tuning = tasks(4_000, seed=5, dtype=torch.float64)
    with_descent = agreement(model, tune_descent(tuning, 2, plus=False, tied=tied), unseen)
    with_plus = agreement(model, tune_descent(tuning, 2, plus=True, tied=tied), unseen)
    print(with_descent, with_plus, sep="\n")
    assert with_descent.loss < 0.6 * with_descent.reference_loss
    assert abs(with_plus.loss / with_plus.reference_loss - 1) < 0.1
    assert with_plus.prediction_distance < 0.2 * with_descent.prediction_distance
    assert with_plus.sensitivity_cosine > 0.999 > with_descent.sensitivity_cosine


def test_tuned_gd_plus_plus_beats_tuned_gd_at_depth(unseen: Regression) -> None:
    tuning = tasks(2_000, seed=5, dtype=torch.float64)
    for steps in (2, 3, 5):
        losses = [float(unseen.loss(tune_descent(tuning, steps, plus, tied=True)(unseen))) for plus in (False, True)]
        assert losses[1] < 0.5 * losses[0]


def test_line_search_finds_the_minimum() -> None:
    task = tasks(500, seed=3, dtype=torch.float64)
    best = line_searched_rate(task)

    def loss(rate: float) -> float:
        return float(task.loss(gradient_descent(task, torch.tensor([rate]).double())))

    assert loss(best) < min(loss(best * 0.99), loss(best * 1.01))
    assert float(tune_descent(task, 1, plus=False).keywords["rates"][0]) == pytest.approx(best, rel=1e-4)


def test_tied_model_repeats_its_layer() -> None:
    model = LinearSelfAttentionModel(WIDTH, 1, 3, tied=True, generator=torch.Generator().manual_seed(0))
    assert len(list(model.parameters())) == 1
    assert model.matrices.shape == (1, 4, WIDTH + 1, WIDTH + 1)
    task = tasks(4, seed=1)
    assert torch.equal(model(task), predict([model.layers()[0]] * 3, task))
    with pytest.raises(UserError, match="at least one layer"):
        LinearSelfAttentionModel(WIDTH, 1, 0)


def test_sensitivity_of_gradient_descent_is_its_weight() -> None:
    task, rates = tasks(10, seed=1, dtype=torch.float64), torch.tensor([0.5, 0.8], dtype=torch.float64)
    slopes = sensitivities(lambda t: gradient_descent(t, rates), task)  # (10, 1, d)
    prediction = gradient_descent(task, rates)[..., 0]
    assert relative_error((slopes * task.queries).sum(-1), prediction) < 1e-10
