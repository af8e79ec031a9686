# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "hyper"."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import is_whole, option, switch
from .options_pairs import PairOptions, sliding_layers


@strict
@dataclass
class HyperOptions(PairOptions):
    """Hold the options of kind "hyper", in addition to the windows.

    Attributes:
        order: n; a token attends to tuples of n - 1 tokens. With a softmax it is 3.
        sharing: whether all tokens of a tuple share one key and one value.
        strict_order: whether pairs have j > k instead of j >= k.
        linear: whether to leave out the softmax, which allows any order.
    """

    example = {"sharing": False, "strict_order": True}

    order: int = option(3, "a whole number, at least 2", lambda value: is_whole(value, 2))
    sharing: bool = switch(True)
    strict_order: bool = switch(False)
    linear: bool = switch(False)

    def check(self, config: LlamaConfig, kind: str) -> None:
        sliding = sliding_layers(config, kind)
        where = f"attention_options[{kind!r}] has"
        if self.linear:
            for name in ("strict_order", "windows"):
                if getattr(self, name):
                    raise ValueError(f"{where} linear=True, whose tuples are all of the past: {name} must not be set.")
            if any(sliding):
                raise ValueError(f"{where} linear=True, which has no window: its layers must be 'full_attention'.")
            if config.attention_dropout:
                raise ValueError(
                    f"attention_dropout={config.attention_dropout}, and {where} linear=True, which has no weights to "
                    "drop: set it to 0."
                )
        elif self.order != 3:
            raise ValueError(
                f"{where} order={self.order} with softmax, which is for order 3 only: set linear=True for other "
                "orders."
            )
        if self.strict_order and self.windows and self.windows[1] == 1:
            raise ValueError(
                f"{where} strict_order=True with a window of 1 token for k, which leaves no pair with j > k."
            )
        super().check(config, kind)
