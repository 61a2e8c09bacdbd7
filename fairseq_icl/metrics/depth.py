"""Short circuits: how well the model answers if it ends after layer l, for every l. Values are (n, L).

s = score of each option after each layer, (n, L, C): the logit lens on the residual stream. The last layer is the model
itself, so the last value of `accuracy_by_depth_icl` is `accuracy_icl`.
"""

import torch
from torch import Tensor

from fairseq_icl.metrics import Observation, metric_of_each
from fairseq_icl.metrics.vectors import log_shares

READS = ("depth_scores",)


@metric_of_each("accuracy_by_depth", unit="percent", reads=READS)
def accuracy_by_depth(observation: Observation) -> Tensor:
    """1 where argmax_c s[l, c] is the gold label, else 0. (n, L)"""
    best = torch.from_numpy(_scores(observation).numpy().argmax(axis=-1))  # numpy promises the first one on ties
    return (best == observation.gold[:, None]).double()


@metric_of_each("logprob_by_depth", unit="nats", reads=READS)
def logprob_by_depth(observation: Observation) -> Tensor:
    """log softmax_c(s[l])[gold]: log-probability of the gold label among the options, in nats. (n, L)"""
    logprobs = log_shares(_scores(observation))  # (n, L, C)
    gold = observation.gold[:, None, None].expand(-1, logprobs.size(1), 1)
    return logprobs.gather(2, gold)[..., 0]


def _scores(observation: Observation) -> Tensor:
    assert observation.depth_scores is not None  # by `reads`
    return observation.depth_scores.double()
