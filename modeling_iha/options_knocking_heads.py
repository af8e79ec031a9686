# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "knocking_heads"."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import KindOptions, option, switch


@strict
@dataclass
class KnockingOptions(KindOptions):
    """Hold the options of kind "knocking_heads": what the maps that the heads share act on.

    Attributes:
        queries, keys: whether a linear map acts on them.
        values: the map of the values: "linear", "mlp" or `None`.
    """

    example = {"queries": True, "keys": True, "values": "linear"}

    queries: bool = switch(False)
    keys: bool = switch(False)
    values: str | None = option("mlp", "'linear', 'mlp' or None", lambda value: value in ("linear", "mlp", None))

    def check(self, config: LlamaConfig, kind: str) -> None:
        if not (self.queries or self.keys or self.values):
            raise ValueError(
                f"attention_options[{kind!r}] has queries=False, keys=False and values=None, which leaves multi-head "
                "attention: set one of them, or use kind 'mha'."
            )
