# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""List the options of the attention kinds, one line each; a checkpoint ships the lines of its own kinds."""

from .options import KindOptions
from .options_dcmha import CompositionOptions
from .options_diff import DifferentialOptions
from .options_hyper import HyperOptions
from .options_hyper_feature import FeatureOptions
from .options_simplicial import SimplicialOptions


OPTIONS_CLASSES = {
    "mha": KindOptions,
    "iha": KindOptions,
    "talking_heads": KindOptions,
    "diff": DifferentialOptions,
    "hyper_feature": FeatureOptions,
    "hyper": HyperOptions,
    "simplicial": SimplicialOptions,
    "dcmha": CompositionOptions,
}
