"""A lower bound of what is possible: keys and values trained to do at the demonstrations what ICL does there."""

import dataclasses

import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.criterions.layer_causal_ce import MatchICL
from fairseq_icl.errors import UserError
from fairseq_icl.observing.probe import attention_outputs
from fairseq_icl.prompts.build import Prompts
from fairseq_icl.prompts.encoding import FinetuningSequence, Query
from fairseq_icl.replication.configuration import compose_configuration, friendly
from fairseq_icl.replication.plan import expand
from fairseq_icl.settings import Settings
from fairseq_icl.training.match_icl import icl_targets, matching_losses
from tests.criterions.tiny_model import task
from tests.prompts.samples import SENTIMENT, spec_of
from tests.training.small_models import KINDS, SAMPLE, TOKENS, optimizer_of, small_model

CONTEXT = (0, 5, 9, 2, 7, 4, 2)


def prompts_of(context: tuple[int, ...] = CONTEXT) -> Prompts:
    """The two sequences of the sample as demonstrations, and a prompt of others."""
    sequences = [
        FinetuningSequence(row, tuple(tokens), (False,) + (True,) * (len(tokens) - 1))
        for row, tokens in zip(SAMPLE["rows"], TOKENS, strict=True)
    ]
    return Prompts(spec_of(SENTIMENT), Settings(), (0,), context, (1, 2), ((1, 3), (4, 6)), (), tuple(sequences))


def criterion_of(prompts: Prompts) -> MatchICL:
    fake = task()
    fake.prompts = prompts
    return MatchICL(fake)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_what_the_whole_prompt_gives(kind: str):
    model = small_model(kind)
    targets = icl_targets(model, prompts_of())
    for row, tokens in zip(SAMPLE["rows"], TOKENS, strict=True):
        whole = torch.tensor([[*CONTEXT, *tokens[1:]]])
        with torch.no_grad(), attention_outputs(model.decoder) as outputs:
            model(whole)
        expected = torch.stack([output[len(CONTEXT) :, 0] for output in outputs])
        torch.testing.assert_close(targets.outputs[row], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_demonstration_is_not_in_its_own_prompt(kind: str):
    """ICL would copy the answer from there, which no query lets it do."""
    first, second = (tuple(tokens[1:]) for tokens in TOKENS)
    spans = ((1, 1 + len(first)), (2 + len(first), 2 + len(first) + len(second)))
    rows = tuple(SAMPLE["rows"])
    prompts = dataclasses.replace(prompts_of((0, *first, 2, *second, 2)), context_rows=rows, context_spans=spans)
    model = small_model(kind)
    targets = icl_targets(model, prompts)
    for row, context, own in ((rows[0], (0, *second, 2), first), (rows[1], (0, *first, 2), second)):
        with torch.no_grad(), attention_outputs(model.decoder) as outputs:
            model(torch.tensor([[*context, *own]]))
        expected = torch.stack([output[len(context) :, 0] for output in outputs])
        torch.testing.assert_close(targets.outputs[row], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_the_change_is_missing_at_the_start_and_less_after_training(kind: str):
    model, prompts = small_model(kind), prompts_of()
    criterion, optimizer = criterion_of(prompts), optimizer_of(model, lr=0.02)
    missing = []
    for _ in range(10):
        optimizer.zero_grad()
        loss, size, logs = criterion(model, SAMPLE)
        missing.append(float(loss.detach()) / size)
        assert size == sum(len(tokens) - 1 for tokens in TOKENS)
        optimizer.backward(loss / size)
        optimizer.step()
    assert missing[0] == pytest.approx(1, rel=1e-6)
    assert logs["loss_layer_1"] / size != pytest.approx(1, rel=1e-3)
    assert missing[-1] < 0.9


def test_nothing_is_missing_if_the_outputs_are_the_targets():
    model, prompts = small_model("fairseq"), prompts_of()
    targets = icl_targets(model, prompts)
    tokens = torch.tensor(TOKENS[:1])
    with torch.no_grad(), attention_outputs(model.decoder) as outputs:
        model(tokens)
    own = torch.stack([output[1:, 0] for output in outputs])
    reached = targets._replace(outputs={7: own})
    scored = torch.ones(1, tokens.size(1) - 1, dtype=torch.bool)
    losses = matching_losses(model, model.decoder, reached, [7], tokens, scored)
    assert losses.shape == (2, tokens.size(1) - 1)
    torch.testing.assert_close(losses.detach(), torch.zeros_like(losses))


def test_what_cannot_be_matched_is_refused():
    model = small_model("fairseq")
    with pytest.raises(UserError, match="no demonstration is in the prompt"):
        icl_targets(model, prompts_of((0,)))
    with pytest.raises(UserError, match=r"demonstration 7 .* has 6 tokens, .* room for 2 after it"):
        icl_targets(model, prompts_of(CONTEXT + (5,) * 23))
    validation = {name: value for name, value in SAMPLE.items() if name != "rows"}
    with pytest.raises(UserError, match="leave out the validation split"):
        criterion_of(prompts_of())(model, validation)


def as_queries(prompts: Prompts) -> Prompts:
    """The demonstrations themselves as queries."""
    labels = prompts.queries[0].labels
    queries = []
    for sequence in prompts.finetuning:
        (gold,) = [place for place, label in enumerate(labels) if sequence.tokens[-len(label) :] == label]
        tokens = sequence.tokens[1 : -len(labels[gold])]
        queries.append(Query(sequence.row, gold, (tokens,) * len(labels), labels))
    return dataclasses.replace(prompts, queries=tuple(queries))


def test_it_is_more_similar_to_icl_than_gd_at_layer_1_and_on_queries_it_never_saw():
    model = fi.load_model("demo")
    held_out = fi.build_prompts(model, "demo_sentiment", k=8, limit=20, position="gold")
    weights = {}
    for method, rate in (("gd", {"lr": 0.3}), ("match_icl", {})):
        with fi.fine_tuned(model, held_out, method, record_queries=False, **rate) as tuned:
            weights[method] = tuned
    for prompts in (as_queries(held_out), held_out):
        zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
        found = {}
        for method, tuned in weights.items():
            table = fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts), metrics=["sim_aou"])
            found[method] = table[table["example"].isna() & (table["metric"] == "sim_aou")].set_index("layer")["value"]
        assert found["match_icl"][0] > 0.8 > found["gd"][0]
        assert found["match_icl"].dropna().mean() > found["gd"].dropna().mean() + 0.2


def test_its_own_rate_is_taken_unless_one_is_given():
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=2, limit=1)
    with pytest.raises(UserError, match="no learning rate"), fi.fine_tuned(model, prompts, "gd"):
        pass
    equal = {"layer_step": "equal", "layer_step_size": 0.01}
    with (
        pytest.raises(UserError, match="layer_step=equal: needs plain gradient descent"),
        fi.fine_tuned(model, prompts, "match_icl", **equal),
    ):
        pass
    run = ["experiment=ceiling", "model=demo", "dataset=demo_sentiment", "seed=1"]
    for more, rate in (([], 0.001), (["lr=0.5"], 0.5), (["lr_scale=2"], 0.002)):
        cells = expand(compose_configuration(friendly([*run, *more])))
        rates = {cell.method: cell.settings.lr for cell in cells}
        assert rates["match_icl"] == rate
        assert rates["gd"] == (0.5 if more == ["lr=0.5"] else 0.6 if more else 0.3)
