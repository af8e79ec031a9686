# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "paired_heads": there are none. Check that the heads of a model can be paired."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import KindOptions


@strict
@dataclass
class PairedHeadsOptions(KindOptions):
    """Hold no options: P is the config's `num_pseudo_heads`."""

    def check(self, config: LlamaConfig, kind: str) -> None:
        if config.num_key_value_heads % config.num_pseudo_heads:
            raise ValueError(
                f"num_pseudo_heads={config.num_pseudo_heads} does not divide num_key_value_heads="
                f"{config.num_key_value_heads}: layers of kind {kind!r} join the heads in groups of num_pseudo_heads, "
                "so choose a divisor."
            )
