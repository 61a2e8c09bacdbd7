"""Shallow descent: every form against its definition, computed another way, in double precision."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.models import Model
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing.probe import attention_inputs, attention_outputs
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import FinetuningSequence
from fairseq_icl.settings import Settings
from fairseq_icl.theory.construction import gradient_step_layer, predict, random_tasks
from fairseq_icl.training.shallow import Shallow, Step, Weigh, demonstration_states, descend, ridge, shallow_gd
from tests.models.tiny_transformers import tiny_decoder
from tests.observing.tiny import as_model, make_prompts
from tests.training.small_models import small_model

KINDS = ("fairseq", "stablelm", "gpt_neox")
EXACT = {"rtol": 0, "atol": 1e-10}
DEMONSTRATIONS = [(0, 5, 7, 4, 9, 11), (0, 8, 6, 10), (0, 12, 3, 3, 6, 5, 10)]
"""BOS, an input, and labels of one token, one, and two."""


def matrix_of(edit: Shallow, number: int) -> Tensor:
    """W of f(x) = W x, (d, d), of a linear function in one piece: the primal form."""
    (step,) = edit.steps
    return edit.value(number, torch.eye(step.inputs.size(2)).to(step.inputs)).T


def model_of(kind: str) -> Model:
    return as_model(small_model(kind, layers=3).eval())


def prompts_of(**settings: object) -> Prompts:
    lengths = (1, 1, 2)
    sequences = [
        FinetuningSequence(row, tokens, (True,) * len(tokens), length)
        for row, (tokens, length) in enumerate(zip(DEMONSTRATIONS, lengths, strict=True))
    ]
    return replace(make_prompts(**settings), finetuning=tuple(sequences))


def learnt(kind: str, **settings: object) -> tuple[Model, Shallow]:
    model, prompts = model_of(kind), prompts_of()
    with torch.no_grad():
        return model, shallow_gd(model, prompts, replace(prompts.settings, **settings))


def explicit_matrices(
    model: Model, rate: float, steps: int, one_at_a_time: bool, preconditioned: bool = False
) -> list[Tensor]:
    """W of every layer by autograd, from states of plain passes of one demonstration each."""
    decoder = model.lm.decoder
    inputs, states, labels = [], [], []
    for tokens, place in zip(DEMONSTRATIONS, (4, 2, 4), strict=True):
        embedded: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, kept=embedded: kept.append(args[0]))
            for layer in decoder.layers
        ]
        with torch.no_grad(), attention_inputs(decoder) as received, attention_outputs(decoder) as outputs:
            decoder(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        inputs.append(torch.stack(received)[:, place, 0])
        states.append((torch.stack(embedded) + torch.stack(outputs))[:, place, 0])
        labels.append(tokens[place + 1])
    x, h, y = torch.stack(inputs, 1), torch.stack(states, 1), torch.tensor(labels)  # (L, n, d) twice, (n,)
    n, width = x.shape[1:]
    matrices = []
    for layer in range(len(x)):
        moments = x[layer].T @ x[layer] / n
        optimum = torch.linalg.inv((n + 1) / n * moments + moments.trace() / n * torch.eye(width).double())
        weight = torch.zeros(width, width, dtype=torch.float64, requires_grad=True)
        for _ in range(steps):
            for batch in torch.arange(n).split(1 if one_at_a_time else n):
                moved = h[layer, batch] + x[layer, batch] @ weight.T
                normed = decoder.layer_norm(moved) if decoder.layer_norm is not None else moved
                loss = F.cross_entropy(decoder.output_layer(normed), y[batch], reduction="sum")
                (gradient,) = torch.autograd.grad(loss, weight)
                step = gradient @ optimum if preconditioned else gradient
                weight = (weight - rate * step).detach().requires_grad_(True)
        matrices.append(weight.detach())
    return matrices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", ["full", "one"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_linear_form_is_autograd_on_a_matrix(kind: str, batch: str, steps: int):
    model, edit = learnt(kind, lr=0.03, shallow_steps=steps, shallow_batch=batch)
    for layer, expected in enumerate(explicit_matrices(model, 0.03, steps, batch == "one")):
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(matrix_of(edit, layer), expected, **EXACT)
        x = torch.randn(5, len(expected), dtype=torch.float64)
        torch.testing.assert_close(edit.value(layer, x), x @ expected.T, **EXACT)  # the dual form


def test_preconditioned_steps_are_autograd_with_ahns_matrix_behind_the_gradient():
    model, edit = learnt("fairseq", lr=0.03, shallow_steps=2, shallow_step="preconditioned")
    for layer, expected in enumerate(explicit_matrices(model, 0.03, 2, False, preconditioned=True)):
        torch.testing.assert_close(matrix_of(edit, layer), expected, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_is_added_to_the_attention_output_and_nothing_crosses_layers(kind: str):
    edit = learnt(kind, lr=0.03, layers="1-2")[1]
    x, output = torch.randn(2, 4, edit.steps[0].inputs.size(2), dtype=torch.float64)
    assert torch.equal(edit.attention(0, output, x, x), output)
    torch.testing.assert_close(edit.attention(2, output, x, x), output + edit.value(1, x), **EXACT)
    whole = learnt(kind, lr=0.03)[1]
    for layer in (1, 2):
        torch.testing.assert_close(matrix_of(edit, layer - 1), matrix_of(whole, layer), **EXACT)


def squared_errors(targets: Tensor):
    return lambda values, batch: targets[:, batch] - values


@pytest.mark.parametrize("gamma", [0.0, 0.3])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_linear_attention_layer_of_von_oswald_is_a_step(layers: int, gamma: float):
    """Also gd++, in which the layers transform the inputs."""
    task = random_tasks(4, 9, 5, outputs=5, queries=3, generator=torch.Generator().manual_seed(0))
    rate = 0.7
    gammas = (lambda inputs: torch.full((len(inputs),), gamma, dtype=torch.float64)) if gamma else None
    steps = descend(task.inputs, squared_errors(task.targets), Weigh(), rate=rate / 9, steps=layers, gammas=gammas)
    learnt_function = Shallow(steps, Weigh(), range(4))
    expected = predict([gradient_step_layer(5, 5, 9, rate, gamma)] * layers, task)
    for number in range(4):
        torch.testing.assert_close(learnt_function.value(number, task.queries[number]), expected[number], **EXACT)


def test_one_step_of_gd_plus_plus_is_a_plain_one_and_two_are_not():
    plain, plus = (learnt("fairseq", lr=0.03, shallow_step=step)[1] for step in ("plain", "gd++"))
    torch.testing.assert_close(matrix_of(plus, 1), matrix_of(plain, 1), **EXACT)
    x = torch.randn(3, plain.steps[0].inputs.size(2), dtype=torch.float64)
    two = [learnt("fairseq", lr=0.03, shallow_step=step, shallow_steps=2)[1].value(1, x) for step in ("plain", "gd++")]
    assert not torch.allclose(*two, rtol=1e-3)


@pytest.mark.parametrize("batch", ["full", "one"])
def test_a_linear_kernel_is_the_linear_form(batch: str):
    common = {"lr": 0.03, "shallow_steps": 2, "shallow_batch": batch}
    linear, kernel = (
        learnt("fairseq", **common, **form)[1] for form in ({}, {"shallow": "kernel", "kernel": "linear"})
    )
    torch.testing.assert_close(matrix_of(kernel, 2), matrix_of(linear, 2), **EXACT)


def test_a_softmax_kernel_is_attention_to_the_demonstrations():
    edit = learnt("fairseq", lr=0.3, shallow="kernel", shallow_steps=2)[1]
    (step,) = edit.steps
    x = torch.randn(4, step.inputs.size(2), dtype=torch.float64)
    attended = F.scaled_dot_product_attention(x[None], step.inputs[1][None], step.coefficients[1][None])[0]
    torch.testing.assert_close(edit.value(1, x), attended, **EXACT)


def test_the_rbf_kernel_is_its_formula():
    inputs, x = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    distance = (inputs[:, :, None] - inputs[:, None]).square().sum(-1)
    width = distance.flatten(1).median(1).values
    expected = torch.exp(-(x[:, :, None] - inputs[:, None]).square().sum(-1) / (2 * width[:, None, None]))
    torch.testing.assert_close(Weigh("rbf")(inputs, x), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_many_steps_reach_ridge(kernel: str):
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    rate, weigh = 4.0, Weigh(kernel)
    few, many = (
        descend(inputs, squared_errors(targets), weigh, rate=0.02, steps=steps, decay=1 / rate)[0].coefficients
        for steps in (20, 4000)
    )
    (closed,) = ridge(inputs, targets, weigh, rate)
    torch.testing.assert_close(many, closed.coefficients, **EXACT)
    assert not torch.allclose(few, closed.coefficients, atol=1e-3)
    gram = weigh.products(inputs, inputs)
    loss = lambda c: (gram @ c - targets).square().sum() + (c * (gram @ c)).sum() / rate  # noqa: E731
    assert all(loss(closed.coefficients) < loss(closed.coefficients + 1e-3 * torch.randn(2, 5, 8)) for _ in range(20))


def test_ridge_takes_label_embeddings_for_targets():
    model, edit = learnt("fairseq", lr=1e9, shallow="ridge")
    (step,) = edit.steps
    labels = torch.tensor([11, 10, 5])
    expected = model.lm.decoder.output_projection.weight[labels]
    torch.testing.assert_close(edit.value(1, step.inputs[1]), expected, rtol=0, atol=1e-5)


FORMS = [
    {"shallow": "linear"},
    {"shallow": "kernel"},
    {"shallow": "kernel", "kernel": "rbf"},
    {"shallow": "ridge"},
    {"shallow_step": "preconditioned", "shallow_batch": "one"},
    {"shallow_step": "gd++", "shallow_steps": 2},
]


@pytest.fixture(scope="module")
def demo() -> tuple[Model, Prompts]:
    model = fi.load_model("demo")
    return model, fi.build_prompts(model, "demo_sentiment", k=8, seed=1, limit=12, position="query")


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_rate_of_zero_is_zero_shot_to_the_bit_and_another_is_not(
    demo: tuple[Model, Prompts], form: dict[str, object]
):
    model, prompts = demo
    zsl = fi.observe(model, prompts)
    seen = []
    for rate in (0.0, 0.01):
        with fi.fine_tuned(model, prompts, "shallow_gd", lr=rate, **form) as tuned:
            seen.append(fi.observe(tuned, prompts))
    for name, value in zsl.tensors().items():
        assert torch.equal(value, seen[0].tensors()[name]), name
    assert not torch.equal(zsl.option_logprobs, seen[1].option_logprobs)
    assert seen[1].method == "shallow_gd"


def test_recorded_activations_are_those_of_the_edited_model(demo: tuple[Model, Prompts]):
    model, prompts = demo
    with fi.fine_tuned(model, prompts, "shallow_gd", lr=0.01) as tuned:
        seen = fi.observe(tuned, prompts, limit=3)
        recorded = fi.observe(tuned, prompts, limit=3, record="attention_output").activations
    assert recorded is not None
    torch.testing.assert_close(recorded.attention_output[:, :, 0], seen.attention_output, rtol=1e-4, atol=1e-4)


def test_zero_steps_is_zero_shot_too():
    steps = descend(torch.randn(1, 3, 4), squared_errors(torch.randn(1, 3, 4)), Weigh(), rate=1.0, steps=0)
    assert isinstance(steps[0], Step)
    assert not steps[0].coefficients.any()


def test_descent_makes_the_labels_of_other_rows_likelier(demo: tuple[Model, Prompts]):
    model, prompts = demo
    likely = []
    for rate in (0.0, 0.01):
        with fi.fine_tuned(model, prompts, "shallow_gd", lr=rate) as tuned:
            seen = fi.observe(tuned, prompts)
        likely.append(float(seen.option_logprobs.gather(1, seen.gold[:, None]).mean()))
    assert likely[1] > likely[0] + math.log(1.1)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gemma3_text", "norms or scales what its attention puts out"),
        ("gemma2", "output layer is not one plain matrix"),
    ],
)
def test_what_a_family_cannot_do_is_told_in_a_line(kind: str, told: str):
    model, prompts = as_model(PretrainedLM(tiny_decoder(kind)).eval()), prompts_of()
    with pytest.raises(UserError, match=told), torch.no_grad():
        shallow_gd(model, prompts, replace(Settings(), lr=0.1))


def test_states_are_those_of_the_token_before_the_label():
    model = model_of("fairseq")
    with torch.no_grad():
        found = demonstration_states(model, prompts_of(), range(3))
    assert found.labels.tolist() == [11, 10, 5]
