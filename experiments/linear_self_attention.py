"""Linear self-attention with an explicit interaction matrix, SA_lin(X) = (X C X^T) X W_V (A Theoretical Study of
(Hyper) Self-Attention through the Lens of Interactions, Section 2, equation 1)."""

import torch
from torch import nn


class LinearSelfAttention(nn.Module):
    """One layer over tuples of embeddings, without softmax, mask or positions.

    Attributes:
        interaction: C, [d, d]: what an entity is worth to another, as a matrix and not as a product of queries and
            keys.
        value: W_V, [d, d_out].
    """

    def __init__(self, interaction: torch.Tensor, value: torch.Tensor):
        super().__init__()
        self.interaction = nn.Parameter(interaction.clone())
        self.value = nn.Parameter(value.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, entities, d_out] of embeddings [batch, entities, d]."""
        return x @ self.interaction @ x.transpose(-1, -2) @ (x @ self.value)

    def function(self, embedding: torch.Tensor) -> torch.Tensor:
        """T[mu, nu] = (x(mu)^T C x(nu)) (x(nu)^T w), [cells, cells], of the embedding [cells, d] of a domain, for
        d_out = 1: equal for any two layers that compute the same for tuples of every length (Corollary 4.9)."""
        return (embedding @ self.interaction @ embedding.T) * (embedding @ self.value).T
