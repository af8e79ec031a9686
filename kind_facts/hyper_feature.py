"""Describe kind "hyper_feature"."""

from . import Companion


COMPANION = Companion(
    card="HyperFeatureAttention: a head's scores are products of several features' scores.",
    paper="A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions: "
    "Representation, Training, Generalization",
)
