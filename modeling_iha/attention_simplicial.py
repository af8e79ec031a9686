"""2-simplicial attention, kind "simplicial" (Fast and Simplex, Section 4; the strongest baseline of IHA, Appendix D)."""

import torch

from .attention_hyper import HyperAttention


class SimplicialAttention(HyperAttention):
    """HyperAttention of order 3, without sharing, over all pairs of past tokens, in whatever order: S[i, j, k] = sum_c q[i, c]
    k1[j, c] k2[k, c] / sqrt(head_dim), a softmax over the pairs, and the output sum_jk A[i, j, k] v1[j] * v2[k].

    `windows` [w1, w2] are the paper's, of j and of k.
    """

    def order_mask(self, j: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(j >= k)
