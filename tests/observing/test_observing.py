"""Observing queries: scores, recorded positions, and independence of how the work is cut."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import Observation, Observer, observe
from fairseq_icl.observing import observer as observing
from fairseq_icl.observing.layout import plan_batches
from fairseq_icl.observing.observation import concatenate
from fairseq_icl.observing.prefix import run_prefix
from fairseq_icl.observing.probe import attention_modules
from fairseq_icl.prompts.encoding import Query
from tests.observing.tiny import CONTEXT, as_model, look, make_prompts, make_queries, tiny_model

KINDS = ("single", "multi", "inputs")
POSITIONS = ("option0", "query", "gold")


def assert_same(a: Observation, b: Observation) -> None:
    assert a.tensors().keys() == b.tensors().keys()
    for name, value in a.tensors().items():
        torch.testing.assert_close(
            value, getattr(b, name), rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("python_path", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefix_equals_whole_prompt(kind: str, position: str, python_path: bool) -> None:
    model = tiny_model()
    for module in attention_modules(model.decoder):
        module.skip_embed_dim_check = python_path
    prompts = make_prompts(make_queries(kind), position=position)
    whole_observer = Observer(as_model(model), prompts, in_context=True, whole_prompt=True)
    whole = concatenate([whole_observer([query]) for query in prompts.queries])
    assert whole_observer.prefix is None
    shared_observer = Observer(as_model(model), prompts, in_context=True)
    shared = shared_observer(prompts.queries)
    assert shared_observer.prefix.length == len(CONTEXT)
    assert shared.context_row.shape == (6, 3, len(CONTEXT))
    assert_same(shared, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_order_change_nothing(kind: str) -> None:
    queries = make_queries(kind, count=11)
    observer = Observer(as_model(tiny_model()), make_prompts(queries), in_context=True)
    together = observer(queries)
    order = random.Random(1).sample(range(11), 11)
    parts = [observer([queries[index] for index in order[start : start + 4]]) for start in range(0, 11, 4)]
    assert_same(concatenate(parts).take(torch.argsort(torch.tensor(order))), together)


@torch.no_grad()
def log_probs(model: PretrainedLM, *tokens: int) -> Tensor:
    """Log-probabilities after each token of one zero-shot sequence: (T, V)"""
    return model(torch.tensor([(0, *tokens)]))[0][0].log_softmax(-1)


def test_single_token_scores_are_read_before_the_label() -> None:
    model, query = tiny_model(), Query(7, 1, ((5, 6, 7),) * 3, ((8,), (9,), (10,)))
    observation = look(model, [query])
    expected = log_probs(model, 5, 6, 7)[-1, [8, 9, 10]]
    torch.testing.assert_close(observation.option_logprobs[0], expected, rtol=1e-5, atol=1e-5)
    assert observation.prediction[0] == expected.argmax()
    assert (observation.row[0], observation.gold[0]) == (7, 1)


def test_several_label_tokens_score_their_mean() -> None:
    model, query = tiny_model(), Query(0, 0, ((5, 6, 7), (5, 6)), ((8, 9), (10,)))
    observation = look(model, [query])
    first, second = log_probs(model, 5, 6, 7, 8), log_probs(model, 5, 6)
    expected = torch.stack([(first[-2, 8] + first[-1, 9]) / 2, second[-1, 10]])
    torch.testing.assert_close(observation.option_logprobs[0], expected, rtol=1e-5, atol=1e-5)


def test_queries_may_have_different_numbers_of_options() -> None:
    queries = [Query(0, 0, ((5, 6),) * 2, ((8,), (9,))), Query(1, 2, ((5, 6),) * 3, ((8,), (9,), (10,)))]
    scores = look(tiny_model(), queries).option_logprobs
    assert scores[0, 2] == -torch.inf
    torch.testing.assert_close(scores[0, :2], scores[1, :2])


def test_the_first_of_equal_options_is_predicted() -> None:
    assert look(tiny_model(), [Query(0, 1, ((5, 6),) * 2, ((8,), (8,)))]).prediction[0] == 0


@pytest.mark.parametrize(("position", "last"), [("option0", (5, 6, 8)), ("query", (5, 6)), ("gold", (5, 6, 9))])
def test_recorded_position(position: str, last: tuple[int, ...]) -> None:
    model = tiny_model()
    recorded = look(model, [Query(0, 1, ((5, 6),) * 2, ((8,), (9,)))], position=position)
    alone = look(model, [Query(0, 0, (last,), ((4,),))], position="query")
    torch.testing.assert_close(recorded.attention_output, alone.attention_output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recorded.attention_row, alone.attention_row, rtol=1e-5, atol=1e-5)
    assert recorded.query_length.tolist() == [len(last)]


def test_rows_are_filled_with_zeros_on_the_left() -> None:
    queries = [Query(0, 0, ((5,),) * 2, ((8,), (9,))), Query(1, 0, ((5, 6, 7),) * 2, ((8,), (9,)))]
    observation = look(tiny_model(), queries)
    assert observation.query_length.tolist() == [2, 4]
    assert not observation.attention_row[0, ..., :2].any()
    assert observation.attention_row[0, ..., 2:].all()


def test_zero_shot_is_the_context_of_bos_alone() -> None:
    model, queries = tiny_model(), make_queries("single")
    on_prefix = look(model, queries, context=(0,), in_context=True)
    assert_same(look(model, queries, context_row=True), on_prefix)
    assert look(model, queries).context_row is None


def test_empty_input_is_told() -> None:
    with pytest.raises(UserError, match="row 4: an input or a label has no tokens"):
        look(tiny_model(), [Query(4, 0, ((),) * 2, ((8,), (9,)))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_context", [False, True])
def test_linearized_model_adds_the_first_order(kind: str, in_context: bool) -> None:
    """f(w0) + J delta, against finite differences of the plain model in double precision."""
    names = [f"decoder.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(3) for part in "kv"]
    linearized, plain = LinearizedLM(tiny_model().double().decoder, names).eval(), tiny_model().double()
    base = {name: plain.get_parameter(name).detach().clone() for name in names}
    torch.manual_seed(3)
    deltas = {name: 0.1 * torch.randn_like(base[name]) for name in names}
    queries = make_queries(kind, count=3)

    def plain_at(step: float) -> Observation:
        for name in names:
            plain.get_parameter(name).data = base[name] + step * deltas[name]
        return look(plain, queries, in_context=in_context)

    for name in names:
        linearized.get_parameter(name).data.copy_(deltas[name])
    step = 0.01
    seen, here, above, below = look(linearized, queries, in_context=in_context), *map(plain_at, (0, step, -step))
    for name in ("attention_output", "attention_row", "query_vector"):
        first_order = (getattr(above, name) - getattr(below, name)) / (2 * step)
        torch.testing.assert_close(getattr(seen, name), getattr(here, name) + first_order, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(seen.attention_output, here.attention_output, atol=1e-2)


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_given_deltas_of_a_linearized_model_show_what_its_own_would(kind: str, in_context: bool) -> None:
    """As `fine_tuned` gives them: a prefix must not lose its first-order terms."""
    names = [f"decoder.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(3) for part in "kv"]
    lm = LinearizedLM(tiny_model().decoder, names).eval()
    torch.manual_seed(3)
    deltas = {name: 0.1 * torch.randn_like(lm.get_parameter(name)) for name in names}
    prompts = make_prompts(make_queries(kind))
    given = observe(as_model(lm).under(deltas), prompts, in_context=in_context)
    for name in names:
        lm.get_parameter(name).data.copy_(deltas[name])
    assert_same(given, observe(as_model(lm), prompts, in_context=in_context))


def test_the_base_of_a_linearized_model_runs_on_a_prefix() -> None:
    name = "decoder.layers.1.self_attn.v_proj.weight"
    lm, queries = LinearizedLM(tiny_model().decoder, [name]).eval(), make_queries("single")
    zero = {name: torch.zeros_like(lm.get_parameter(name))}
    lm.get_parameter(name).data.fill_(0.1)
    observer = Observer(as_model(lm).under(zero), make_prompts(queries), in_context=True)
    assert observer.prefix is not None
    assert_same(observer(queries), look(tiny_model(), queries, in_context=True))
    assert Observer(as_model(lm), make_prompts(queries), in_context=True).prefix is None


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_observe_gives_the_queries_in_their_order(kind: str, in_context: bool) -> None:
    model, prompts = as_model(tiny_model(), method="gd", init="untrained"), make_prompts(make_queries(kind, count=11))
    seen = observe(model, prompts, in_context=in_context)
    assert seen.row.tolist() == [query.row for query in prompts.queries]
    assert seen.gold.tolist() == [query.gold for query in prompts.queries]
    assert (seen.context_row is not None) == in_context
    assert (seen.method, seen.init, seen.training_queries) == ("gd", "untrained", None)
    assert_same(seen, Observer(model, prompts, in_context=in_context)(prompts.queries))
    assert_same(observe(model, prompts, in_context=in_context, limit=4), trimmed(seen.take(range(4))))


def trimmed(observation: Observation) -> Observation:
    """Without the columns and options that only other examples filled."""
    columns = int(observation.query_length.max())
    options = int(observation.option_logprobs.isfinite().sum(1).max())
    return replace(
        observation,
        attention_row=observation.attention_row[..., -columns:],
        option_logprobs=observation.option_logprobs[:, :options],
    )


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_do_not_depend_on_how_many_queries_make_a_batch(
    kind: str, in_context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = as_model(tiny_model()), make_prompts(make_queries(kind, count=23))
    expected = observe(model, prompts, in_context=in_context)
    for size in (1, 2, 7, 23):
        monkeypatch.setattr(observing, "plan_batches", batches_of(size))
        seen = observe(model, prompts, in_context=in_context)
        assert torch.equal(seen.prediction, expected.prediction)
        for name, value in expected.tensors().items():
            # Scores are sums that cancel: their rounding is that of the summands.
            scale = float(value.abs().max()) if name in ("context_row", "attention_row") else 1.0
            torch.testing.assert_close(
                getattr(seen, name), value, rtol=1e-6, atol=1e-6 * scale, msg=lambda text, n=name: f"{n}: {text}"
            )


def batches_of(size: int) -> Callable[..., list[list[int]]]:
    return lambda queries: plan_batches(queries, max_tokens=10**9, max_queries=size)


@torch.no_grad()
def test_the_model_keeps_its_mode_and_gets_no_gradient() -> None:
    lm = tiny_model().train()
    look(lm, make_queries("single"), in_context=True)
    assert lm.training
    assert all(parameter.grad is None for parameter in lm.parameters())


def test_the_context_runs_once_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(observing, "run_prefix", lambda *given: runs.append(given) or run_prefix(*given))
    queries = make_queries("single")
    observer = Observer(as_model(tiny_model()), make_prompts(queries), in_context=True)
    first = observer.prefix
    for query in queries:
        observer([query])
    assert observer.prefix is first
    assert [context for _, context, _ in runs] == [CONTEXT]


def test_other_weights_are_observed_without_being_put_into_the_module() -> None:
    lm, queries = tiny_model(), make_queries("single")
    name = "decoder.layers.1.self_attn.v_proj.weight"
    before, weight = lm.get_parameter(name), lm.get_parameter(name).detach() + 0.3
    base, prompts = as_model(lm), make_prompts(queries)
    zsl, icl = observe(base, prompts), observe(base, prompts, in_context=True)
    tuned = base.under({name: weight}, "gd")
    seen, in_context = observe(tuned, prompts), observe(tuned, prompts, in_context=True)
    assert lm.get_parameter(name) is before
    assert_same(observe(base, prompts), zsl)
    other = tiny_model()
    other.get_parameter(name).data.copy_(weight)
    assert_same(seen, observe(as_model(other), prompts))
    assert_same(in_context, observe(as_model(other), prompts, in_context=True))
    assert not torch.allclose(in_context.attention_output, icl.attention_output, atol=1e-3)


def test_numbers_that_overflow_are_told_with_their_row() -> None:
    lm = tiny_model()
    lm.decoder.layers[2].fc2.bias.data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"row 5 \(from 0\) of the validation file is scored NaN"):
        look(lm, make_queries("single")[5:])


def test_the_label_prior_is_the_mean_first_and_a_share_then() -> None:
    """As the code of Zhao et al. has it: an input at which no label is likely counts less."""
    prompts = replace(make_prompts(make_queries("single")), content_free=tuple(make_queries("multi")[:3]))
    observer = Observer(as_model(tiny_model()), prompts)
    probabilities = observer._observe(prompts.content_free).option_logprobs.double().exp()  # (inputs, C)
    seen = observer(prompts.queries)
    expected = {"label_prior": probabilities.mean(0) / probabilities.mean(0).sum()}
    expected |= {"label_prior_normalised": (probabilities / probabilities.sum(1, keepdim=True)).mean(0)}
    for name, shares in expected.items():
        torch.testing.assert_close(getattr(seen, name), shares.log().float().repeat(len(seen), 1))
    assert not torch.allclose(seen.label_prior, seen.label_prior_normalised)
