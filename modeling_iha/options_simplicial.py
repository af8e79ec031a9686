# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "simplicial"."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict

from .options_pairs import PairOptions


@strict
@dataclass
class SimplicialOptions(PairOptions):
    """Hold the options of kind "simplicial"."""

    kind = "simplicial"
