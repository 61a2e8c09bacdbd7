"""Training is remembering: primal and dual perceptron, and a trained layer as attention to what it was trained on."""

import pytest
import torch
from torch import Tensor, nn

from fairseq_icl.errors import UserError
from fairseq_icl.metrics.vectors import relative_error
from fairseq_icl.theory.dual_form import (
    DualRecorder,
    SgdRule,
    dot_product,
    example_weights,
    softmax_kernel,
    train_perceptron,
)

EXACT = 1e-10
RULES = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.05},
    {"lr": 0.05, "momentum": 0.9},
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02, "dampening": 0.3},
    {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02, "nesterov": True},
]


class Network(nn.Module):
    """The recorded layer in the middle of a nonlinear network, called twice in every pass."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.below, self.middle, self.above = nn.Linear(6, 5), nn.Linear(5, 5, bias=bias), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(torch.tanh(self.middle(torch.tanh(self.middle(torch.tanh(self.below(x)))))))


def trained(optimizer_class: type, options: dict, bias: bool = True, clip: float | None = None) -> tuple:
    torch.manual_seed(3)
    network = Network(bias).double()
    optimizer = optimizer_class(network.parameters(), **options)
    with DualRecorder(network.middle) as recorder:
        for step in range(7):
            for _ in range(2):  # gradients of two batches are accumulated
                loss = (network(torch.randn(4, 3, 6).double()) - torch.randn(4, 3, 3).double()).square().mean()
                loss.backward()
            scale = 1.0
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(network.parameters(), clip)
                scale = min(1.0, clip / (float(norm) + 1e-6))
            group = optimizer.param_groups[0]
            group["lr"] = options["lr"] / (1 + step)  # a schedule
            rule = SgdRule.of(optimizer, network.middle.weight) if "momentum" in group else SgdRule(group["lr"])
            recorder.end_step(rule, scale)
            optimizer.step()
            optimizer.zero_grad()
    return network.middle, recorder


@pytest.mark.parametrize("options", RULES)
@pytest.mark.parametrize("bias", [True, False])
def test_dual_form_equals_the_trained_layer(options: dict, bias: bool) -> None:
    layer, recorder = trained(torch.optim.SGD, options, bias)
    x = torch.randn(20, 5).double()
    with torch.no_grad():
        assert relative_error(recorder.dual_layer()(x), layer(x)) < EXACT
    dual = recorder.dual_layer()
    whole = dual.initial_weight + dual.values.T @ dual.keys  # with a bias, if there is one, as its last column
    assert relative_error(whole[:, :5], layer.weight.detach()) < EXACT
    assert dual.scores(x).shape == (20, 7 * 2 * 2 * 12)  # steps, batches, calls, tokens
    assert max(step.unexplained for step in recorder.steps) < EXACT


@pytest.mark.parametrize("options", RULES[1:])
def test_momentum_or_weight_decay_not_accounted_for_breaks_it(options: dict) -> None:
    layer, recorder = trained(torch.optim.SGD, options)
    x = torch.randn(20, 5).double()
    dual = recorder.dual_layer([SgdRule(step.rule.lr) for step in recorder.steps])
    with torch.no_grad():
        assert relative_error(dual(x), layer(x)) > 1e-3


def test_adam_has_no_dual_form() -> None:
    layer, recorder = trained(torch.optim.Adam, {"lr": 0.1})
    x = torch.randn(20, 5).double()
    with torch.no_grad():
        assert relative_error(recorder.dual_layer()(x), layer(x)) > 1e-2
    with pytest.raises(UserError, match="no dual form"):
        SgdRule.of(torch.optim.Adam(layer.parameters()), layer.weight)


def test_clipped_gradients_need_their_scale() -> None:
    layer, recorder = trained(torch.optim.SGD, RULES[2], clip=0.1)
    x = torch.randn(20, 5).double()
    with torch.no_grad():
        assert relative_error(recorder.dual_layer()(x), layer(x)) < EXACT
    for step in recorder.steps:  # what was recorded before clipping would give: other gradients than the optimizer used
        step.gradients = step.gradients * 2
    with torch.no_grad():
        assert relative_error(recorder.dual_layer()(x), layer(x)) > 1e-3


def test_a_weight_used_elsewhere_is_noticed() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    x = torch.randn(3, 4).double()
    with DualRecorder(layer) as recorder:
        (layer(x).sum() + (x @ layer.weight).square().sum()).backward()
        recorder.end_step(SgdRule(0.1))
    assert recorder.steps[0].unexplained > 0.1


def test_closed_form_of_the_weights_under_momentum_and_decay() -> None:
    kept, weights = example_weights([SgdRule(0.1, momentum=0.9)] * 6)
    assert kept == 1.0
    assert weights == pytest.approx([-0.1 * (1 - 0.9 ** (6 - s)) / (1 - 0.9) for s in range(6)])
    kept, weights = example_weights([SgdRule(0.1, weight_decay=0.5)] * 6)
    assert kept == pytest.approx(0.95**6)
    assert weights == pytest.approx([-0.1 * 0.95 ** (5 - s) for s in range(6)])


def test_errors_say_what_is_missing() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with DualRecorder(layer) as recorder, pytest.raises(UserError, match="nothing was recorded"):
        recorder.end_step(SgdRule(0.1))
    with pytest.raises(UserError, match="no step was recorded"):
        recorder.dual_layer()
    with pytest.raises(UserError, match="does not train"):
        SgdRule.of(torch.optim.SGD(other.parameters(), lr=0.1), layer.weight)


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    examples = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    labels = (examples @ torch.randn(6, generator=generator, dtype=torch.float64) + 0.1).sign()
    return examples, labels, torch.randn(30, 6, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_both_perceptrons_make_the_same_mistakes_and_the_same_outputs(seed: int) -> None:
    examples, labels, queries = problem(seed)
    (weight, mistakes), (values, dual_mistakes) = (train_perceptron(examples, labels, k) for k in (None, dot_product))
    assert mistakes == dual_mistakes
    assert len(mistakes) == int(values.abs().sum()) > 0
    assert relative_error(values @ examples, weight) < EXACT
    assert relative_error(dot_product(examples, queries) @ values, queries @ weight) < EXACT


def test_softmax_attention_is_another_perceptron() -> None:
    examples, labels, queries = problem(0)
    dual = softmax_kernel(examples, queries) @ train_perceptron(examples, labels, softmax_kernel)[0]
    assert relative_error(dual, queries @ train_perceptron(examples, labels)[0]) > 0.1


def test_a_perceptron_that_forgets_is_not_in_the_dual() -> None:
    examples, labels, queries = problem(0)
    forgetting = queries @ train_perceptron(examples, labels, keep=0.9)[0]
    dual = dot_product(examples, queries) @ train_perceptron(examples, labels, dot_product)[0]
    assert relative_error(dual, forgetting) > 0.05
