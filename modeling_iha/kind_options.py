# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""List the options classes of the kinds, one to a line. A checkpoint ships the lines of its own kinds."""

from .options import KindOptions
from .options_dcmha import CompositionOptions
from .options_diff import DifferentialOptions
from .options_gated import GateOptions
from .options_hyper import HyperOptions
from .options_hyper_feature import FeatureOptions
from .options_knocking_heads import KnockingOptions
from .options_multi_token import MultiTokenOptions
from .options_paired_heads import PairedHeadsOptions
from .options_pairs import PairOptions


OPTIONS_CLASSES = {
    "mha": KindOptions,
    "iha": KindOptions,
    "talking_heads": KindOptions,
    "diff": DifferentialOptions,
    "diff_v2": KindOptions,
    "gated": GateOptions,
    "knocking_heads": KnockingOptions,
    "multi_token": MultiTokenOptions,
    "hyper_feature": FeatureOptions,
    "hyper": HyperOptions,
    "simplicial": PairOptions,
    "dcmha": CompositionOptions,
    "paired_heads": PairedHeadsOptions,
}
