# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define kind "multi_token" (Golovneva et al. 2025, Multi-Token Attention, arXiv 2504.00927)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils.import_utils import is_tracing

from .cache_names import takes_cache
from .configuration_iha import IHAConfig
from .first_keys import FirstKeys
from .mixing import Mixing
from .score_matrix import HeadMap, ScoreMatrixAttention
from .virtual_masks import LOWEST, MASKED


class KeyQueryConvolution(Mixing):
    """Convolve the scores or weights of every head over c_q queries and c_k keys (Equations 5 and 6).

    The value of `weight` [H, 1, c_q, c_k] is theta, as `torch.nn.functional.conv2d` takes it: its last row is for the
    query itself, and its middle column for the key itself."""

    def __init__(self, num_heads: int, query_kernel: int, key_kernel: int):
        super().__init__()
        self.add_weight("weight", torch.empty(num_heads, 1, query_kernel, key_kernel))
        self.init_mechanism()

    def init_mechanism(self, config: IHAConfig | None = None):
        """Start at the kernel that changes nothing, so that the layer starts as multi-head attention."""
        kernel = torch.zeros(self.weight.shape[2:])
        kernel[-1, kernel.shape[1] // 2] = 1
        self.init_weight("weight", kernel)

    def forward(self, matrix: torch.Tensor, length: int, counts: torch.Tensor | None) -> torch.Tensor:
        """Return the last `length` rows of the convolution of a matrix [batch, H, rows, columns].

        The matrix is 0 where a query sees no key. `counts` is bool, [batch or 1, 1 or H, length, c_q]: entry
        [..., i, r] says whether row r of the kernel may read its row of scores for the convolved row i. It is `None`
        if all may."""
        heads, _, query_kernel, key_kernel = self.weight.shape
        kernel = self.value().to(matrix.dtype)
        read = nn.functional.pad(matrix, (0, 0, query_kernel - 1, 0))[:, :, matrix.shape[2] - length :]
        if counts is None:
            return nn.functional.conv2d(read, kernel, padding=(0, key_kernel // 2), groups=heads)
        # Apply one row of the kernel at a time, because which rows count depends on the row that is convolved.
        convolved = matrix.new_zeros(())
        for row in range(query_kernel):
            of_row = read[:, :, row : row + length], kernel[:, :, row, None]
            rows = nn.functional.conv2d(*of_row, padding=(0, key_kernel // 2), groups=heads)
            convolved = convolved + rows * counts[..., row, None]
        return convolved


class Sight(NamedTuple):
    """Hold what a block of queries sees, and how many rows its scores and weights have."""

    visible: torch.Tensor  # the keys that each query of the block sees, boolean [batch or 1, H or 1, rows, columns]
    counts: torch.Tensor | None  # see `KeyQueryConvolution.forward`
    score_rows: int  # the rows of scores to return: the block's, and those that its weights are convolved with
    weight_rows: int  # the rows of weights to return: the block's


class MultiTokenAttention(ScoreMatrixAttention):
    """Convolve scores and weights over neighbouring queries and keys, and mix heads: multi-token attention.

    The order is that of the authors' code: convolution, mixing, mask, softmax, convolution, mask, mixing, values, norm
    and gate. The paper has the convolution in every fourth layer (option `every`), and norm and gate in all layers.

    A convolution reads the rows of c_q - 1 earlier queries, each under its own mask. An earlier query's row counts as
    zeros for a query that does not see its token: padding or another document.

    A layer that convolves over queries caches the query of every token beside its key, H * head_dim more numbers. Any
    stock cache thus holds the queries, crops and reorders them."""

    mixing_modules = ("score_conv", "weight_conv", "score_mix", "weight_mix")
    score_conv: KeyQueryConvolution | None
    weight_conv: KeyQueryConvolution | None
    score_mix: HeadMap | None
    weight_mix: HeadMap | None

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        options = config.options_of("multi_token").in_layer(layer_idx)
        heads = config.num_attention_heads
        self.query_kernel = options.query_kernel if options.convolution else 1
        self.num_groups = heads // (options.head_group or heads)
        stages = (("score", "pre"), ("weight", "post"))
        for name, stage in stages:
            convolves, mixes = (where in ("both", stage) for where in (options.convolution, options.head_mixing))
            kernel = KeyQueryConvolution(heads, options.query_kernel, options.key_kernel) if convolves else None
            setattr(self, f"{name}_conv", kernel)
            setattr(self, f"{name}_mix", HeadMap(self.num_groups, heads // self.num_groups) if mixes else None)
        # The weights of the past queries need scores of still earlier queries.
        convolutions = [getattr(self, f"{name}_conv") for name, _ in stages]
        self.past_queries = (options.query_kernel - 1) * sum(conv is not None for conv in convolutions)
        self.caches_like_llama = self.past_queries == 0
        self.convolves = any(convolutions)
        self.head_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if options.head_norm else None
        self.head_gate = nn.Linear(self.head_dim, 1) if options.head_gate else None

    def check_holes(self, attention_mask: torch.Tensor | None):
        """Raise a ValueError for hidden tokens between visible ones, which a convolution would take for neighbours."""
        if attention_mask is None or attention_mask.ndim != 2 or attention_mask.is_meta or is_tracing(attention_mask):
            return
        real = attention_mask != 0
        begins = real & ~nn.functional.pad(real[:, :-1], (1, 0))  # where a run of visible tokens begins
        if (begins.sum(dim=1) > 1).any():
            raise ValueError(
                "attention_mask hides tokens between others, and kind 'multi_token' convolves over neighbouring "
                "tokens: leave these tokens out, and pad at the start or the end of a row."
            )

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        cache: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project as Llama does, with the queries beside the cached keys."""
        if cache is None or self.past_queries == 0:
            return super().project(hidden_states, position_embeddings, cache)
        query_states, key_states, value_states = super().project(hidden_states, position_embeddings, None)
        of_group = query_states.unflatten(1, (key_states.shape[1], -1)).transpose(2, 3).flatten(3)
        key_states = torch.cat((key_states, of_group), dim=-1)
        key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
        return query_states, key_states, value_states

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run as [`MultiHeadAttention.forward`] does, and pass on the column of the first new token among the keys."""
        first_column = 0
        if cache is not None and self.past_queries > 0:  # before the cache takes the new tokens
            _, first = cache.get_mask_sizes(hidden_states.shape[1], self.layer_idx)
            first_column = cache.get_query_offset(self.layer_idx) - first
        return super().forward(
            hidden_states, position_embeddings, attention_mask, cache, first_column=first_column, **kwargs
        )

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | FirstKeys | None,
        first_column: int | torch.Tensor = 0,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with the past queries in front; `first_column` is that of the first query among the keys."""
        key_states, cached = key_states.tensor_split((self.head_dim,), dim=-1)
        # Without a mask no token is hidden, so the convolution counts every row of scores.
        kwargs["all_rows_count"] = attention_mask is None
        length = query_states.shape[2]
        causal = attention_mask is None and length > 1
        # With a static cache `first_column` is a tensor. Rows before the first token see nothing.
        past_rows = min(self.past_queries, first_column) if isinstance(first_column, int) else self.past_queries
        if isinstance(attention_mask, FirstKeys) or causal or past_rows == 0:  # no token is cached
            return super().attend(query_states, key_states, value_states, attention_mask, **kwargs)
        places = torch.arange(past_rows, device=cached.device) + first_column - past_rows
        past = cached.index_select(2, places.clamp_min(0)).unflatten(3, (-1, self.head_dim))
        query_states = torch.cat((past.transpose(2, 3).flatten(1, 2), query_states), dim=2)
        mask: Any = attention_mask
        if mask is None:
            mask = torch.ones(1, 1, 1, key_states.shape[2], dtype=torch.bool, device=cached.device)
        # A past query sees what the first new one sees, up to itself.
        later = torch.arange(key_states.shape[2], device=cached.device) > places[:, None]
        hidden = False if mask.dtype == torch.bool else LOWEST[mask.dtype]
        past_mask = mask[..., :1, :].expand(*mask.shape[:-2], past_rows, -1)
        mask = torch.cat((past_mask.masked_fill(later, hidden), mask), dim=-2)
        kwargs |= {"first_row": past_rows, "first_column": first_column - past_rows}
        return super().attend(query_states, key_states, value_states, mask, **kwargs)

    def attend_block(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: Callable[[], torch.Tensor],
        rows: slice,
        columns: slice,
        first_column: int | torch.Tensor = 0,
        all_rows_count: bool = False,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = bias()
        visible = mask > MASKED
        counts = None
        if not all_rows_count:
            # Each row of scores is that of a token. Its kernel also reads the rows of the tokens before it.
            # With two past queries the first block of new ones has rows.start 2, and first_query is 0.
            first_query = rows.stop - query.shape[2]  # among all queries here, past ones included
            first_token = first_column + first_query - columns.start  # as a column of this block
            kernel_rows = torch.arange(1 - self.query_kernel, 1, device=query.device)
            tokens = torch.arange(query.shape[2], device=query.device)[:, None] + first_token + kernel_rows
            counts = visible.gather(-1, tokens.clamp_min(0).expand(*visible.shape[:2], -1, -1)) & (tokens >= 0)
            counts = counts | (kernel_rows == 0)  # a token's own row always counts
            # A GPU would wait for the answer.
            if counts.device.type == "cpu" and not is_tracing(counts) and counts.all():
                counts = None
        weight_rows = rows.stop - rows.start
        score_rows = weight_rows if self.weight_conv is None else weight_rows + self.query_kernel - 1
        kwargs["sight"] = Sight(visible, counts, score_rows, weight_rows)
        return super().attend_block(query, key, value, lambda: mask[..., -score_rows:, :], rows, columns, **kwargs)

    def compose(
        self,
        matrix: torch.Tensor,
        convolution: KeyQueryConvolution | None,
        mixing: HeadMap | None,
        length: int,
        visible: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Convolve and mix scores or weights [batch, H, rows, columns].

        Return the last `length` rows, or all if there are fewer. `visible` and `counts` say in all rows of the block
        which keys a query sees and which rows count for it."""
        if convolution is not None:
            sees = visible[..., -length:, :]
            if counts is not None:
                counts = counts[..., -length:, :]
            matrix = matrix.masked_fill(~visible[..., -matrix.shape[2] :, :], 0)
            matrix = convolution(matrix, sees.shape[2], counts).masked_fill(~sees, 0)
        return matrix if mixing is None else mixing(matrix.unflatten(1, (self.num_groups, -1))).flatten(1, 2)

    def compose_scores(
        self, scores: torch.Tensor, rows: slice, columns: slice, sight: Sight, **kwargs
    ) -> torch.Tensor:
        return self.compose(scores, self.score_conv, self.score_mix, sight.score_rows, sight.visible, sight.counts)

    def compose_weights(
        self, weights: torch.Tensor, rows: slice, columns: slice, sight: Sight, **kwargs
    ) -> torch.Tensor:
        return self.compose(weights, self.weight_conv, self.weight_mix, sight.weight_rows, sight.visible, sight.counts)

    def combine_heads(self, attn_output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.head_norm is not None:
            attn_output = self.head_norm(attn_output)
        return attn_output if self.head_gate is None else attn_output * torch.sigmoid(self.head_gate(attn_output))
