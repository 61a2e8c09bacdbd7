"""Prediction metrics on small cases worked out by hand, and their symmetries."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_icl.metrics import Ratio, get_metric, predictions
from fairseq_icl.observing.observation import Observation
from fairseq_icl.results.bootstrap import bootstrap_auc, resampling_counts
from tests.metrics.observations import random_observation, triples


def predicting(gold: list[int], prediction: list[int]) -> Observation:
    observation = random_observation(n=len(gold))
    return replace(observation, gold=torch.tensor(gold), prediction=torch.tensor(prediction))


# gold 0 everywhere: both right / only icl right / only ft right / both wrong alike / both wrong otherwise / unchanged
GOLD = [0, 0, 0, 0, 0, 0]
ZSL = predicting(GOLD, [1, 1, 1, 1, 0, 0])
ICL = predicting(GOLD, [0, 0, 1, 2, 1, 0])
FT = predicting(GOLD, [0, 1, 0, 2, 2, 0])


def quotient(ratio: Ratio) -> float:
    return float(ratio.numerator.sum() / ratio.denominator.sum())


def test_accuracy_is_the_share_of_right_predictions():
    assert predictions.accuracy(ICL).tolist() == [1, 1, 0, 0, 0, 1]


def test_rec2ftp_counts_what_icl_mends_among_what_ft_mends():
    assert quotient(predictions.rec2ftp(ZSL, ICL, FT)) == 1 / 2


def test_rpa_is_the_overlap_of_changed_examples():
    assert quotient(predictions.rpa(ZSL, ICL, FT)) == 3 / 5


def test_rpa_same_label_counts_a_change_to_different_labels_twice():
    assert quotient(predictions.rpa_same_label(ZSL, ICL, FT)) == 2 / (4 + 4 - 2)


def test_rpa_correct_and_incorrect_look_at_changes_that_end_right_or_wrong():
    assert quotient(predictions.rpa_correct(ZSL, ICL, FT)) == 1 / 3
    assert quotient(predictions.rpa_correct(ZSL, ICL, FT, is_right=False)) == 2 / 2


def test_f2t_are_the_examples_that_both_mend():
    assert predictions.prediction_sets(ZSL, ICL, FT)["both_f2t"].tolist() == [True, False, False, False, False, False]


def test_partition_sizes():
    sizes = {name: int(members.sum()) for name, members in predictions.prediction_sets(ZSL, ICL, FT).items()}
    assert sizes == {
        "icl_f2t": 2,
        "ft_f2t": 2,
        "both_f2t": 1,
        "icl_changed": 4,
        "ft_changed": 4,
        "both_changed": 3,
        "same_change": 2,
        "changed_both_correct": 1,
        "changed_only_icl_correct": 1,
        "changed_only_ft_correct": 1,
        "changed_both_incorrect": 2,
        "changed_only_icl_incorrect": 0,
        "changed_only_ft_incorrect": 0,
    }


@given(triples())
def test_the_rpa_family_is_symmetric_in_icl_and_ft(triple):
    zsl, icl, ft = triple
    for rpa in (get_metric(name).compute for name in ("rpa", "rpa_same_label", "rpa_correct", "rpa_incorrect")):
        for forward, backward in zip(rpa(zsl, icl, ft), rpa(zsl, ft, icl), strict=True):
            assert torch.equal(forward, backward)


@given(triples())
def test_the_partition_adds_up_to_all_changes(triple):
    sets = predictions.prediction_sets(*triple)
    for setting, only in (("icl", "only_icl"), ("ft", "only_ft")):
        parts = [sets[f"changed_{who}_{end}"] for who in ("both", only) for end in ("correct", "incorrect")]
        assert sum(int(part.sum()) for part in parts) == int(sets[f"{setting}_changed"].sum())


@given(triples())
def test_identical_icl_and_ft_agree_completely(triple):
    zsl, icl, _ = triple
    ratio = predictions.rpa_same_label(zsl, icl, icl)
    assert torch.equal(ratio.numerator, ratio.denominator)


def area(observation: Observation) -> float:
    ranking = predictions.auc(observation)
    counts = resampling_counts(len(observation))
    return float(bootstrap_auc(ranking.scores.numpy(), ranking.is_class.numpy(), counts).value)


def test_auc_is_the_share_of_pairs_that_are_ranked_rightly():
    gold, first = torch.tensor([0, 0, 1, 1]), torch.tensor([0.9, 0.3, 0.4, 0.3])
    observation = replace(
        random_observation(n=4, options=2), gold=gold, option_logprobs=torch.stack([first, 1 - first], 1).log()
    )
    # (0.9 > 0.4), (0.9 > 0.3), (0.3 < 0.4), (0.3 = 0.3), and the same for the other class
    assert area(observation) == 2.5 / 4


def test_auc_with_three_classes_is_the_mean_over_those_that_occur():
    observation = replace(random_observation(n=30, options=4), gold=torch.arange(30) % 3)
    scores = observation.option_logprobs.double().log_softmax(1)
    areas = []
    for label in range(3):
        inside, outside = scores[observation.gold == label, label], scores[observation.gold != label, label]
        pairs = [(a > b) + 0.5 * (a == b) for a in inside.tolist() for b in outside.tolist()]
        areas.append(sum(pairs) / len(pairs))
    assert abs(area(observation) - sum(areas) / 3) < 1e-12


@given(st.floats(-20, 20), st.integers(0, 50))
def test_a_preferred_word_changes_accuracy_but_neither_auc_nor_calibrated_accuracy(bias, seed):
    plain = random_observation(seed, n=12, options=2)
    shift = torch.tensor([bias, 0.0])
    biased = replace(plain, option_logprobs=plain.option_logprobs + shift, label_prior=plain.label_prior + shift)
    assert abs(area(biased) - area(plain)) < 0.03  # rounding may tie two scores
    assert torch.equal(predictions.accuracy_calibrated(biased), predictions.accuracy_calibrated(plain))


def test_calibration_takes_the_label_that_gains_most_over_its_prior():
    log = torch.tensor([[0.8, 0.2], [0.95, 0.05]]).log()
    observation = replace(
        random_observation(n=2, options=2),
        gold=torch.tensor([1, 0]),
        option_logprobs=log,
        label_prior=torch.tensor([[0.9, 0.1]]).log().repeat(2, 1),
    )
    assert predictions.accuracy_calibrated(observation).tolist() == [1, 1]


def test_what_icl_mends_by_itself_is_the_chance_level_of_rec2ftp():
    gold, wrong = torch.zeros(8, dtype=torch.long), torch.ones(8, dtype=torch.long)
    zsl, icl, ft = (replace(random_observation(n=8, options=2), gold=gold, prediction=wrong) for _ in range(3))
    zsl = replace(zsl, prediction=torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]))
    icl = replace(icl, prediction=torch.tensor([0, 0, 0, 1, 1, 0, 0, 0]))
    ft = replace(ft, prediction=torch.tensor([0, 1, 1, 0, 0, 0, 0, 0]))
    numerator, denominator = predictions.rec2ftp_chance(zsl, icl)
    assert (numerator.sum(), denominator.sum()) == (3, 4)
    numerator, denominator = predictions.rec2ftp(zsl, icl, ft)
    assert (numerator.sum(), denominator.sum()) == (1, 2)


def test_without_classes_there_is_no_bias_to_take_away():
    observation = replace(random_observation(), label_prior=None)
    for name in ("auc_icl", "accuracy_calibrated_icl"):
        assert not get_metric(name).can_read([observation])
        assert get_metric(name).can_read([random_observation()])


def test_log_likelihood_is_that_of_the_right_option():
    observation = random_observation(n=5)
    expected = [observation.option_logprobs[i, gold].item() for i, gold in enumerate(observation.gold.tolist())]
    assert predictions.log_likelihood(observation).tolist() == expected
