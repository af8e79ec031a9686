# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""List the attention classes of the kinds, one to a line. A checkpoint ships the lines of its own kinds."""

from .attention_dcmha import DynamicallyComposableAttention
from .attention_diff import DifferentialAttention
from .attention_diff_v2 import DifferentialAttentionV2
from .attention_gated import GatedAttention
from .attention_hyper import HyperAttention
from .attention_hyper_feature import HyperFeatureAttention
from .attention_iha import InterleavedHeadAttention
from .attention_knocking_heads import KnockingHeadsAttention
from .attention_mha import MultiHeadAttention
from .attention_multi_token import MultiTokenAttention
from .attention_paired_heads import PairedHeadsAttention
from .attention_simplicial import SimplicialAttention
from .attention_talking_heads import TalkingHeadsAttention


ATTENTION_CLASSES = {
    "mha": MultiHeadAttention,
    "iha": InterleavedHeadAttention,
    "talking_heads": TalkingHeadsAttention,
    "diff": DifferentialAttention,
    "diff_v2": DifferentialAttentionV2,
    "gated": GatedAttention,
    "knocking_heads": KnockingHeadsAttention,
    "multi_token": MultiTokenAttention,
    "hyper_feature": HyperFeatureAttention,
    "hyper": HyperAttention,
    "simplicial": SimplicialAttention,
    "dcmha": DynamicallyComposableAttention,
    "paired_heads": PairedHeadsAttention,
}
