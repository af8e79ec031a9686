# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "hyper_feature"."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import KindOptions, is_whole, option, switch


@strict
@dataclass
class FeatureOptions(KindOptions):
    """Hold the options of kind "hyper_feature".

    Attributes:
        orders: how many scores a head multiplies: one number for all heads, or a list with one for each head.
        value_product: whether a head also multiplies as many values.
        linear: whether to leave out the softmax.
    """

    example = {"orders": [1, 1, 4, 4], "value_product": True}

    orders: int | list[int] = option(
        2,
        "a whole number, at least 1, or a list of one for each head",
        lambda value: is_whole(value) or (isinstance(value, list) and all(map(is_whole, value))),
    )
    value_product: bool = switch(False)
    linear: bool = switch(False)

    def of_heads(self, num_heads: int) -> list[int]:
        """Return the order of each head."""
        return [self.orders] * num_heads if isinstance(self.orders, int) else self.orders

    def check(self, config: LlamaConfig, kind: str) -> None:
        orders = self.of_heads(config.num_attention_heads)
        where = f"attention_options[{kind!r}] has orders={self.orders}"
        if len(orders) != config.num_attention_heads:
            raise ValueError(f"{where}; it must be one number, or one for each of {config.num_attention_heads} heads.")
        for order in orders:
            if config.head_dim % (2 * order) != 0:
                raise ValueError(
                    f"{where} and head_dim={config.head_dim}; each of a head's features has head_dim / order "
                    "channels, which must be an even number, because RoPE rotates pairs."
                )
        heads_per_group = config.num_attention_heads // config.num_key_value_heads
        for head, order in enumerate(orders):
            if order != orders[head - head % heads_per_group]:
                raise ValueError(
                    f"{where} with num_key_value_heads={config.num_key_value_heads}; the {heads_per_group} heads of a "
                    "group share its keys, so they must have one order."
                )
