# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define kind "hyper_feature" (A Theoretical Study of (Hyper) Self-Attention, Sections 5 and F.2)."""

from functools import reduce
from itertools import groupby

import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .configuration_iha import IHAConfig
from .score_matrix import MASKED, ScoreMatrixAttention


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

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        options = config.options_of("hyper_feature")
        self.linear = options.linear
        self.value_product = options.value_product
        group_orders = options.of_heads(config.num_attention_heads)[:: self.num_key_value_groups]
        # Neighbouring groups of one order are computed together: (order, number of groups).
        self.runs = [(order, len(list(groups))) for order, groups in groupby(group_orders)]
        if self.value_product:
            self.v_proj = nn.Linear(config.hidden_size, sum(group_orders) * self.head_dim, bias=config.attention_bias)

    def project_heads(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        query_states, key_states, value_states = super().project_heads(hidden_states)
        if self.value_product:
            runs = value_states.split([order * groups for order, groups in self.runs], dim=2)
            products = [
                product(run.unflatten(2, (groups, order)), dim=3) for run, (order, groups) in zip(runs, self.runs)
            ]
            value_states = torch.cat(products, dim=2)
        return [query_states, key_states, value_states]

    def split_runs(self, states: torch.Tensor, heads_per_group: int) -> list[torch.Tensor]:
        """Split heads [batch, heads, N, head_dim] into runs [batch, heads of one order, N, A, w]."""
        runs = states.split([groups * heads_per_group for _, groups in self.runs], dim=1)
        return [run.unflatten(-1, (order, -1)) for run, (order, _) in zip(runs, self.runs)]

    def rotate(
        self, query_states: torch.Tensor, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries = self.split_runs(query_states, self.num_key_value_groups)
        keys = self.split_runs(key_states, 1)
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
            run_query = run_query.transpose(2, 3)  # [batch, heads, A, N, w]
            run_key = run_key.transpose(2, 3)
            run_key = run_key.repeat_interleave(self.num_key_value_groups, dim=1)
            factors = torch.matmul(run_query, run_key.transpose(-1, -2)) * run_query.shape[-1] ** -0.5
            scores.append(product(factors, dim=2))
        return torch.cat(scores, dim=1)

    def normalize_scores(self, scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if self.linear:
            return scores.masked_fill(bias <= MASKED, 0)
        return super().normalize_scores(scores, bias)
