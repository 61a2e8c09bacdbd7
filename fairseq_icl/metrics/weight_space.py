"""The comparison in weight space: the implicit update of ICL against the update that fine-tuning makes.

Linear attention of one head, without softmax, on inputs X (tokens x width) with K = X W_K + b_K, V = X W_V + b_V:

    sum_t v_t (k_t . q) = (V^T K) q        V^T K is a (head_dim x head_dim) matrix acting on the query vector q

so a head *is* this matrix as far as q is concerned. Seen so, the conditions differ as (first paper, section 3)

    W_zsl   = V^T K                        over the tokens of the query, base weights
    dW_icl  = V'^T K'                      added by the tokens X' of the demonstrations, base weights
    dW_ft   = V_ft^T K_ft - V^T K          over the tokens of the query, (W_V + dW_V), (W_K + dW_K) in place of W_V, W_K

dW_icl is W_V X' (W_K X')^T in the paper's notation, and dW_ft is what the changes of W_K and W_V amount to on the same
layer inputs X. Both are compared head by head by the cosine of their entries (Frobenius inner product).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_icl.metrics import Similarity, metric
from fairseq_icl.metrics.vectors import cosine, mean_over_heads


@dataclass(frozen=True)
class WeightUpdates:
    """What ICL and FT add to the matrix of every head; D = head_dim."""

    icl: Tensor  # (L, H, D, D), the same for all examples: it depends on the demonstrations only
    ft: Tensor  # (n, L, H, D, D)

    def on(self, device: torch.device | str) -> "WeightUpdates":
        """The same on another device."""
        return WeightUpdates(self.icl.to(device), self.ft.to(device))


@metric("sim_weights", conditions=(), needs=("weights",), unit="cosine")
def sim_weights(weights: WeightUpdates) -> Similarity:
    """cos(dW_icl, dW_ft) per head, averaged over heads: (n, L)"""
    icl, ft = weights.icl.flatten(-2), weights.ft.flatten(-2)  # (L, H, D*D), (n, L, H, D*D)
    return mean_over_heads(cosine(icl.expand_as(ft), ft))


def head_matrices(keys: Tensor, values: Tensor, is_token: Tensor) -> Tensor:
    """V^T K of every head: keys, values (n, H, T, D), is_token (n, T) bool -> (n, H, D, D)"""
    return torch.einsum("nhtv,nhtk->nhvk", values * is_token[:, None, :, None], keys)
