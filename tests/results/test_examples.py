"""The examples that a cell keeps for people to look at."""

import json

import torch

import fairseq_icl as fi
from fairseq_icl.metrics.training_attention import TrainingAttention
from fairseq_icl.results.collector import training_tokens
from fairseq_icl.results.examples import KEPT, TOP_TOKENS, most_disagreeing


def test_examples_are_those_that_disagree_most_with_the_weights_of_the_metrics():
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=8, seed=1, limit=20)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    with fi.fine_tuned(model, prompts, method="gd", lr=0.3) as tuned:
        ft = fi.observe(tuned, prompts)
    kept = most_disagreeing(prompts, zsl, icl, ft, model.files.spell)
    assert len(kept["examples"]) == KEPT
    assert len(json.dumps(kept)) < 100_000
    distances = (icl.option_logprobs.softmax(1) - ft.option_logprobs.softmax(1)).abs().sum(1) / 2
    first, rows = kept["examples"][0], [query.row for query in prompts.queries]
    assert [one["disagreement"] for one in kept["examples"]] == [
        round(float(x), 4) for x in distances.double().sort(descending=True).values[:KEPT]
    ]
    number = rows.index(first["row"])
    assert number == int(distances.argmax())
    assert max(range(2), key=first["probabilities"]["icl"].__getitem__) == int(icl.prediction[number])
    assert sum(first["probabilities"]["ft"]) == 1.0

    # What is shown of a demonstration is its own text, and its weight is that of Recall and Kendall.
    assert len(kept["demonstrations"]) == 8
    assert "".join(kept["demonstrations"][0]).startswith(" Review:")
    assert first["query"].startswith(" Review:")
    training = training_tokens(prompts, ft.training_queries)
    seen = TrainingAttention.of(torch.tensor([number]), icl.take([number]), ft.take([number]), training)
    for side, weights in (("icl", seen.icl_examples), ("ft", seen.ft_examples)):
        assert first[side]["demonstrations"] == weights[0].mul(1000).round().long().tolist()
        assert {len(layer) for layer in first[side]["tokens"]} == {TOP_TOKENS}
    place, weight = first["icl"]["tokens"][-1][0]
    assert place == int(seen.icl_tokens[0, -1].argmax())
    assert weight == round(1000 * float(seen.icl_tokens[0, -1].max()))


def test_tokens_are_spelled_as_their_text():
    model = fi.load_model("demo")
    text = "Review: the plan is lovely"
    assert "".join(model.files.spell(model.writing.encode(text))).strip() == text
