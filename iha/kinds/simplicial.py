"""Describe kind "simplicial"."""

from . import Companion


COMPANION = Companion(
    card="2-simplicial attention: every token attends to pairs of tokens.",
    paper="Roy et al., 2025, Fast and Simplex: 2-Simplicial Attention in Triton",
)
