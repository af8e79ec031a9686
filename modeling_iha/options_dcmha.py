# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the options of kind "dcmha"."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import KindOptions, is_whole, option, switch


@strict
@dataclass
class CompositionOptions(KindOptions):
    """Hold the options of kind "dcmha", the variants of DCMHA, Table 9.

    Attributes:
        rank: R of the projections; 0 for gates only.
        gate: whether there are gates.
        base_map: whether a learned static map W_b replaces the skip connection.
        stages: what is composed: scores before the softmax ("pre"), weights after it ("post"), or both.
        sides: whose tokens compute composition weights: the queries', the keys', or both.
        num_groups: number of groups of heads; heads are composed within a group (Section 3.2).
    """

    example = {"rank": 1, "base_map": True, "num_groups": 2}

    rank: int = option(2, "a whole number, 0 for no projection", lambda value: is_whole(value, 0))
    gate: bool = switch(True)
    base_map: bool = switch(False)
    stages: str = option("both", "'both', 'pre' or 'post'", lambda value: value in ("both", "pre", "post"))
    sides: str = option("both", "'both', 'query' or 'key'", lambda value: value in ("both", "query", "key"))
    num_groups: int = option(1, "a whole number, at least 1", is_whole)

    def check(self, config: LlamaConfig, kind: str) -> None:
        if config.num_attention_heads % self.num_groups != 0:
            raise ValueError(
                f"attention_options[{kind!r}] has num_groups={self.num_groups}, which does not divide "
                f"num_attention_heads={config.num_attention_heads}; heads are composed within groups of equal size."
            )
        if self.rank == 0 and not self.gate and self.sides != "both":
            raise ValueError(
                f"attention_options[{kind!r}] has sides={self.sides!r} with rank=0 and gate=False, so no token "
                "computes composition weights: leave sides out, or turn rank or gate on."
            )
        if self.rank == 0 and not self.gate and not self.base_map:
            raise ValueError(
                f"attention_options[{kind!r}] has rank=0, gate=False and base_map=False, which composes nothing: turn "
                "one of them on, or use the kind 'mha'."
            )
