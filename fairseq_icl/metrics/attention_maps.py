"""SimAM: do ICL and FT attend to the query's tokens alike? Before and after FT, and as a change to zero-shot.

m = scores of the observed position over the query tokens, before the softmax: (n, L, H, Q), left-padded with zeros,
which add nothing to a cosine. Cosines are per head, then averaged over heads: (n, L).

The authors compare the scores (`_scores`). The `_softmax` versions compare probabilities: the softmax over the query
tokens alone, that is, attention renormalised after leaving out BOS and the demonstrations. The plain names
(`sim_am_delta`, ...) stand for one or the other by the reading's `attention_similarity`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_icl.metrics import Observation, Similarity, metric
from fairseq_icl.metrics.vectors import cosine, mean_over_heads

REGISTER = 16  # float32 numbers in the widest vector register


@metric("sim_am_before_scores", settings=("zsl", "icl"))
def sim_am_before(zsl: Observation, icl: Observation, softmax: bool = False) -> Similarity:
    """cos(m_icl, m_zsl): the first paper's SimAM before fine-tuning."""
    return _similarity(_row(icl, softmax), _row(zsl, softmax))


@metric("sim_am_before_softmax", settings=("zsl", "icl"))
def sim_am_before_softmax(zsl: Observation, icl: Observation) -> Similarity:
    """cos(softmax m_icl, softmax m_zsl)"""
    return sim_am_before(zsl, icl, softmax=True)


@metric("sim_am_after_scores", settings=("icl", "ft"))
def sim_am_after(icl: Observation, ft: Observation, softmax: bool = False) -> Similarity:
    """cos(m_icl, m_ft): the first paper's SimAM (after fine-tuning)."""
    return _similarity(_row(icl, softmax), _row(ft, softmax))


@metric("sim_am_after_softmax", settings=("icl", "ft"))
def sim_am_after_softmax(icl: Observation, ft: Observation) -> Similarity:
    """cos(softmax m_icl, softmax m_ft)"""
    return sim_am_after(icl, ft, softmax=True)


@metric("sim_am_delta_scores")
def sim_am_delta(zsl: Observation, icl: Observation, ft: Observation, softmax: bool = False) -> Similarity:
    """cos(m_icl - m_zsl, m_ft - m_zsl): the second paper's SimAM, free of what both share with zero-shot."""
    before = _row(zsl, softmax)
    return _similarity(_row(icl, softmax) - before, _row(ft, softmax) - before)


@metric("sim_am_delta_softmax")
def sim_am_delta_softmax(zsl: Observation, icl: Observation, ft: Observation) -> Similarity:
    """cos(p_icl - p_zsl, p_ft - p_zsl), p = softmax m"""
    return sim_am_delta(zsl, icl, ft, softmax=True)


@metric("alpha_scores", settings=("zsl", "ft"), needs=("other_ft",))
def alpha(zsl: Observation, ft: Observation, other_ft: Observation, softmax: bool = False) -> Similarity:
    """cos(m_ft - m_zsl, m_other - m_zsl): SimAM_delta between two fine-tuning methods, e.g. gd and lcgd."""
    return sim_am_delta(zsl, other_ft, ft, softmax)


@metric("alpha_softmax", settings=("zsl", "ft"), needs=("other_ft",))
def alpha_softmax(zsl: Observation, ft: Observation, other_ft: Observation) -> Similarity:
    """cos(p_ft - p_zsl, p_other - p_zsl), p = softmax m"""
    return alpha(zsl, ft, other_ft, softmax=True)


def _similarity(a: Tensor, b: Tensor) -> Similarity:
    """The cosine of each head's rows, averaged over heads: (n, L, H, Q), (n, L, H, Q) -> (n, L)"""
    return mean_over_heads(cosine(a, b, padded=True))


def _row(observation: Observation, softmax: bool) -> Tensor:
    """The attention row, or its probabilities over the query tokens with 0 at the padding. (n, L, H, Q) float64

    Changes of probability can be as small as 1e-5, where the rounding of a float32 softmax shows in the fifth digit of
    the cosine. So it is taken as the authors take it: in float32, and on rows that fill whole vector registers, which
    also makes the rounding the same however far a batch is padded.
    """
    row = observation.attention_row
    if not softmax:
        return row.double()
    tokens = row.shape[-1]
    added = -tokens % REGISTER
    row = pad(row.float(), (added, 0))
    place = torch.arange(added + tokens, device=row.device)
    is_padding = place < added + tokens - observation.query_length[:, None]  # (n, added + Q)
    return row.masked_fill(is_padding[:, None, None, :], -torch.inf).softmax(-1)[..., added:].double()
