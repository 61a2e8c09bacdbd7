"""Observing queries: scores, recorded positions, and independence of how the work is cut."""

import random

import pytest
import torch
from torch import Tensor

from fairseq_icl.errors import UserError
from fairseq_icl.models.linearized_lm import LinearizedLM
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import Observation, PrefixCache, attention_modules, concatenate, observe_queries, plan_batches
from fairseq_icl.prompts.build import Query
from tests.observe.tiny import CONTEXT, make_queries, tiny_model

KINDS = ("single", "multi", "inputs")
POSITIONS = ("option0", "query", "gold")


def assert_same(a: Observation, b: Observation) -> None:
    for name, value in vars(a).items():
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
    queries = make_queries(kind)
    wanted = {"context": CONTEXT, "position": position, "context_row": True}
    whole = concatenate([observe_queries(model, [query], **wanted) for query in queries])
    shared = observe_queries(model, queries, prefix=PrefixCache().of(model, CONTEXT), **wanted)
    assert_same(shared, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_order_change_nothing(kind: str) -> None:
    model, queries = tiny_model(), make_queries(kind, count=11)
    prefix = PrefixCache().of(model, CONTEXT)
    together = observe_queries(model, queries, context=CONTEXT, prefix=prefix, context_row=True)
    order = random.Random(1).sample(range(11), 11)
    parts = [
        observe_queries(model, [queries[index] for index in order[start : start + 4]], prefix=prefix, context_row=True)
        for start in range(0, 11, 4)
    ]
    assert_same(concatenate(parts).take(torch.argsort(torch.tensor(order))), together)


@torch.no_grad()
def log_probs(model: PretrainedLM, *tokens: int) -> Tensor:
    """Log-probabilities after each token of one zero-shot sequence: (T, V)"""
    return model(torch.tensor([(0, *tokens)]))[0][0].log_softmax(-1)


def test_single_token_scores_are_read_before_the_label() -> None:
    model, query = tiny_model(), Query(7, 1, ((5, 6, 7),) * 3, ((8,), (9,), (10,)))
    observation = observe_queries(model, [query])
    expected = log_probs(model, 5, 6, 7)[-1, [8, 9, 10]]
    torch.testing.assert_close(observation.option_logprobs[0], expected, rtol=1e-5, atol=1e-5)
    assert observation.prediction[0] == expected.argmax()
    assert (observation.row[0], observation.gold[0]) == (7, 1)


def test_several_label_tokens_score_their_mean() -> None:
    model, query = tiny_model(), Query(0, 0, ((5, 6, 7), (5, 6)), ((8, 9), (10,)))
    observation = observe_queries(model, [query])
    first, second = log_probs(model, 5, 6, 7, 8), log_probs(model, 5, 6)
    expected = torch.stack([(first[-2, 8] + first[-1, 9]) / 2, second[-1, 10]])
    torch.testing.assert_close(observation.option_logprobs[0], expected, rtol=1e-5, atol=1e-5)


def test_queries_may_have_different_numbers_of_options() -> None:
    queries = [Query(0, 0, ((5, 6),) * 2, ((8,), (9,))), Query(1, 2, ((5, 6),) * 3, ((8,), (9,), (10,)))]
    scores = observe_queries(tiny_model(), queries).option_logprobs
    assert scores[0, 2] == -torch.inf
    torch.testing.assert_close(scores[0, :2], scores[1, :2])


def test_the_first_of_equal_options_is_predicted() -> None:
    assert observe_queries(tiny_model(), [Query(0, 1, ((5, 6),) * 2, ((8,), (8,)))]).prediction[0] == 0


@pytest.mark.parametrize(("position", "last"), [("option0", (5, 6, 8)), ("query", (5, 6)), ("gold", (5, 6, 9))])
def test_recorded_position(position: str, last: tuple[int, ...]) -> None:
    model = tiny_model()
    recorded = observe_queries(model, [Query(0, 1, ((5, 6),) * 2, ((8,), (9,)))], position=position)
    alone = observe_queries(model, [Query(0, 0, (last,), ((4,),))], position="query")
    torch.testing.assert_close(recorded.attention_output, alone.attention_output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recorded.attention_row, alone.attention_row, rtol=1e-5, atol=1e-5)
    assert recorded.query_length.tolist() == [len(last)]


def test_rows_are_filled_with_zeros_on_the_left() -> None:
    queries = [Query(0, 0, ((5,),) * 2, ((8,), (9,))), Query(1, 0, ((5, 6, 7),) * 2, ((8,), (9,)))]
    observation = observe_queries(tiny_model(), queries)
    assert observation.query_length.tolist() == [2, 4]
    assert not observation.attention_row[0, ..., :2].any()
    assert observation.attention_row[0, ..., 2:].all()


def test_zero_shot_is_the_context_of_bos_alone() -> None:
    model, queries = tiny_model(), make_queries("single")
    cached = PrefixCache().of(model, (0,))
    assert_same(observe_queries(model, queries), observe_queries(model, queries, context=(0,), prefix=cached))


def test_empty_input_is_told() -> None:
    with pytest.raises(UserError, match="row 4: an input or a label has no tokens"):
        observe_queries(tiny_model(), [Query(4, 0, ((),) * 2, ((8,), (9,)))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [None, CONTEXT])
def test_linearized_model_adds_the_first_order(kind: str, context: tuple[int, ...] | None) -> None:
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
        return observe_queries(plain, queries, context=context)

    for name in names:
        linearized.get_parameter(name).data.copy_(deltas[name])
    step = 0.01
    seen, here, above, below = observe_queries(linearized, queries, context=context), *map(plain_at, (0, step, -step))
    for name in ("attention_output", "attention_row", "query_vector"):
        first_order = (getattr(above, name) - getattr(below, name)) / (2 * step)
        torch.testing.assert_close(getattr(seen, name), getattr(here, name) + first_order, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(seen.attention_output, here.attention_output, atol=1e-2)


def longest_of(query: Query) -> int:
    return max(len(tokens) + len(label) for tokens, label in zip(query.inputs, query.labels, strict=True))


def test_plan_sorts_by_length_and_bounds_the_tokens() -> None:
    queries = make_queries("multi", count=40)
    batches = plan_batches(queries, max_tokens=60)
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(40))
    lengths = [longest_of(queries[index]) for index in order]
    assert lengths == sorted(lengths)
    for batch in batches:
        assert len(batch) == 1 or 3 * len(batch) * longest_of(queries[batch[-1]]) <= 60
