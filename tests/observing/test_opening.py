"""What all queries begin with runs once, the last layer only where it is read, and no number changes by it."""

from dataclasses import replace

import pytest
import torch

from fairseq_icl.models.attention import Rule, set_rule
from fairseq_icl.models.pretrained_lm import PretrainedLM
from fairseq_icl.observing import Observer, observe
from fairseq_icl.observing.layers import last_feed_forward_at
from fairseq_icl.observing.layout import lay_out
from fairseq_icl.observing.prefix import run_prefix
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import Query
from tests.observing.test_observing import KINDS, POSITIONS, assert_same
from tests.observing.tiny import CONTEXT, as_model, make_prompts, make_queries, tiny_model
from tests.training.small_models import small_model

OPENING = (9, 8, 7, 9)


def opened(queries: list[Query]) -> list[Query]:
    """The queries behind a common instruction."""
    return [replace(query, inputs=tuple((*OPENING, *tokens) for tokens in query.inputs)) for query in queries]


def prompts_with_opening(kind: str = "single", **settings: object) -> Prompts:
    prompts = make_prompts(opened(make_queries(kind)), **settings)
    assert prompts.opening == OPENING
    return prompts


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_opening_changes_nothing(kind: str, position: str, in_context: bool) -> None:
    model, prompts = as_model(tiny_model()), prompts_with_opening(kind, position=position)
    shared = Observer(model, prompts, in_context=in_context, context_row=True)
    whole = Observer(model, prompts, in_context=in_context, context_row=True, whole_prompt=True)
    seen = shared(prompts.queries)
    assert shared.stem.length == len(shared.context) + len(OPENING)
    assert shared.prefix.length == len(shared.context)
    assert seen.attention_row.size(-1) == int(seen.query_length.max())
    assert_same(seen, whole(prompts.queries))


@pytest.mark.parametrize("kind", ["stablelm", "momentum", "linear"])
@pytest.mark.parametrize("in_context", [False, True])
def test_every_kind_of_attention_has_an_opening_or_goes_without(kind: str, in_context: bool) -> None:
    model = as_model(ruled(kind))
    queries = opened(make_queries("single"))
    prompts = make_prompts([_within(query, 12) for query in queries], context=tuple(t % 12 for t in CONTEXT))
    shared = Observer(model, prompts, in_context=in_context)
    assert len(shared.opening) == (0 if kind == "momentum" else len(OPENING))
    whole = Observer(model, prompts, in_context=in_context, whole_prompt=True)
    assert_same(shared(prompts.queries), whole(prompts.queries))


def ruled(kind: str) -> PretrainedLM:
    """A small model, or one of fairseq's kind under another rule of attention."""
    if kind == "stablelm":
        return small_model(kind)
    lm = small_model("fairseq")
    set_rule(lm.decoder, Rule(linear=kind == "linear", momentum=0.5 if kind == "momentum" else 0.0))
    return lm


def _within(query: Query, size: int) -> Query:
    """The query in a smaller vocabulary."""
    inputs, labels = (
        [tuple(token % size for token in tokens) for tokens in part] for part in (query.inputs, query.labels)
    )
    return replace(query, inputs=tuple(inputs), labels=tuple(labels))


def test_the_opening_runs_once() -> None:
    model, prompts = as_model(tiny_model()), prompts_with_opening()
    rows: list[int] = []
    layer = model.lm.decoder.layers[0]
    with layer.fc1.register_forward_hook(lambda _, args, __: rows.append(args[0].shape[:-1].numel())):
        observe(model, prompts)
    own = sum(len(query.inputs[0]) + 1 - len(OPENING) for query in prompts.queries)
    assert sum(rows) == 1 + len(OPENING) + own


def test_an_opening_leaves_a_token_of_every_input() -> None:
    short = Query(0, 0, (OPENING,) * 2, ((8,), (9,)))
    prompts = make_prompts([*opened(make_queries("single")), short])
    assert prompts.opening == OPENING[:-1]
    assert make_prompts([short]).opening == OPENING[:-1]
    assert replace(prompts, content_free=(replace(short, inputs=((9, 5),) * 2),)).opening == (9,)
    assert make_prompts(make_queries("single")).opening == ()
    assert make_prompts().opening == ()


def test_a_query_that_begins_otherwise_is_refused() -> None:
    observer = Observer(as_model(tiny_model()), prompts_with_opening())
    with pytest.raises(ValueError, match="does not begin"):
        observer(make_queries("single"))


def test_positions_count_from_behind_the_opening() -> None:
    layout = lay_out(opened([Query(0, 0, ((5, 6),) * 2, ((8,), (9,)))]), "option0")
    rest = layout.after(OPENING)
    assert rest.sequences == ((5, 6, 8),)
    assert rest.recorded_position.tolist() == [2]
    assert rest.logit_position.tolist() == [1]
    assert layout.after(()).sequences == layout.sequences


@torch.no_grad()
def test_a_part_of_a_prefix_is_the_prefix_of_that_part() -> None:
    decoder = tiny_model().decoder
    whole, part = run_prefix(decoder, CONTEXT), run_prefix(decoder, CONTEXT[:9])
    torch.testing.assert_close(whole.first(9).keys, part.keys)
    torch.testing.assert_close(whole.first(9).values, part.values)
    assert whole.first(len(CONTEXT)) is whole
    with pytest.raises(ValueError, match="momentum"):
        run_prefix(ruled("momentum").decoder, (0, 5, 6)).first(2)


@pytest.mark.parametrize("kind", ["fairseq", "stablelm", "linearized"])
@torch.no_grad()
def test_the_last_feed_forward_runs_where_it_is_read(kind: str) -> None:
    lm: PretrainedLM = small_model(kind)
    decoder, tokens = lm.decoder, torch.tensor([[5, 6, 7, 8], [9, 10, 11, 4]])
    sequence, position = torch.tensor([1, 0, 1]), torch.tensor([3, 1, 0])
    rows: list[torch.Size] = []

    def features() -> torch.Tensor:
        result: torch.Tensor = decoder.extract_features(tokens, None)[0]
        return result

    expected = lm.evaluate(features)[sequence, position]
    with (
        decoder.layers[-1].fc1.register_forward_hook(lambda _, __, result: rows.append(result.shape[:-1])),
        last_feed_forward_at(decoder, sequence, position),
    ):
        found = lm.evaluate(features)[sequence, position]
    torch.testing.assert_close(found, expected)
    assert rows[-1] == (1, 3)
    assert not any("forward" in vars(module) for module in decoder.layers[-1].modules())
