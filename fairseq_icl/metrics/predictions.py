"""Metrics on predictions alone: accuracy, plain and free of label bias, Rec2FTP, the RPA family, and who changed what.

An example is *changed* by ICL (FT) if its prediction differs from the zero-shot one. D_icl and D_ft are the sets of
changed examples. All values are shares between 0 and 1 (the papers print percent); vectors are (n,).

Whole output distributions (do ICL and FT find the same words likely?) are compared after Shen et al. (2023, arXiv
2310.08540): T = the K = 10 most likely next tokens where the label begins, (n, K). Their overlap cosine is not offered:
we could not read its formula with certainty, and the cosine over the shared tokens alone is 1 as soon as one is shared.

Short circuits: how well the model answers if it ends after layer l, for every l. s = score of each option after each
layer, (n, L, C): the logit lens on the residual stream. The last layer is the model itself, so the last value of
`accuracy_by_depth_icl` is `accuracy_icl`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_icl.metrics import Calibration, Observation, Ranking, Ratio, metric, metric_of_each
from fairseq_icl.metrics.vectors import log_shares


@metric_of_each("accuracy", title="accuracy", unit="percent")
def accuracy(observation: Observation) -> Tensor:
    """1 where the prediction is the gold label, else 0. (n,)"""
    return _right(observation).double()


@metric_of_each("accuracy_calibrated", title="calibrated accuracy", unit="percent", reads=["label_prior"])
def accuracy_calibrated(observation: Observation) -> Tensor:
    """1 where the label that gains most over its prior is the gold one. (n,)

    The prior is the label's probability on inputs without content, averaged over them and then made to add up to 1
    (contextual calibration, as the code of Zhao et al. 2021 has it), so a model that prefers one word whatever it reads
    is not punished for it.
    """
    assert observation.label_prior is not None
    return _calibrated(observation, observation.label_prior)


@metric_of_each(
    "accuracy_calibrated_normalised",
    title="accuracy, calibrated input by input",
    unit="percent",
    reads=["label_prior_normalised"],
)
def accuracy_calibrated_normalised(observation: Observation) -> Tensor:
    """The same with a prior to which every input without content contributes alike. (n,)"""
    assert observation.label_prior_normalised is not None
    return _calibrated(observation, observation.label_prior_normalised)


@metric_of_each("auc", title="AUC", reads=["label_prior"])
def auc(observation: Observation) -> Ranking:
    """Area under the ROC curve of each class's probability among the options against the rest, mean over classes.

    It asks whether the model ranks examples rightly, wherever its threshold lies.
    """
    scores = log_shares(observation.option_logprobs)
    return Ranking(scores, F.one_hot(observation.gold, scores.size(1)).bool())


@metric_of_each("ece", title="calibration error", unit="percent")
def ece(observation: Observation) -> Calibration:
    """Expected calibration error: sum over bins b of |right answers in b - sum of their probabilities| / n.

    Ten bins of equal width of the predicted option's probability among the options (Guo et al. 2017).
    """
    return Calibration(log_shares(observation.option_logprobs).max(dim=1).values.exp(), _right(observation))


@metric_of_each("log_likelihood", unit="nats")
def log_likelihood(observation: Observation) -> Tensor:
    """Log-probability of the right label under the whole dictionary, a mean over its tokens. (n,)"""
    return observation.option_logprobs.gather(1, observation.gold[:, None])[:, 0].double()


@metric_of_each("demonstration_log_likelihood", conditions=("zsl", "ft"), unit="nats", reads=["demonstration_logprob"])
def demonstration_log_likelihood(observation: Observation) -> Tensor:
    """The fine-tuning loss on the example, negated; known where rows of the train split are asked about. (n,)"""
    assert observation.demonstration_logprob is not None
    return observation.demonstration_logprob


@metric("rec2ftp", title="Rec2FTP", unit="percent")
def rec2ftp(zsl: Observation, icl: Observation, ft: Observation) -> Ratio:
    """|wrong zsl & right ft & right icl| / |wrong zsl & right ft|: how much of what FT mends ICL mends too."""
    mended = _mended(zsl, ft)
    return Ratio((mended & _right(icl)).double(), mended.double())


@metric("rec2ftp_chance", conditions=("zsl", "icl"), title="Rec2FTP by chance", unit="percent")
def rec2ftp_chance(zsl: Observation, icl: Observation) -> Ratio:
    """|wrong zsl & right icl| / |wrong zsl|: what Rec2FTP would be if FT mended any examples, whichever ICL mends."""
    return Ratio(_mended(zsl, icl).double(), (~_right(zsl)).double())


@metric("rpa", title="RPA", unit="percent")
def rpa(zsl: Observation, icl: Observation, ft: Observation) -> Ratio:
    """|D_icl & D_ft| / |D_icl | D_ft|: the overlap of the changed examples."""
    return _overlap(_changed(zsl, icl), _changed(zsl, ft))


@metric("rpa_same_label", unit="percent")
def rpa_same_label(zsl: Observation, icl: Observation, ft: Observation) -> Ratio:
    """same / (|D_icl| + |D_ft| - same), same = examples changed by both to the same label.

    With two classes this is `rpa`. With more, an example changed by both to different labels adds two to the
    denominator and nothing to the numerator.
    """
    same = (_changed(zsl, ft) & (icl.prediction == ft.prediction)).double()
    return Ratio(same, _changed(zsl, icl).double() + _changed(zsl, ft).double() - same)


@metric("rpa_correct", unit="percent")
def rpa_correct(zsl: Observation, icl: Observation, ft: Observation) -> Ratio:
    """`rpa` with D restricted to examples whose new prediction is right."""
    return _overlap(_changed(zsl, icl) & _right(icl), _changed(zsl, ft) & _right(ft))


@metric("rpa_incorrect", unit="percent")
def rpa_incorrect(zsl: Observation, icl: Observation, ft: Observation) -> Ratio:
    """`rpa` with D restricted to examples whose new prediction is wrong."""
    return _overlap(_changed(zsl, icl) & ~_right(icl), _changed(zsl, ft) & ~_right(ft))


def f2t(zsl: Observation, icl: Observation, ft: Observation) -> Tensor:
    """Examples wrong under ZSL and right under ICL and FT ("false to true"), the first paper's subset. (n,) bool"""
    return _mended(zsl, icl) & _mended(zsl, ft)


class PredictionSets(NamedTuple):
    """Membership (n,) bool of each example in the sets whose sizes the papers discuss."""

    icl_f2t: Tensor  # wrong under ZSL, right under ICL
    ft_f2t: Tensor
    both_f2t: Tensor
    icl_changed: Tensor
    ft_changed: Tensor
    both_changed: Tensor
    same_change: Tensor  # changed by both to the same label
    changed_both_correct: Tensor
    changed_only_icl_correct: Tensor
    changed_only_ft_correct: Tensor
    changed_both_incorrect: Tensor
    changed_only_icl_incorrect: Tensor
    changed_only_ft_incorrect: Tensor


def prediction_sets(zsl: Observation, icl: Observation, ft: Observation) -> PredictionSets:
    """Partition of the prediction changes: by both, only ICL, only FT, for right and for wrong new predictions.

    The `correct` three are a partition of the changes that end right, the `incorrect` three of those that end wrong.
    With more than two classes an example changed by both, rightly by ICL and wrongly by FT, is in
    `changed_only_icl_correct` and in `changed_only_ft_incorrect`.
    """
    icl_changed, ft_changed = _changed(zsl, icl), _changed(zsl, ft)
    icl_correct, ft_correct = icl_changed & _right(icl), ft_changed & _right(ft)
    icl_incorrect, ft_incorrect = icl_changed & ~_right(icl), ft_changed & ~_right(ft)
    return PredictionSets(
        icl_f2t=_mended(zsl, icl),
        ft_f2t=_mended(zsl, ft),
        both_f2t=f2t(zsl, icl, ft),
        icl_changed=icl_changed,
        ft_changed=ft_changed,
        both_changed=icl_changed & ft_changed,
        same_change=ft_changed & (icl.prediction == ft.prediction),
        changed_both_correct=icl_correct & ft_correct,
        changed_only_icl_correct=icl_correct & ~ft_correct,
        changed_only_ft_correct=ft_correct & ~icl_correct,
        changed_both_incorrect=icl_incorrect & ft_incorrect,
        changed_only_icl_incorrect=icl_incorrect & ~ft_incorrect,
        changed_only_ft_incorrect=ft_incorrect & ~icl_incorrect,
    )


def _calibrated(observation: Observation, prior: Tensor) -> Tensor:
    return ((observation.option_logprobs - prior).argmax(dim=1) == observation.gold).double()


def _right(observation: Observation) -> Tensor:
    return observation.prediction == observation.gold


def _changed(zsl: Observation, observation: Observation) -> Tensor:
    return observation.prediction != zsl.prediction


def _mended(zsl: Observation, observation: Observation) -> Tensor:
    return ~_right(zsl) & _right(observation)


def _overlap(a: Tensor, b: Tensor) -> Ratio:
    """Jaccard index of two sets given as masks (n,)."""
    return Ratio(torch.logical_and(a, b).double(), torch.logical_or(a, b).double())


@metric("token_overlap", conditions=("icl", "ft"), reads=("top_tokens",))
def token_overlap(icl: Observation, ft: Observation) -> Tensor:
    """|T_icl & T_ft| / K: the share of the most likely tokens that both have. (n,)"""
    return _shared(icl, ft).any(dim=2).double().mean(dim=1)


@metric_of_each("gold_probability")
def gold_probability(observation: Observation) -> Tensor:
    """softmax_c(s)[gold]: probability of the gold label among the options, s their mean log-probabilities. (n,)"""
    return log_shares(observation.option_logprobs).gather(1, observation.gold[:, None])[:, 0].exp()


def _shared(icl: Observation, ft: Observation) -> Tensor:
    """Whether token i of ICL is token j of FT: (n, K, K) bool."""
    assert icl.top_tokens is not None  # by `reads`
    assert ft.top_tokens is not None
    return icl.top_tokens[:, :, None] == ft.top_tokens[:, None, :]


@metric_of_each("accuracy_by_depth", unit="percent", reads=("depth_scores",))
def accuracy_by_depth(observation: Observation) -> Tensor:
    """1 where argmax_c s[l, c] is the gold label, else 0. (n, L)"""
    scores = _scores(observation)
    is_best = scores == scores.amax(-1, keepdim=True)
    is_first = is_best & (is_best.cumsum(-1) == 1)  # (n, L, C): of several best ones the first, on every device
    return is_first.gather(2, observation.gold[:, None, None].expand(-1, scores.size(1), 1))[..., 0].double()


@metric_of_each("logprob_by_depth", unit="nats", reads=("depth_scores",))
def logprob_by_depth(observation: Observation) -> Tensor:
    """log softmax_c(s[l])[gold]: log-probability of the gold label among the options, in nats. (n, L)"""
    logprobs = log_shares(_scores(observation))  # (n, L, C)
    gold = observation.gold[:, None, None].expand(-1, logprobs.size(1), 1)
    return logprobs.gather(2, gold)[..., 0]


def _scores(observation: Observation) -> Tensor:
    assert observation.depth_scores is not None  # by `reads`
    return observation.depth_scores.double()
