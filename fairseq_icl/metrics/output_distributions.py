"""Whole output distributions: do ICL and FT find the same words likely? After Shen et al. (2023, arXiv 2310.08540).

T = the K most likely next tokens where the label begins, (n, K). Here K = 10. Their overlap cosine is not offered: we
could not read its formula with certainty, and the cosine over the shared tokens alone is 1 as soon as one is shared.
And the probability of the gold label among the options, whose spread over orders is what `experiment=order` looks at.
Values are (n,).
"""

from torch import Tensor

from fairseq_icl.metrics import Observation, metric, metric_of_each
from fairseq_icl.metrics.vectors import log_shares

READS = ("top_tokens",)


@metric("token_overlap", conditions=("icl", "ft"), reads=READS)
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
