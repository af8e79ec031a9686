# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define kind "hyper_feature" (A Theoretical Study of (Hyper) Self-Attention, Sections 5 and F.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .attention_options import is_whole, option, switch
from .score_matrix import MASKED, ScoreMatrixAttention


if TYPE_CHECKING:
    from .configuration_iha import IHAConfig


@strict
@dataclass
class FeatureOptions:
    """Hold the options of kind "hyper_feature".

    Attributes:
        orders: how many scores a head multiplies: one number for all heads, or a list with one for each head.
        value_product: whether a head also multiplies as many values.
        linear: whether to leave out the softmax.
    """

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


def product(factors: torch.Tensor, dim: int) -> torch.Tensor:
    """Multiply the slices along a dimension. Unlike `torch.prod` it does not look for zeros in the backward pass."""
    return reduce(torch.mul, factors.unbind(dim))


class HyperFeatureAttention(ScoreMatrixAttention):
    """Attend by products of the scores of several features: HyperFeatureAttention (Definition F.3).

    A head of order A holds A queries and keys of width w = head_dim / A side by side. Its score is the product over a
    of q_a k_a^T / sqrt(w). RoPE rotates each of them as a vector of width w (Remark F.5). Order 1 is multi-head
    attention.

    With `value_product` the value is a product of A vectors of width head_dim, and `v_proj` has A times the rows. With
    `linear` the scores are the weights, without a softmax (Definition 5.1). The cache is Llama's.

    With grouped-query attention the heads of a group share its keys, so they have one order.
    """

    kind = "hyper_feature"
    options_class = FeatureOptions
    example_options = {"orders": [1, 1, 4, 4], "value_product": True}

    @classmethod
    def validate(cls, config: IHAConfig) -> None:
        options = config.options_of("hyper_feature")
        orders = options.of_heads(config.num_attention_heads)
        where = f"attention_options['hyper_feature'] has orders={options.orders}"
        if len(orders) != config.num_attention_heads:
            raise ValueError(f"{where}; it must be one number, or one for each of {config.num_attention_heads} heads.")
        for order in orders:
            if config.head_dim % (2 * order) != 0:
                raise ValueError(
                    f"{where} and head_dim={config.head_dim}; each of a head's features has head_dim / order channels, "
                    "which must be an even number, for RoPE rotates pairs."
                )
        heads_per_group = config.num_attention_heads // config.num_key_value_heads
        for head, order in enumerate(orders):
            if order != orders[head - head % heads_per_group]:
                raise ValueError(
                    f"{where} with num_key_value_heads={config.num_key_value_heads}; the {heads_per_group} heads of a group "
                    "share its keys, so they must have one order."
                )

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        options = config.options_of("hyper_feature")
        self.linear, self.value_product = options.linear, options.value_product
        group_orders = options.of_heads(config.num_attention_heads)[:: self.num_key_value_groups]
        # Neighbouring groups of one order are computed together: (order, number of groups).
        self.runs = [(order, len(list(groups))) for order, groups in groupby(group_orders)]
        if self.value_product:
            self.v_proj = nn.Linear(config.hidden_size, sum(group_orders) * self.head_dim, bias=config.attention_bias)

    def project_value(self, hidden_states: torch.Tensor) -> torch.Tensor:
        value_states = self.v_proj(hidden_states)
        if not self.value_product:
            return value_states
        runs = value_states.split([order * groups * self.head_dim for order, groups in self.runs], dim=-1)
        products = [
            product(run.unflatten(-1, (groups, order, self.head_dim)), dim=-2).flatten(-2)
            for run, (order, groups) in zip(runs, self.runs)
        ]
        return torch.cat(products, dim=-1)

    def split_runs(self, states: torch.Tensor, heads_per_group: int) -> list[torch.Tensor]:
        """Split heads [batch, heads, N, head_dim] into runs [batch, heads of one order, N, A, w]."""
        runs = states.split([groups * heads_per_group for _, groups in self.runs], dim=1)
        return [run.unflatten(-1, (order, -1)) for run, (order, _) in zip(runs, self.runs)]

    def rotate(
        self, query_states: torch.Tensor, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = self.split_runs(query_states, self.num_key_value_groups), self.split_runs(key_states, 1)
        rotated = []
        for (order, _), query, key in zip(self.runs, queries, keys):
            # RoPE's frequencies for width w, theta^(-2i / w), are every A-th of those for head_dim.
            tables = (cos[..., None, ::order], sin[..., None, ::order])
            run = apply_rotary_pos_emb(query, key, *tables)
            rotated.append([states.flatten(-2) for states in run])
        query_states, key_states = (torch.cat(states, dim=1) for states in zip(*rotated))
        return query_states, key_states

    def raw_scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = []
        for run_query, run_key in zip(self.split_runs(query, self.num_key_value_groups), self.split_runs(key, 1)):
            run_query, run_key = run_query.transpose(2, 3), run_key.transpose(2, 3)  # [batch, heads, A, N, w]
            run_key = run_key.repeat_interleave(self.num_key_value_groups, dim=1)
            factors = torch.matmul(run_query, run_key.transpose(-1, -2)) * run_query.shape[-1] ** -0.5
            scores.append(product(factors, dim=2))
        return torch.cat(scores, dim=1)

    def normalize_scores(self, scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if self.linear:
            return scores.masked_fill(bias <= MASKED, 0)
        return super().normalize_scores(scores, bias)
