# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the base of the kinds that attend from a token to tuples of tokens."""

import torch
from torch import nn
from transformers.models.llama.modeling_llama import repeat_kv

from .configuration_iha import IHAConfig
from .score_matrix import (
    MASKED,
    ScoreMatrixAttention,
    block_bias,
    block_columns,
    join,
    most_columns,
    over_all_keys,
    query_blocks,
    query_offset,
    recomputed,
)


# A block has at most this many queries and scores. The scores exist for one block at a time. On a CPU they are 16 MiB
# of float32: glibc keeps freed memory for the next block only in pieces of up to 32 MiB, and the system clears larger
# ones each time. On a GPU they are 64 MiB, because each block costs launches.
PAIR_BLOCK = 32
MAX_SCORES_ON_CPU = 2**22
MAX_SCORES = 2**24


def queries_per_block(most: int, scores_per_query: int, device: torch.device) -> int:
    """Return the number of queries in a block: at most `most`, with the most scores in all, and at least one."""
    most_scores = MAX_SCORES_ON_CPU if device.type == "cpu" else MAX_SCORES
    return max(1, min(most, most_scores // max(1, scores_per_query)))


def nearest(bias: torch.Tensor, window: int | None) -> torch.Tensor:
    """Hide the columns `window` or more places before the last visible one of each row.

    `bias` is an additive mask [..., rows, columns]. The last visible column is the query's own token: unused places of
    a static cache follow it. If a user's mask hides the own token, the window ends at the last token it shows."""
    if window is None:
        return bias
    places = torch.arange(bias.shape[-1], device=bias.device)
    own = torch.where(bias > MASKED, places, 0).amax(dim=-1, keepdim=True)
    return bias.masked_fill(places <= own - window, torch.finfo(bias.dtype).min)


class TupleAttention(ScoreMatrixAttention):
    """Attend to keys and values that are tuples of tokens.

    With `sharing` the tokens of a tuple share one key and one value, and the parameters are Llama's. Without it
    `k_proj`, `v_proj` and the cache stack the heads of all `tuple_size` keys and values.
    """

    def __init__(self, config: IHAConfig, layer_idx: int, tuple_size: int, sharing: bool):
        super().__init__(config, layer_idx)
        self.tuple_size = tuple_size
        self.sharing = sharing
        if not sharing:
            stacked = tuple_size * config.num_key_value_heads * self.head_dim
            self.k_proj = nn.Linear(config.hidden_size, stacked, bias=config.attention_bias)
            self.v_proj = nn.Linear(config.hidden_size, stacked, bias=config.attention_bias)

    def split_keys(self, states: torch.Tensor) -> torch.Tensor:
        """Return heads [batch, H, tuple_size, N, head_dim], one for each query head.

        `states` holds the stacked heads [batch, tuple_size * G, N, head_dim]."""
        stack = [states] * self.tuple_size if self.sharing else states.chunk(self.tuple_size, dim=1)
        return torch.stack([repeat_kv(heads, self.num_key_value_groups) for heads in stack], dim=2)


class PairAttention(TupleAttention):
    """Attend by a softmax over pairs of tokens (j, k).

    The scores are S[i, j, k] = sum_c q[i, c] k1[j, c] k2[k, c] / sqrt(head_dim), and the output is sum_jk A[i, j, k]
    v1[j] * v2[k]. `windows` [w1, w2] let j and k reach back w1 and w2 tokens, the current one included. By default
    both are the layer's `sliding_window`. Scores exist for a block of queries at a time, O(w1 w2) for each query, and
    the backward pass recomputes them. Inside `torch.compile` they exist for all queries at once.

    The papers do not define positions. RoPE rotates the query and every key as in the other kinds. A common rotation
    changes a product of three vectors, but not a dot product, so scores depend on positions, not only on distances.

    The attention weights that are returned are the shares of j, summed over k, [batch, H, N, keys].
    """

    def __init__(self, config: IHAConfig, layer_idx: int, sharing: bool, windows: list[int] | None):
        super().__init__(config, layer_idx, tuple_size=2, sharing=sharing)
        self.own_windows = windows

    @property
    def windows(self) -> list[int | None]:
        """Return the windows of j and k in tokens, or `None` for a global layer."""
        return self.own_windows or [self.sliding_window] * 2

    def is_pair(self, j: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return which pairs of positions j and k are attended to; j and k broadcast."""
        raise NotImplementedError

    def attend_block(
        self,
        query: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        values: tuple[torch.Tensor, torch.Tensor],
        biases: tuple[torch.Tensor, torch.Tensor],
        pairs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [batch, rows, H, head_dim] and weights of j [batch, H, rows, columns of j] of a block.

        Args:
            query: [batch, H, rows, head_dim].
            keys, values: two each, [batch, H, columns of j, head_dim] and [batch, H, columns of k, head_dim].
            biases: additive masks, [batch or 1, 1 or H, rows, columns of j] and [..., columns of k].
            pairs: bool [columns of j, columns of k], True for a pair to attend to.
        """
        key1, key2 = keys
        value1, value2 = values
        bias = biases[0].unsqueeze(-1) + biases[1].unsqueeze(-2)
        bias = bias.clamp_min(torch.finfo(bias.dtype).min).masked_fill(~pairs, torch.finfo(bias.dtype).min)

        query_key1 = query.unsqueeze(3) * key1.unsqueeze(2)  # [batch, H, rows, columns of j, head_dim]
        scores = torch.matmul(query_key1, key2.unsqueeze(2).transpose(-1, -2)) * self.scaling
        weights = torch.softmax((scores.float() + bias).flatten(-2), dim=-1).view(scores.shape)
        # The softmax also gives weights to a query without a pair, such as padding.
        weights = weights.masked_fill(bias <= MASKED, 0).to(query.dtype)
        weights = torch.nn.functional.dropout(weights, p=self.attention_dropout, training=self.training)
        output = (torch.matmul(weights, value2.unsqueeze(2)) * value1.unsqueeze(2)).sum(dim=3)
        return output.transpose(1, 2), weights.sum(dim=-1)

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        keys = self.split_keys(key_states)
        values = self.split_keys(value_states)
        batch, heads, length, head_dim = query_states.shape
        num_keys = key_states.shape[2]
        offset = query_offset(length, num_keys)
        reach = [most_columns(PAIR_BLOCK, window, length, num_keys) for window in self.windows]
        scores_per_query = batch * heads * reach[0] * max(reach[1], head_dim)
        blocks = query_blocks(query_states, queries_per_block(PAIR_BLOCK, scores_per_query, query_states.device))

        outputs = []
        weights = []
        for rows in blocks:
            columns = [block_columns(attention_mask, rows, window, length, num_keys) for window in self.windows]
            biases = []
            for span, window in zip(columns, self.windows):
                bias = block_bias(attention_mask, rows, span, offset, query_states.device)
                biases.append(nearest(bias, window))
            j, k = (torch.arange(span.start, span.stop, device=query_states.device) for span in columns)
            arguments = (
                query_states[:, :, rows],
                tuple(keys[:, :, a, span] for a, span in enumerate(columns)),
                tuple(values[:, :, a, span] for a, span in enumerate(columns)),
                tuple(biases),
                self.is_pair(j[:, None], k),
            )
            output, block_weights = recomputed(self.attend_block, len(blocks), *arguments)
            outputs.append(output)
            if self.core == "eager":
                weights.append(over_all_keys(block_weights, columns[0], num_keys))
        return join(outputs, dim=1), join(weights, dim=2) if weights else None
