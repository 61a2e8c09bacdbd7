"""Expected calibration error: the formula, bin by bin, and what it is in a table."""

import numpy as np
import pytest

import fairseq_icl as fi
from fairseq_icl.results.bootstrap import bootstrap_ece, resampling_counts


def test_it_is_the_mean_gap_of_the_bins_weighted_by_their_size():
    generator = np.random.default_rng(0)
    sure, right = generator.uniform(0.5, 1, 200), generator.uniform(size=200) < 0.6
    right[sure > 0.9] = True
    gaps = []
    for number in range(10):
        members = (sure >= number / 10) & (sure < (number + 1) / 10)
        if members.any():
            gaps.append(members.mean() * abs(sure[members].mean() - right[members].mean()))
    found = bootstrap_ece(sure, right, resampling_counts(200))
    assert float(found.value) == pytest.approx(sum(gaps), abs=1e-12)
    assert found.low < found.high


@pytest.mark.parametrize(("right", "error"), [(1.0, 0.0), (0.0, 1.0)])
def test_answers_that_are_sure_are_calibrated_if_right_and_not_if_wrong(right: float, error: float):
    assert bootstrap_ece(np.ones(7), np.full(7, right), resampling_counts(7)).value == error


def test_every_condition_has_one_and_batches_do_not_matter():
    model = fi.load_model("demo")
    prompts = fi.build_prompts(model, "demo_sentiment", k=4, seed=1, limit=20)
    zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
    table = fi.compare(prompts, zsl, icl, zsl, metrics=["ece_zsl", "ece_icl", "ece_ft"])
    values = table[table["example"].isna()].set_index("metric")["value"]
    sure = zsl.option_logprobs.double().softmax(1).max(1).values.numpy()
    expected = bootstrap_ece(sure, (zsl.prediction == zsl.gold).numpy(), resampling_counts(20)).value
    assert values["ece_zsl"] == values["ece_ft"] == pytest.approx(float(expected), abs=1e-6)
    assert 0 <= values["ece_icl"] <= 1
