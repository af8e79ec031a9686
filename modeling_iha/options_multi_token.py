# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "multi_token"."""

from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .option_fields import is_whole, option, switch
from .options import KindOptions


def _stages(default: str) -> Any:
    """Return a field that names the sides of the softmax on which an operation acts."""
    return option(default, "'both', 'pre', 'post' or None", lambda value: value in ("both", "pre", "post", None))


@strict
@dataclass
class MultiTokenOptions(KindOptions):
    """Hold the options of kind "multi_token".

    Attributes:
        query_kernel: c_q, the queries that a convolution covers: a query and those before it.
        key_kernel: c_k, the keys that a convolution covers, with the convolved one in the middle.
        convolution: whether scores before the softmax are convolved ("pre"), weights after it ("post"), or "both".
        every: n. Only layers n // 2, n // 2 + n, ... convolve (counted from 0; n = 4 gives the authors' layers). The
            other layers keep the rest.
        head_mixing: where heads mix: "pre", "post" or "both".
        head_group: c_h, the heads of a group that mix; `None` for all heads.
        head_norm: whether each head's output is normed.
        head_gate: whether a sigmoid gate of each head's output scales it.
    """

    example = {"query_kernel": 2, "key_kernel": 5, "head_group": 2}

    query_kernel: int = option(6, "a whole number, at least 1", is_whole)
    key_kernel: int = option(11, "an odd whole number, at least 1", lambda value: is_whole(value) and value % 2 == 1)
    convolution: str | None = _stages("both")
    every: int = option(1, "a whole number, at least 1", is_whole)
    head_mixing: str | None = _stages("both")
    head_group: int | None = option(
        None, "a whole number, at least 1, or None", lambda value: value is None or is_whole(value)
    )
    head_norm: bool = switch(False)
    head_gate: bool = switch(False)

    def in_layer(self, layer_idx: int) -> "MultiTokenOptions":
        """Return the options as they hold in the layer `layer_idx`."""
        return self if layer_idx % self.every == self.every // 2 else replace(self, convolution=None)

    def check(self, config: LlamaConfig, kind: str) -> None:
        where = f"attention_options[{kind!r}] has"
        if config.num_attention_heads % (self.head_group or 1) != 0:
            raise ValueError(
                f"{where} head_group={self.head_group}, which does not divide num_attention_heads="
                f"{config.num_attention_heads}; heads mix within groups of equal size."
            )
        if self.head_group is not None and self.head_mixing is None:
            raise ValueError(f"{where} head_group={self.head_group} without head_mixing, which mixes no heads.")
        defaults = MultiTokenOptions()
        of_convolution = ("query_kernel", "key_kernel", "every")
        unused = [name for name in of_convolution if getattr(self, name) != getattr(defaults, name)]
        if self.convolution is None and unused:
            raise ValueError(
                f"{where} convolution=None and {', '.join(unused)}, which describe a convolution: leave them out, or "
                "set convolution."
            )
        if self.convolution is None and self.head_mixing is None:
            raise ValueError(
                f"{where} convolution=None and head_mixing=None, which leaves the scores alone: set one of them, or "
                "use kind 'mha'."
            )
        if ("sliding_attention", kind) in zip(config.layer_types, config.attention_kinds):
            raise ValueError(
                f"Kind {kind!r} has no window, and layer_types has 'sliding_attention' in a layer of it: use "
                "'full_attention' there."
            )
        layers = [i for i, name in enumerate(config.attention_kinds) if name == kind]
        if self.convolution is not None and not any(self.in_layer(i).convolution for i in layers):
            raise ValueError(
                f"{where} every={self.every}, for a convolution in layers {self.every // 2}, "
                f"{self.every // 2 + self.every}, ... (counted from 0), and none of them is of this kind: choose a "
                "smaller number, or set convolution=None."
            )
