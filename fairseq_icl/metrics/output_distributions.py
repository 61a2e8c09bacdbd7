"""Whole output distributions: do ICL and FT find the same words likely? After Shen et al. (2023, arXiv 2310.08540).

T = the K most likely next tokens where the label begins, p their probabilities in the whole distribution, (n, K). Here
K = 10. And the probability of the gold label among the options, whose spread over orders is what `experiment=order`
looks at. Values are (n,).
"""

import torch
from torch import Tensor

from fairseq_icl.metrics import Observation, Similarity, metric
from fairseq_icl.metrics.vectors import cosine, log_shares

READS = ("top_tokens", "top_logprobs")


@metric("token_overlap", settings=("icl", "ft"), reads=READS)
def token_overlap(icl: Observation, ft: Observation) -> Tensor:
    """|T_icl & T_ft| / K: the share of the most likely tokens that both have. (n,)"""
    return _shared(icl, ft).any(dim=2).double().mean(dim=1)


@metric("overlap_cosine", settings=("icl", "ft"), reads=READS)
def overlap_cosine(icl: Observation, ft: Observation) -> Similarity:
    """cos(p_icl, p_ft) over the tokens in both T_icl and T_ft; 0 where they share none. (n,)"""
    shared = _shared(icl, ft)  # (n, K, K)
    own = _probabilities(icl)  # (n, K)
    same = torch.where(shared, _probabilities(ft)[:, None, :], 0.0).sum(dim=2)  # (n, K) of FT, in the order of ICL
    # Probabilities are no updates: a ratio of their lengths would say nothing.
    return cosine(torch.where(shared.any(dim=2), own, 0.0), same)._replace(lengths=None)


@metric("gold_probability_zsl", settings=("zsl",))
@metric("gold_probability_icl", settings=("icl",))
@metric("gold_probability_ft", settings=("ft",))
def gold_probability(observation: Observation) -> Tensor:
    """softmax_c(s)[gold]: probability of the gold label among the options, s their mean log-probabilities. (n,)"""
    return log_shares(observation.option_logprobs).gather(1, observation.gold[:, None])[:, 0].exp()


def _shared(icl: Observation, ft: Observation) -> Tensor:
    """Whether token i of ICL is token j of FT: (n, K, K) bool."""
    assert icl.top_tokens is not None  # by `reads`
    assert ft.top_tokens is not None
    return icl.top_tokens[:, :, None] == ft.top_tokens[:, None, :]


def _probabilities(observation: Observation) -> Tensor:
    assert observation.top_logprobs is not None  # by `reads`
    return observation.top_logprobs.double().exp()
