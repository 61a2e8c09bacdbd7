"""Dynamics: every point is the run with so many demonstrations, the last one the plain run itself."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

import fairseq_icl as fi
from fairseq_icl.errors import UserError
from fairseq_icl.observing.prefix import Prefix, run_prefix
from fairseq_icl.training.dynamics import METRICS, Curve
from tests.observing.tiny import CONTEXT, tiny_model

K, EXAMPLES = 4, 6
SAME = {"finetuning_order": "icl", "finetuning_demonstrations": "fitting"}


@pytest.fixture(scope="module")
def model():
    return fi.load_model("demo")


def plain_run(model, k: int, limit: int, watch: bool = False, method: str = "gd", **settings: object):
    """(table of the plain run, curve if it was watched, weights)"""
    prompts = fi.build_prompts(model, "demo_sentiment", k=k, limit=limit, **SAME, **settings)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    curve = Curve(prompts, zsl, icl, EXAMPLES) if watch else None
    after = curve.after_demonstration if curve else None
    with fi.fine_tuned(model, prompts, method, lr=0.3, after_demonstration=after) as tuned:
        ft = fi.observe(tuned, prompts)
    table = fi.compare(prompts, zsl, icl, ft, metrics=list(METRICS))
    return table, curve.finish(ft) if curve else None, tuned.weights


@pytest.fixture(scope="module")
def watched(model):
    return plain_run(model, K, 10, watch=True)


def values(table: pd.DataFrame) -> dict[str, float]:
    overall = table[table["layer"].isna() & table["example"].isna()] if "layer" in table else table
    found = dict(zip(overall["metric"], overall["value"], strict=True))
    return {name: found[name] for name in METRICS if name in found}


@pytest.mark.parametrize("count", [1, 3])
def test_a_point_is_the_run_with_so_many_demonstrations(model, watched, count):
    curve = watched[1]
    alone, _, _ = plain_run(model, count, EXAMPLES)
    assert values(curve[curve["demonstrations"] == count]) == pytest.approx(values(alone), rel=1e-4, abs=1e-6)


def test_the_last_point_is_the_plain_run_on_its_first_examples(watched):
    table, curve, _ = watched
    last = values(curve[curve["demonstrations"] == K])
    single = table[table["example"].notna() & (table["example"] < EXAMPLES)]
    for metric in ("accuracy_icl", "accuracy_ft", "sim_aou", "sim_am_delta"):
        assert last[metric] == pytest.approx(single[single["metric"] == metric]["value"].mean(), rel=1e-12)


def test_watching_changes_nothing(model, watched):
    table, _, weights = plain_run(model, K, 10)
    assert table.equals(watched[0])
    assert all(torch.equal(weights[name], watched[2][name]) for name in weights)


def test_there_is_a_point_after_every_demonstration_whatever_a_step_is(model):
    by_token = plain_run(model, 2, 3, watch=True, step_per="token", loss_on="label")[1]
    assert sorted(set(by_token["demonstrations"])) == [1, 2]
    linearized = plain_run(model, 3, 3, watch=True, method="linearized")[1]
    assert sorted(set(linearized["demonstrations"])) == [1, 2, 3]
    icl = linearized[linearized["metric"] == "accuracy_icl"]["value"]
    assert len(icl) == 3


def test_a_prefix_grows_by_what_is_new_alone():
    decoder = tiny_model().decoder
    whole = run_prefix(decoder, CONTEXT)
    ran: list[int] = []
    decoder.layers[0].register_forward_hook(lambda module, args, output: ran.append(args[0].size(1)))
    with torch.no_grad():
        grown: Prefix = run_prefix(decoder, CONTEXT[:10])
        for stop in (11, 30, len(CONTEXT)):
            grown = run_prefix(decoder, CONTEXT[:stop], grown)
    assert ran == [10, 1, 19, len(CONTEXT) - 30]
    assert grown.length == whole.length
    for mine, expected in zip(grown.keys + grown.values, whole.keys + whole.values, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_the_longest_query_need_not_be_among_the_curves(model):
    prompts = fi.build_prompts(model, "demo_sentiment", k=2, limit=10, **SAME)
    by_length = tuple(sorted(prompts.queries, key=lambda query: query.longest))
    assert by_length[2].longest < by_length[-1].longest
    prompts = replace(prompts, queries=by_length)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    curve = Curve(prompts, zsl, icl, 3)
    with fi.fine_tuned(model, prompts, lr=0.3, after_demonstration=curve.after_demonstration) as tuned:
        ft = fi.observe(tuned, prompts)
    assert set(curve.finish(ft)["demonstrations"]) == {1, 2}


def test_a_curve_needs_an_example(model):
    prompts = fi.build_prompts(model, "demo_sentiment", k=1, limit=2)
    zsl = fi.observe(model, prompts)
    with pytest.raises(UserError, match="curve_examples=0"):
        Curve(prompts, zsl, zsl, 0)
