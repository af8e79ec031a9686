"""Describe kind "hyper"."""

from . import Companion


COMPANION = Companion(
    card="HyperAttention: every token attends to tuples of tokens.",
    paper="A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions: "
    "Representation, Training, Generalization",
)
