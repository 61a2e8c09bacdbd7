"""What trained linear self-attention turns out to be, as records for the page; some fifteen seconds on one core."""

import torch

from fairseq_icl.theory.construction import Regression, random_regression
from fairseq_icl.theory.statements import OSWALD, Record
from fairseq_icl.theory.trained import Agreement, LinearSelfAttentionModel, agreement, train, tune_descent

WIDTH, EXAMPLES, BATCH = 5, 10, 512
UNSEEN = 20_000
"""Tasks on which everything is compared; teachers are drawn anew for each, so losses vary by a percent below this."""


def run_trained(seed: int = 0) -> list[Record]:
    """One and two trained layers beside tuned descent; compared in float64 on tasks that neither has seen."""
    unseen = _tasks(UNSEEN, seed + 1)
    return [_one_layer(seed, unseen), _two_layers(seed, unseen)]


def _tasks(count: int, seed: int) -> Regression:
    return random_regression(count, EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))


def _trained_model(depth: int, steps: int, seed: int) -> LinearSelfAttentionModel:
    generator = torch.Generator().manual_seed(seed)
    model = LinearSelfAttentionModel(WIDTH, 1, depth, generator=generator)
    train(model, lambda: random_regression(BATCH, EXAMPLES, WIDTH, generator=generator, dtype=torch.float32), steps)
    return model.double()


def _one_layer(seed: int, unseen: Regression) -> Record:
    step = tune_descent(_tasks(UNSEEN, seed + 2), 1, plus=False)
    untrained = LinearSelfAttentionModel(WIDTH, 1, 1, generator=torch.Generator().manual_seed(seed)).double()
    learned, nothing = (agreement(model, step, unseen) for model in (_trained_model(1, 800, seed), untrained))
    return Record(
        "Trained on regression prompts, one layer finds the tuned step of gradient descent.",
        OSWALD,
        f"|loss of the layer / loss of the line-searched step - 1|; {_details(learned)}",
        abs(learned.loss / learned.reference_loss - 1),
        "not trained",
        abs(nothing.loss / nothing.reference_loss - 1),
        exact=False,
    )


def _two_layers(seed: int, unseen: Regression) -> Record:
    model, tuning = _trained_model(2, 1500, seed), _tasks(4_000, seed + 2)
    plus, plain = (agreement(model, tune_descent(tuning, 2, plus=which), unseen) for which in (True, False))
    return Record(
        "Two trained layers do better than two tuned steps of gradient descent and agree with GD++.",
        OSWALD,
        f"mean distance of predictions from tuned GD++; {_details(plus)}",
        plus.prediction_distance,
        f"plain GD in place of GD++; {_details(plain)}",
        plain.prediction_distance,
        exact=False,
    )


def _details(seen: Agreement) -> str:
    return (
        f"losses {seen.loss:.4f} (layers) and {seen.reference_loss:.4f} (descent), "
        f"cosine of sensitivities {seen.sensitivity_cosine:.5f}"
    )
