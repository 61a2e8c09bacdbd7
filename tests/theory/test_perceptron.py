"""Primal and dual perceptron are one learner."""

import pytest
import torch
from torch import Tensor

from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.perceptron import softmax_kernel, train_dual, train_primal


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    examples = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    labels = (examples @ torch.randn(6, generator=generator, dtype=torch.float64) + 0.1).sign()
    return examples, labels, torch.randn(30, 6, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_same_mistakes_same_weights_same_outputs(seed: int) -> None:
    examples, labels, queries = problem(seed)
    primal, dual = train_primal(examples, labels), train_dual(examples, labels)
    assert primal.mistakes == dual.mistakes
    assert len(primal.mistakes) == int(dual.counts.sum()) > 0
    assert relative_error(dual.weight(), primal.weight) < 1e-10
    assert relative_error(dual(queries), primal(queries)) < 1e-10


def test_softmax_attention_is_another_learner() -> None:
    examples, labels, queries = problem(0)
    dual = train_dual(examples, labels, kernel=softmax_kernel)
    assert relative_error(dual(queries), train_primal(examples, labels)(queries)) > 0.1


def test_a_primal_that_forgets_is_not_in_the_dual() -> None:
    examples, labels, queries = problem(0)
    forgetting = train_primal(examples, labels, keep=0.9)
    assert relative_error(train_dual(examples, labels)(queries), forgetting(queries)) > 0.05
