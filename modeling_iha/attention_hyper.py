"""HyperAttention, kind "hyper" (A Theoretical Study of (Hyper) Self-Attention, Sections 6 and G)."""

from functools import reduce

import torch
from torch import nn
from transformers.models.llama.modeling_llama import repeat_kv

from .configuration_iha import IHAConfig
from .score_matrix import (
    HIDDEN,
    ScoreMatrixAttention,
    block_bias,
    block_columns,
    join,
    query_blocks,
    query_offset,
    recomputed,
)


# Queries to a block at most, and scores to a block: 64 MiB of float32, kept for one block at a time.
BLOCK = 32
MAX_SCORES = 2**24
# Tokens whose running sums, [batch, keys, CHUNK, head_dim, head_dim], exist at a time in the linear form.
CHUNK = 32


def block_size(size: int, scores: int) -> int:
    """Queries to a block: `size`, or as few as keep to MAX_SCORES where each query has so many scores."""
    return max(1, min(size, MAX_SCORES // max(1, scores)))


def nearest(bias: torch.Tensor, window: int | None) -> torch.Tensor:
    """The additive mask [..., rows, columns], with all but the last `window` visible columns of each row hidden."""
    if window is None:
        return bias
    rank = (bias > HIDDEN).flip(-1).cumsum(-1).flip(-1)
    return bias.masked_fill(rank > window, torch.finfo(bias.dtype).min)


def linear_step(
    state: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens of linear HyperAttention, given all before them as a state of constant size (Section G.3, equation 43).

    Args:
        state: [batch, heads, n - 1, head_dim, head_dim], the sums of k_a v_a^T over the tokens so far; zeros at the start. For
            precision over long inputs it is float32 or float64.
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
    """As `linear_step` from the start, for queries [batch, heads, rows, head_dim] of which each sees keys of its own: `visible`
    is bool, [batch or 1, 1 or heads, rows, keys]. The state stays as it is."""
    keys = keys.to(state.dtype).unsqueeze(3) * visible[:, :, None, :, :, None]
    sums = torch.matmul(keys.transpose(-1, -2), values.to(state.dtype).unsqueeze(3))
    return contract(query, sums), state


def contract(query: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """O[i, t] = sum_c q[i, c] prod_a sums_a[i, c, t], [batch, heads, N, head_dim], of sums
    [batch, heads, n - 1, N, head_dim, head_dim]."""
    sums = reduce(torch.mul, sums.unbind(2))
    return torch.matmul(query.to(sums.dtype).unsqueeze(-2), sums).squeeze(-2).to(query.dtype)


class HyperAttention(ScoreMatrixAttention):
    """Attention from a token to tuples of n - 1 tokens, n being the order (Definitions G.1 and G.3).

    Order 3, pairs (j, k): S[i, j, k] = sum_c q[i, c] k1[j, c] k2[k, c] / sqrt(head_dim), a softmax over all pairs with
    i >= j >= k (with `strict_order` j > k, which leaves the first token no pair: its output is 0), and the output
    sum_jk A[i, j, k] v1[j] * v2[k]. With `sharing` k1 = k2 and v1 = v2, and the parameters are Llama's; without, `k_proj` and
    `v_proj` stack the heads of all n - 1 keys and values, and so does the cache.

    `windows` [w1, w2] let j and k reach back w1 and w2 tokens, the current one included; by default both span the layer's
    `sliding_window`. Scores exist for a block of queries at a time, O(w1 w2) for each, and are recomputed in the backward; inside
    `torch.compile` for all queries at once.

    With `linear`, of any order, the scores are the weights and tuples are not ordered: the sums over j and k are then separate
    running sums, O(N head_dim^2) in all (Section G.3). Under a mask matrix (padding, packing, a chunk that continues a cache)
    every query sums what it sees, O(N^2 head_dim^2).

    The papers leave positions open: RoPE rotates the query and every key as in the other kinds. A product of three vectors is not
    invariant under a common rotation, as a dot product is, so scores depend on positions, not only on distances.

    The attention weights that are returned are the shares of j, summed over k, [batch, H, N, keys]; the linear form has none.
    """

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        options = config.options_of(config.attention_kinds[layer_idx])
        self.num_keys = options["order"] - 1
        self.sharing, self.linear, self.strict_order = options["sharing"], options["linear"], options["strict_order"]
        self.windows = options["windows"] or [self.sliding_window] * 2
        self.caches_like_llama = self.sharing
        if not self.sharing:
            stacked = self.num_keys * config.num_key_value_heads * self.head_dim
            self.k_proj = nn.Linear(config.hidden_size, stacked, bias=config.attention_bias)
            self.v_proj = nn.Linear(config.hidden_size, stacked, bias=config.attention_bias)

    def order_mask(self, j: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Which pairs of positions j and k, which broadcast, are attended to."""
        return j > k if self.strict_order else j >= k

    def split_keys(self, states: torch.Tensor) -> torch.Tensor:
        """Stacked heads [batch, (n - 1) G, N, head_dim] as one per query head, [batch, H, n - 1, N, head_dim]."""
        stack = [states] * self.num_keys if self.sharing else states.chunk(self.num_keys, dim=1)
        return torch.stack([repeat_kv(heads, self.num_key_value_groups) for heads in stack], dim=2)

    def attend_block(
        self,
        query: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        values: tuple[torch.Tensor, torch.Tensor],
        biases: tuple[torch.Tensor, torch.Tensor],
        pairs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [batch, rows, H, head_dim] and weights of j [batch, H, rows, columns of j] of a block of queries
        [batch, H, rows, head_dim].

        Args:
            keys, values: two each, [batch, H, columns of j, head_dim] and [batch, H, columns of k, head_dim].
            biases: additive masks, [batch or 1, 1 or H, rows, columns of j] and [..., columns of k].
            pairs: bool [columns of j, columns of k], True for a pair to attend to.
        """
        (key1, key2), (value1, value2) = keys, values
        bias = biases[0].unsqueeze(-1) + biases[1].unsqueeze(-2)
        bias = bias.clamp_min(torch.finfo(bias.dtype).min).masked_fill(~pairs, torch.finfo(bias.dtype).min)

        query_key1 = query.unsqueeze(3) * key1.unsqueeze(2)  # [batch, H, rows, columns of j, head_dim]
        scores = torch.matmul(query_key1, key2.unsqueeze(2).transpose(-1, -2)) * self.scaling
        weights = torch.softmax((scores.float() + bias).flatten(-2), dim=-1).view(scores.shape)
        # A query without any pair, such as padding, has weights all the same.
        weights = weights.masked_fill(bias <= HIDDEN, 0).to(query.dtype)
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
        self.check_core()
        keys, values = self.split_keys(key_states), self.split_keys(value_states)
        if self.linear:
            return self.attend_linear(query_states, keys, values, attention_mask), None
        (batch, heads, length, head_dim), num_keys = query_states.shape, key_states.shape[2]
        offset = query_offset(length, num_keys)
        reach = [num_keys if window is None else min(num_keys, window + BLOCK) for window in self.windows]
        scores = batch * heads * reach[0] * max(reach[1], head_dim)
        blocks = query_blocks(query_states, block_size(BLOCK, scores))

        outputs, weights = [], []
        for rows in blocks:
            columns = [block_columns(attention_mask, rows, offset, window, num_keys) for window in self.windows]
            biases = [
                nearest(block_bias(attention_mask, rows, span, offset, None, query_states), window)
                for span, window in zip(columns, self.windows)
            ]
            j, k = (torch.arange(span.start, span.stop, device=query_states.device) for span in columns)
            arguments = (
                query_states[:, :, rows],
                tuple(keys[:, :, a, span] for a, span in enumerate(columns)),
                tuple(values[:, :, a, span] for a, span in enumerate(columns)),
                tuple(biases),
                self.order_mask(j[:, None], k),
            )
            output, of_block = recomputed(self.attend_block, len(blocks), *arguments)
            outputs.append(output)
            if self.config._attn_implementation == "eager":
                weights.append(of_block)
        return join(outputs, dim=1), join(weights, dim=2) if weights else None

    def attend_linear(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Output [batch, N, H, head_dim] of the linear form for keys and values [batch, H, n - 1, keys, head_dim]."""
        query = query * self.scaling
        (batch, heads, stack, num_keys, head_dim), length = keys.shape, query.shape[2]
        # See `query_offset`: only an input without cached keys and without a mask is one running sum.
        running = attention_mask is None and length > 1
        state = query.new_zeros(
            (batch, heads, stack, head_dim, head_dim), dtype=torch.promote_types(query.dtype, torch.float32)
        )
        scores = 0 if running else batch * heads * stack * num_keys * head_dim
        blocks = query_blocks(query, block_size(CHUNK, scores))
        outputs = []
        for rows in blocks:
            if running:
                step, arguments = linear_step, (state, query[:, :, rows], keys[:, :, :, rows], values[:, :, :, rows])
            else:
                bias = block_bias(attention_mask, rows, slice(0, num_keys), num_keys - 1, None, query)
                step, arguments = masked_step, (state, query[:, :, rows], keys, values, bias > HIDDEN)
            output, state = recomputed(step, len(blocks), *arguments)
            outputs.append(output)
        return join(outputs, dim=2).transpose(1, 2)
