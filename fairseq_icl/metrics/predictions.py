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

import torch.nn.functional as F
from torch import Tensor

from fairseq_icl.metrics import Calibration, Observation, Ranking, Ratio, metric, metric_of_each
from fairseq_icl.metrics.vectors import log_shares


@metric_of_each("accuracy", title="accuracy", unit="percent")
def accuracy(observation: Observation) -> Tensor:
    """1 where the prediction is the gold label, else 0. (n,)"""
    return _right(observation).double()


@metric_of_each(
    "accuracy_calibrated_normalised",
    title="accuracy, calibrated input by input",
    unit="percent",
    reads=["label_prior_normalised"],
    prior="label_prior_normalised",
)
@metric_of_each("accuracy_calibrated", title="calibrated accuracy", unit="percent", reads=["label_prior"])
def accuracy_calibrated(observation: Observation, prior: str = "label_prior") -> Tensor:
    """1 where the label that gains most over its prior is the gold one. (n,)

    The prior is the label's probability on inputs without content, averaged over them and then made to add up to 1
    (contextual calibration, as the code of Zhao et al. 2021 has it), so a model that prefers one word whatever it reads
    is not punished for it. To that of `accuracy_calibrated_normalised` every input without content contributes alike.
    """
    return ((observation.option_logprobs - getattr(observation, prior)).argmax(dim=1) == observation.gold).double()


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


@metric("rpa_incorrect", unit="percent", is_right=False)
@metric("rpa_correct", unit="percent")
def rpa_correct(zsl: Observation, icl: Observation, ft: Observation, is_right: bool = True) -> Ratio:
    """`rpa` with D restricted to examples whose new prediction is right; `rpa_incorrect`: wrong."""
    return _overlap(*(_changed(zsl, seen) & (_right(seen) == is_right) for seen in (icl, ft)))


def prediction_sets(zsl: Observation, icl: Observation, ft: Observation) -> dict[str, Tensor]:
    """Membership (n,) bool of each example in the sets whose sizes the papers discuss.

    Prediction changes are parted into those by both, only ICL, only FT, for right and for wrong new predictions.
    The `correct` three are a partition of the changes that end right, the `incorrect` three of those that end wrong.
    With more than two classes an example changed by both, rightly by ICL and wrongly by FT, is in
    `changed_only_icl_correct` and in `changed_only_ft_incorrect`.
    """
    icl_f2t, ft_f2t = _mended(zsl, icl), _mended(zsl, ft)
    icl_changed, ft_changed = _changed(zsl, icl), _changed(zsl, ft)
    sets = {
        "icl_f2t": icl_f2t,  # "false to true": wrong under ZSL, right under ICL
        "ft_f2t": ft_f2t,
        "both_f2t": icl_f2t & ft_f2t,  # the first paper's subset
        "icl_changed": icl_changed,
        "ft_changed": ft_changed,
        "both_changed": icl_changed & ft_changed,
        "same_change": ft_changed & (icl.prediction == ft.prediction),  # changed by both to the same label
    }
    for end, is_right in (("correct", True), ("incorrect", False)):
        by_icl, by_ft = icl_changed & (_right(icl) == is_right), ft_changed & (_right(ft) == is_right)
        sets[f"changed_both_{end}"] = by_icl & by_ft
        sets[f"changed_only_icl_{end}"] = by_icl & ~by_ft
        sets[f"changed_only_ft_{end}"] = by_ft & ~by_icl
    return sets


def _right(observation: Observation) -> Tensor:
    return observation.prediction == observation.gold


def _changed(zsl: Observation, observation: Observation) -> Tensor:
    return observation.prediction != zsl.prediction


def _mended(zsl: Observation, observation: Observation) -> Tensor:
    return ~_right(zsl) & _right(observation)


def _overlap(a: Tensor, b: Tensor) -> Ratio:
    """Jaccard index of two sets given as masks (n,)."""
    return Ratio((a & b).double(), (a | b).double())


@metric("token_overlap", conditions=("icl", "ft"), reads=("top_tokens",))
def token_overlap(icl: Observation, ft: Observation) -> Tensor:
    """|T_icl & T_ft| / K: the share of the most likely tokens that both have. (n,)"""
    assert icl.top_tokens is not None  # by `reads`
    assert ft.top_tokens is not None
    is_shared = icl.top_tokens[:, :, None] == ft.top_tokens[:, None, :]  # (n, K, K) token i of ICL is token j of FT
    return is_shared.any(dim=2).double().mean(dim=1)


@metric_of_each("gold_probability")
def gold_probability(observation: Observation) -> Tensor:
    """softmax_c(s)[gold]: probability of the gold label among the options, s their mean log-probabilities. (n,)"""
    return log_shares(observation.option_logprobs).gather(1, observation.gold[:, None])[:, 0].exp()


@metric_of_each("accuracy_by_depth", unit="percent", reads=("depth_scores",))
def accuracy_by_depth(observation: Observation) -> Tensor:
    """1 where argmax_c s[l, c] is the gold label, else 0. (n, L)"""
    scores = observation.depth_scores
    assert scores is not None  # by `reads`
    is_best = scores == scores.amax(-1, keepdim=True)
    is_first = is_best & (is_best.cumsum(-1) == 1)  # (n, L, C): of several best ones the first, on every device
    return is_first.take_along_dim(observation.gold[:, None, None], dim=2)[..., 0].double()


@metric_of_each("logprob_by_depth", unit="nats", reads=("depth_scores",))
def logprob_by_depth(observation: Observation) -> Tensor:
    """log softmax_c(s[l])[gold]: log-probability of the gold label among the options, in nats. (n, L)"""
    assert observation.depth_scores is not None  # by `reads`
    return log_shares(observation.depth_scores).take_along_dim(observation.gold[:, None, None], dim=2)[..., 0]
