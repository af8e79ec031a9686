# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options shared by the kinds that attend to pairs of tokens."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import KindOptions, is_whole, option


def sliding_layers(config: LlamaConfig, kind: str) -> list[bool]:
    """Return for each layer of the kind whether it is a sliding one."""
    layers = zip(config.attention_kinds, config.layer_types)
    return [layer_type == "sliding_attention" for layer_kind, layer_type in layers if layer_kind == kind]


@strict
@dataclass
class PairOptions(KindOptions):
    """Hold the windows of the two tokens of a pair.

    Attributes:
        windows: [w1, w2] of j and k in tokens; the larger one is the layer's `sliding_window`. `None` sets both to it.
    """

    windows: list[int] | None = option(
        None,
        "a list of two numbers of tokens, at least 1, or null",
        lambda value: value is None or (isinstance(value, list) and len(value) == 2 and all(map(is_whole, value))),
    )

    def check(self, config: LlamaConfig, kind: str) -> None:
        if config.exclusive_attention:
            raise ValueError(
                f"exclusive_attention=True with attention kind {kind!r}, whose values are those of tuples of tokens: "
                "set it to False."
            )
        if self.windows and not (all(sliding_layers(config, kind)) and max(self.windows) == config.sliding_window):
            raise ValueError(
                f"attention_options[{kind!r}] has windows={self.windows}; its layers must be 'sliding_attention', "
                f"with sliding_window={max(self.windows)}, the larger of the two."
            )
