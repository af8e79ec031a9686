# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define HyperAttention, kind "hyper" (A Theoretical Study of (Hyper) Self-Attention, Sections 6 and G)."""

from functools import reduce

import torch
from transformers.utils.generic import maybe_autocast

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig
from .score_matrix import MASKED, block_bias, join, query_blocks, query_offset, recomputed
from .tuple_attention import PairAttention, TupleAttention, queries_per_block


# The linear form holds the running sums of this many tokens at a time.
# They are [batch, heads, order - 1, CHUNK, head_dim, head_dim].
CHUNK = 32


class HyperAttention(PairAttention):
    """Attend by a softmax over all ordered pairs i >= j >= k: order 3 (Definitions G.1 and G.3).

    See [`PairAttention`]. With `strict_order` (j > k) the first token has no pair, and its output is 0."""

    def __init__(self, config: IHAConfig, layer_idx: int):
        options = config.options_of("hyper")
        super().__init__(config, layer_idx, sharing=options.sharing, windows=options.windows)
        self.strict_order = options.strict_order

    @classmethod
    def for_layer(cls, config: IHAConfig, layer_idx: int) -> MultiHeadAttention:
        if config.options_of("hyper").linear:
            return LinearHyperAttention(config, layer_idx)
        return cls(config, layer_idx)

    def is_pair(self, j: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return j > k if self.strict_order else j >= k


def linear_step(
    state: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of linear HyperAttention for new tokens (Section G.3, equation 43).

    A state of constant size holds all tokens before them.

    Args:
        state: [batch, heads, n - 1, head_dim, head_dim], the sums of k_a v_a^T over the tokens so far; zeros at the
            start. It is float32 or float64, for precision over long inputs.
        query: [batch, heads, N, head_dim] of N new tokens, scaled.
        keys, values: [batch, heads, n - 1, N, head_dim] of the new tokens.

    Returns:
        The output [batch, heads, N, head_dim] in the dtype of the query, and the state after the last token.
    """
    outer = keys.to(state.dtype).unsqueeze(-1) * values.to(state.dtype).unsqueeze(-2)
    sums = state.unsqueeze(3) + outer.cumsum(dim=3)
    return contract(query, sums), sums[:, :, :, -1]


def masked_step(
    state: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `linear_step` from the start, where each query [batch, heads, rows, head_dim] sees its own keys.

    `visible` is bool, [batch or 1, 1 or heads, rows, keys]. The state stays as it is."""
    keys = keys.to(state.dtype).unsqueeze(3) * visible[:, :, None, :, :, None]
    with maybe_autocast(query.device.type, enabled=False):  # which would round the sums
        sums = torch.matmul(keys.transpose(-1, -2), values.to(state.dtype).unsqueeze(3))
    return contract(query, sums), state


def contract(query: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return O[i, t] = sum_c q[i, c] prod_a sums_a[i, c, t], [batch, heads, N, head_dim].

    `sums` is [batch, heads, n - 1, N, head_dim, head_dim]."""
    sums = reduce(torch.mul, sums.unbind(2))
    with maybe_autocast(query.device.type, enabled=False):
        output = torch.matmul(query.to(sums.dtype).unsqueeze(-2), sums)
    return output.squeeze(-2).to(query.dtype)


class LinearHyperAttention(TupleAttention):
    """Compute linear HyperAttention of any order (Section G.3), and return no attention weights.

    The scores are the weights, without a softmax, and tuples are not ordered. The sums over the tokens of a tuple are
    then separate running sums, O(N head_dim^2) in all. Under a mask (padding, packing, a chunk that continues a cache)
    every query sums the tokens that it sees, O(N^2 head_dim^2)."""

    def __init__(self, config: IHAConfig, layer_idx: int):
        options = config.options_of("hyper")
        super().__init__(config, layer_idx, tuple_size=options.order - 1, sharing=options.sharing)

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        query = query_states * self.scaling
        keys = self.split_keys(key_states)
        values = self.split_keys(value_states)
        batch, heads, stack, num_keys, head_dim = keys.shape
        length = query.shape[2]
        # Only an input without cached keys and without a mask is one running sum: see `query_offset`.
        running = attention_mask is None and length > 1
        state = query.new_zeros(
            (batch, heads, stack, head_dim, head_dim), dtype=torch.promote_types(query.dtype, torch.float32)
        )
        scores_per_query = 0 if running else batch * heads * stack * num_keys * head_dim
        blocks = query_blocks(query, queries_per_block(CHUNK, scores_per_query, query.device))
        outputs = []
        for rows in blocks:
            if running:
                states = (state, query[:, :, rows], keys[:, :, :, rows], values[:, :, :, rows])
                output, state = recomputed(linear_step, len(blocks), *states)
            else:
                offset = query_offset(length, num_keys)
                visible = block_bias(attention_mask, rows, slice(0, num_keys), offset, query.device) > MASKED
                output, state = recomputed(masked_step, len(blocks), state, query[:, :, rows], keys, values, visible)
            outputs.append(output)
        return join(outputs, dim=2).transpose(1, 2), None
