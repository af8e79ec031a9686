# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "diff"."""

from dataclasses import dataclass
from math import inf

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import KindOptions, option


@strict
@dataclass
class DifferentialOptions(KindOptions):
    """Hold the options of kind "diff".

    Attributes:
        lambda_std_dev: standard deviation of the initial lambda vectors.
    """

    example = {"lambda_std_dev": 0.2}

    lambda_std_dev: int | float = option(
        0.1, "a number, at least 0", lambda value: type(value) in (int, float) and 0 <= value < inf
    )

    def check(self, config: LlamaConfig, kind: str) -> None:
        if config.num_key_value_heads % 2 != 0:
            raise ValueError(
                f"num_key_value_heads={config.num_key_value_heads} is odd; attention kind {kind!r} subtracts the "
                "second half of the heads from the first, each with half of the key/value heads, so it must be even."
            )
        if config.attention_dropout:
            raise ValueError(
                f"attention_dropout={config.attention_dropout} with attention kind {kind!r}, whose paper does "
                "not define dropout: set it to 0."
            )
