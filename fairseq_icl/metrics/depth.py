"""Short circuits: how well the model answers if it ends after layer l, for every l. Values are (n, L).

s = score of each option after each layer, (n, L, C): the logit lens on the residual stream. The last layer is the model
itself, so the last value of `accuracy_by_depth_icl` is `accuracy_icl`.
"""

from torch import Tensor

from fairseq_icl.metrics import Observation, metric_of_each
from fairseq_icl.metrics.vectors import log_shares

READS = ("depth_scores",)


@metric_of_each("accuracy_by_depth", unit="percent", reads=READS)
def accuracy_by_depth(observation: Observation) -> Tensor:
    """1 where argmax_c s[l, c] is the gold label, else 0. (n, L)"""
    scores = _scores(observation)
    is_best = scores == scores.amax(-1, keepdim=True)
    best = is_best.double().cumsum(-1).eq(1).logical_and(is_best)  # (n, L, C): of several best ones the first
    return best.gather(2, _gold(observation, scores.size(1)))[..., 0].double()


@metric_of_each("logprob_by_depth", unit="nats", reads=READS)
def logprob_by_depth(observation: Observation) -> Tensor:
    """log softmax_c(s[l])[gold]: log-probability of the gold label among the options, in nats. (n, L)"""
    logprobs = log_shares(_scores(observation))  # (n, L, C)
    return logprobs.gather(2, _gold(observation, logprobs.size(1)))[..., 0]


def _gold(observation: Observation, layers: int) -> Tensor:
    """(n, L, 1)"""
    return observation.gold[:, None, None].expand(-1, layers, 1)


def _scores(observation: Observation) -> Tensor:
    assert observation.depth_scores is not None  # by `reads`
    return observation.depth_scores.double()
