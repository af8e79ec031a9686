# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define Dynamically Composable Multi-Head Attention, kind "dcmha" (DCMHA, Section 3 and Appendix D)."""

import math

import torch
from torch import nn
from transformers import initialization as init

from .configuration_iha import IHAConfig
from .score_matrix import HeadMap, ScoreMatrixAttention


class CompositionWeights(nn.Module):
    """Compute the composition weights of one side of `Compose`, the queries or the keys, for each token.

    For each group of M heads, the layer's input x gives w_1 and w_2 as Chunk(GELU(x W_1) W_2) (DCMHA, Equation 5) and
    w_g = tanh(x W_g) (Equation 6). w_1 is normalized to root mean square 1 over the heads.

    With I = 2 M R, `w1.weight` is [groups * I, hidden_size], `w2` [groups, 2 R, M, I] and `gate.weight` [H,
    hidden_size]."""

    # The released models normalize w_1 with this epsilon, whatever the epsilon of the other norms.
    eps = 1e-6

    def __init__(self, config: IHAConfig):
        super().__init__()
        options = config.options_of("dcmha")
        self.rank = options.rank
        self.num_groups = options.num_groups
        self.group_size = config.num_attention_heads // self.num_groups
        self.gate = nn.Linear(config.hidden_size, config.num_attention_heads, bias=False) if options.gate else None
        if self.rank > 0:
            hidden = 2 * self.group_size * self.rank
            self.w1 = nn.Linear(config.hidden_size, self.num_groups * hidden, bias=False)
            self.w2 = nn.Parameter(torch.zeros(self.num_groups, 2 * self.rank, self.group_size, hidden))

    @property
    def width(self) -> int:
        """Return the number of values that `forward` returns for each token and head."""
        return 2 * self.rank + (self.gate is not None)

    def init_mechanism(self, config: IHAConfig):
        """Start the composition weights small, and the other weights by Xavier.

        The paper finds the small start critical (Section 4). The scale is that of the released code."""
        if self.rank > 0:
            init.normal_(self.w1.weight, std=math.sqrt(2 / (config.hidden_size + self.w2.shape[-1])))
            init.normal_(self.w2, std=0.02 / (math.sqrt(self.w2.shape[-1]) * (self.group_size + self.rank)))
        if self.gate is not None:
            init.normal_(self.gate.weight, std=0.05 * math.sqrt(2 / sum(self.gate.weight.shape)))

    @torch.no_grad()
    def init_identity(self):
        """Make the composition the identity, the exact start from multi-head attention.

        w_1 keeps its start, because two zero factors would never get a gradient."""
        if self.rank > 0:
            self.w2[:, self.rank :].zero_()
        if self.gate is not None:
            self.gate.weight.zero_()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return w_1 (R values), w_2 (R) and w_g (1) per head, [batch, N, H, 2 R + 1], of [batch, N, hidden_size]."""
        weights = []  # each [batch, N, groups, R or 1, M]
        if self.rank > 0:
            hidden = nn.functional.gelu(self.w1(hidden_states)).unflatten(-1, (self.num_groups, -1))
            w1, w2 = torch.einsum("bngi,grmi->bngrm", hidden, self.w2.to(hidden.dtype)).chunk(2, dim=-2)
            weights += [nn.functional.rms_norm(w1, (self.group_size,), eps=self.eps), w2]
        if self.gate is not None:
            gate = torch.tanh(self.gate(hidden_states))
            weights.append(gate.unflatten(-1, (self.num_groups, 1, self.group_size)))
        return torch.cat(weights, dim=-2).transpose(-1, -2).flatten(2, 3)


class DynamicallyComposableAttention(ScoreMatrixAttention):
    """Compose the scores and weights of heads by Dynamically Composable Multi-Head Attention (DCMHA, Equations 4, 7).

    Before and after the softmax the matrix of every head becomes a combination of the matrices of all heads in its
    group. The query's and the key's token compute the weights of the combination from the layer's input.

    A token's weights lie next to its query, key and value, along the last dimension. Any stock cache holds a key's
    weights before the softmax with the key, and those after it with the value: (H / G) (2 R + 1) more numbers in each.
    """

    mixing_modules = ("pre_base", "post_base")

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        options = config.options_of("dcmha")
        self.num_heads = config.num_attention_heads
        self.num_groups = options.num_groups
        self.rank = options.rank
        dynamic = self.rank > 0 or options.gate
        group_size = self.num_heads // self.num_groups
        for stage in ("pre", "post"):
            composes = options.stages in ("both", stage)
            # W_b of Equation 7; its start, the identity, is the skip connection that it replaces.
            base = HeadMap(self.num_groups, group_size, config.mixing_scale) if composes and options.base_map else None
            setattr(self, f"{stage}_base", base)
            for side in ("query", "key"):
                weighs = composes and dynamic and options.sides in ("both", side)
                setattr(self, f"{stage}_{side}", CompositionWeights(config) if weighs else None)

    def append_weights(
        self, states: torch.Tensor, hidden_states: torch.Tensor, *modules: CompositionWeights | None
    ) -> torch.Tensor:
        """Append the composition weights of all H heads to states [batch, heads, N, head_dim].

        The modules compute them from hidden states [batch, N, hidden_size]. Where the states have G < H heads, each
        takes the weights of the H / G query heads that read it, side by side."""
        shares = [
            module(hidden_states).flatten(2).unflatten(2, (states.shape[1], -1)).transpose(1, 2)
            for module in modules
            if module is not None
        ]
        return torch.cat((states, *shares), dim=-1)

    def split_weights(self, states: torch.Tensor, *modules: CompositionWeights | None) -> list[torch.Tensor | None]:
        """Split states that `append_weights` returned into states and the weights of each module.

        The states are [batch, heads, N, head_dim], and the weights are [batch, H, N, width]."""
        per_head = self.num_heads // states.shape[1]
        shares = [0 if module is None else per_head * module.width for module in modules]
        states, *weights = states.split([self.head_dim, *shares], dim=-1)
        weights = [
            None if module is None else share.unflatten(-1, (per_head, -1)).transpose(2, 3).flatten(1, 2)
            for module, share in zip(modules, weights)
        ]
        return [states, *weights]

    def project(self, hidden_states: torch.Tensor, position_embeddings: dict[str, tuple]) -> tuple:
        """Project as Llama does, with the composition weights next to the queries, keys and values."""
        query_states, key_states, value_states = super().project(hidden_states, position_embeddings)
        query_states = self.append_weights(query_states, hidden_states, self.pre_query, self.post_query)
        key_states = self.append_weights(key_states, hidden_states, self.pre_key)
        value_states = self.append_weights(value_states, hidden_states, self.post_key)
        return query_states, key_states, value_states

    def combine_heads(self, attn_output, hidden_states, own_values) -> torch.Tensor:
        return super().combine_heads(attn_output, hidden_states, own_values[..., : self.head_dim])

    def attend_block(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, pre_query, post_query = self.split_weights(query, self.pre_query, self.post_query)
        key, pre_key = self.split_weights(key, self.pre_key)
        value, post_key = self.split_weights(value, self.post_key)
        return super().attend_block(
            query, key, value, *args, pre=(pre_query, pre_key), post=(post_query, post_key), **kwargs
        )

    def compose_scores(self, scores: torch.Tensor, pre: tuple, **kwargs) -> torch.Tensor:
        return self.compose(scores, self.pre_base, *pre)

    def compose_weights(self, weights: torch.Tensor, post: tuple, **kwargs) -> torch.Tensor:
        return self.compose(weights, self.post_base, *post)

    def compose(
        self,
        attention: torch.Tensor,
        base: HeadMap | None,
        query_weights: torch.Tensor | None,
        key_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply `Compose` (DCMHA, Equation 7) to scores or weights [batch, H, rows, columns], in their dtype.

        The composition weights of the queries and keys are [batch, H, rows or columns, width]."""
        attention = attention.unflatten(1, (self.num_groups, -1))
        composed = attention if base is None else base(attention)
        for weights, of_query in ((query_weights, True), (key_weights, False)):
            if weights is None:
                continue
            w1, w2, gate = weights.unflatten(1, (self.num_groups, -1)).tensor_split((self.rank, 2 * self.rank), dim=-1)
            if self.rank > 0 and of_query:
                shared = torch.einsum("bgmij,bgmir->bgrij", attention, w1)
                composed = composed + torch.einsum("bgrij,bgmir->bgmij", shared, w2)
            elif self.rank > 0:
                # One matrix product for each key would first copy the attention key by key.
                for down, up in zip(w1.unbind(-1), w2.unbind(-1)):
                    shared = (attention * down.unsqueeze(-2)).sum(dim=2, keepdim=True)
                    composed = composed + shared * up.unsqueeze(-2)
            if gate.shape[-1] > 0:
                composed = composed + attention * (gate if of_query else gate.transpose(-1, -2))
        return composed.flatten(1, 2)
