# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "gated"."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict

from .options import KindOptions, switch


@strict
@dataclass
class GateOptions(KindOptions):
    """Hold the options of kind "gated".

    Attributes:
        per_head: whether a head has one gate instead of one for each element of its output.
    """

    example = {"per_head": True}

    per_head: bool = switch(False)
