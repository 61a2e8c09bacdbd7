"""SimAM: do ICL and FT attend to the query's tokens alike? Before and after FT, and as a change to zero-shot.

m = scores of the observed position over the query tokens, before the softmax: (n, L, H, Q), left-padded with zeros,
which add nothing to a cosine. Cosines are per head, then averaged over heads: (n, L). With rotary positions ICL does
not move the scores among the query's own tokens in the first layer: SimAM_delta has no value there.

The authors compare the scores (`_scores`). The `_softmax` versions compare probabilities: the softmax over the query
tokens alone, that is, attention renormalised after leaving out BOS and the demonstrations. The plain names
(`sim_am_delta`, ...) stand for one or the other by the reading's `attention_similarity`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_icl.metrics import Observation, Similarity, metric, vectors
from fairseq_icl.metrics.vectors import cosine_of, dots, in_parts, mean_over_heads, remembered, rounding_of

Pairs = tuple[tuple[Tensor, Tensor], ...]


@metric("sim_am_before_softmax", conditions=("zsl", "icl"), unit="cosine", softmax=True)
@metric("sim_am_before_scores", conditions=("zsl", "icl"), unit="cosine")
def sim_am_before(zsl: Observation, icl: Observation, softmax: bool = False) -> Similarity:
    """cos(m_icl, m_zsl): the first paper's SimAM before fine-tuning."""
    return mean_over_heads(cosine_of(*_pair(icl, zsl, softmax)))


@metric("sim_am_after_softmax", conditions=("icl", "ft"), title="SimAM", unit="cosine", softmax=True)
@metric("sim_am_after_scores", conditions=("icl", "ft"), title="SimAM", unit="cosine")
def sim_am_after(icl: Observation, ft: Observation, softmax: bool = False) -> Similarity:
    """cos(m_icl, m_ft): the first paper's SimAM (after fine-tuning)."""
    return mean_over_heads(cosine_of(*_pair(icl, ft, softmax)))


@metric("sim_am_delta_softmax", title="SimAM_delta", unit="cosine", softmax=True)
@metric("sim_am_delta_scores", title="SimAM_delta", unit="cosine")
def sim_am_delta(zsl: Observation, icl: Observation, ft: Observation, softmax: bool = False) -> Similarity:
    """cos(m_icl - m_zsl, m_ft - m_zsl): the second paper's SimAM, free of what both share with zero-shot."""
    noise = _change(zsl, icl, ft, False)[1]  # of the scores: their softmax makes other roundings of them
    return mean_over_heads(vectors.where_defined(_change(zsl, icl, ft, softmax)[0], noise))


@metric("alpha_softmax", conditions=("zsl", "ft"), needs=("other_ft",), title="alpha", unit="cosine", softmax=True)
@metric("alpha_scores", conditions=("zsl", "ft"), needs=("other_ft",), title="alpha", unit="cosine")
def alpha(zsl: Observation, ft: Observation, other_ft: Observation, softmax: bool = False) -> Similarity:
    """cos(m_ft - m_zsl, m_other - m_zsl): SimAM_delta between two fine-tuning methods, e.g. gd and lcgd."""
    return sim_am_delta(zsl, other_ft, ft, softmax)


@remembered(4)
def _pair(one: Observation, other: Observation, softmax: bool) -> tuple[Tensor, ...]:
    """The products a.b, a.a and b.b of each head's rows: (n, L, H) each"""
    return _products(lambda a, b: ((a, b), (a, a), (b, b)), softmax, one, other)


@remembered(2)
def _change(zsl: Observation, one: Observation, other: Observation, softmax: bool) -> tuple[Similarity, Tensor]:
    """The cosine of what changes in each head's rows, and where a change is nothing but rounding: (n, L, H)

    Where rows are read, which takes longest, `_pair` of them is found as well.
    """

    def pairs(before: Tensor, first: Tensor, second: Tensor) -> Pairs:
        a, b = first - before, second - before
        squares = ((vector, vector) for vector in (a, b, before, first, second))
        return (a, b), *squares, (first, before), (first, second)

    *found, before, first, second, with_before, with_second = _products(pairs, softmax, zsl, one, other)
    _pair.keep((one, zsl, softmax), (with_before, first, before))
    _pair.keep((one, other, softmax), (with_second, first, second))
    limit = rounding_of(zsl, one, other) * before.sqrt()
    return cosine_of(*found), (found[1].sqrt() <= limit) | (found[2].sqrt() <= limit)


def _products(pairs: Callable[..., Pairs], softmax: bool, *observations: Observation) -> tuple[Tensor, ...]:
    """The products of the pairs that `pairs` makes of the observations' attention rows: (n, L, H) each

    The rows (n, L, H, Q') float64 are scores, or probabilities over the query tokens with 0 at the padding. Changes of
    probability can be as small as 1e-5, where the rounding of a float32 softmax shows in the fifth digit of the cosine.
    So it is taken as the authors take it: in float32, and on rows that fill whole vector registers (Q'), which also
    makes the rounding the same however far a batch is padded.
    """

    def products(*rows_and_lengths: Tensor) -> tuple[Tensor, ...]:
        found = []
        for row, length in zip(rows_and_lengths[::2], rows_and_lengths[1::2], strict=True):
            row = pad(row.float(), (-row.size(-1) % vectors.STEP, 0))
            if softmax:
                place = torch.arange(row.size(-1), device=row.device)
                is_padding = place < row.size(-1) - length[:, None]  # (n, Q')
                row = (row + torch.where(is_padding, -torch.inf, 0.0)[:, None, None, :]).softmax(-1)
            found.append(row.double())
        return dots(*pairs(*found))

    return in_parts(products, *(part for seen in observations for part in (seen.attention_row, seen.query_length)))
