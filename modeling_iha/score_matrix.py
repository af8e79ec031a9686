# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the base of attention kinds that change scores or weights between query and key.

No stock core exposes them."""

from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import repeat_kv
from transformers.utils.import_utils import is_tracing

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig
from .mixing import Mixing


# Queries in a block. Only the scores of one block, [batch, H, BLOCK, keys], exist at a time.
BLOCK = 128
# Additive masks hide a key by this much or more: by the lowest value of their dtype, or by -10000 in bfloat16.
MASKED = -9984.0


def block_bias(
    mask: torch.Tensor | None, rows: slice, columns: slice, offset: int, device: torch.device
) -> torch.Tensor:
    """Return the float32 mask [batch or 1, 1 or H, rows, columns] to add to a block of scores, 0 for a visible key.

    Args:
        mask: boolean or additive [batch or 1, 1 or H, N, keys], or `None` for causal attention.
        offset: position of the first query among the keys; ignored with a mask.
    """
    lowest = torch.finfo(torch.float32).min
    if mask is not None:
        block = mask[..., rows, columns]
        if block.dtype != torch.bool:
            return block.float().clamp_min(lowest)  # the lowest float64 would be -inf, and a row of them NaN
        return torch.zeros_like(block, dtype=torch.float32).masked_fill(~block, lowest)
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] + offset
    j = torch.arange(columns.start, columns.stop, device=device)
    visible = (j <= i)[None, None]
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, lowest)


def query_blocks(query: torch.Tensor, size: int) -> list[slice]:
    """Return the rows of each block of `size` queries of [batch, H, N, any].

    Under tracing one block takes all queries: a traced loop is unrolled and recompiled for every length."""
    length = query.shape[2]
    if is_tracing(query):
        return [slice(0, length)]
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def query_offset(length: int, num_keys: int) -> int:
    """Return the position of the first of `length` queries among the keys, for attention without a mask.

    Without a mask there are two cases: one new token, which sees every key, or a whole input without cached keys."""
    return num_keys - 1 if length == 1 else 0


def block_columns(mask: torch.Tensor | None, rows: slice, window: int | None, length: int, num_keys: int) -> slice:
    """Return the keys that any query of a block may see, of those in a window of `window` keys.

    These are all keys with cached ones, of which a static cache has more than there are tokens, and without a window
    under a mask, because a user's mask may show later tokens."""
    if length != num_keys or (mask is not None and window is None):
        return slice(0, num_keys)
    return slice(0 if window is None else max(0, rows.start - window + 1), rows.stop)


def most_columns(num_rows: int, window: int | None, length: int, num_keys: int) -> int:
    """Return the most keys that `block_columns` gives a block of at most `num_rows` queries."""
    return num_keys if window is None or length != num_keys else min(num_keys, window + num_rows)


def recomputed(function: Callable, num_blocks: int, *args, **kwargs):
    """Return `function(*args, **kwargs)`.

    With several blocks no intermediate result is kept, and the backward pass computes each block again."""
    if torch.is_grad_enabled() and num_blocks > 1:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return function(*args, **kwargs)


def over_all_keys(weights: torch.Tensor, columns: slice, num_keys: int) -> torch.Tensor:
    """Return the weights of a block over all keys. Those that no query of the block sees have none.

    A block of all keys is returned as it is: a caller may ask for its gradient."""
    hidden = (columns.start, num_keys - columns.stop)
    return pad(weights, hidden) if any(hidden) else weights


def join(blocks: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Join the blocks in one tensor. Return a single block as it is: a caller may ask for its gradient."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=dim)


class HeadMap(Mixing):
    """Map scores or weights linearly across the heads of each group.

    The value of `weight` [groups, M, M] holds in [g, m, n] the share of the group's head m in its head n after the
    map."""

    def __init__(self, num_groups: int, group_size: int, scale: float = 1.0):
        super().__init__(scale)
        self.add_weight("weight", torch.eye(group_size).repeat(num_groups, 1, 1))

    def init_mechanism(self, config: IHAConfig):
        """Start at the identity."""
        self.init_weight("weight", torch.eye(self.weight.shape[-1]))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return scores or weights [batch, groups, M, rows, columns] after the map."""
        return torch.einsum("bgmij,gmn->bgnij", matrix, self.value().to(matrix.dtype))


class ScoreMatrixAttention(MultiHeadAttention):
    """Attend in blocks of queries, where a kind may change scores before and weights after the softmax.

    The backward pass recomputes each block, so scores are never kept for all queries, except inside `torch.compile`.
    Masks are those of SDPA or the eager core. A flash core or FlexAttention never builds the scores and is rejected.
    """

    @property
    def core(self) -> str:
        core = self.config._attn_implementation or "eager"
        if core not in ("eager", "sdpa"):
            raise ValueError(
                f"Attention kind {self.config.attention_kinds[self.layer_idx]!r} changes the scores, which "
                f"attn_implementation={core!r} never builds: use 'sdpa' or 'eager'."
            )
        return core

    def compose_scores(self, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        """Return the scores [batch, H, rows, columns] before mask and softmax, changed as the kind requires."""
        return scores

    def compose_weights(self, weights: torch.Tensor, **kwargs) -> torch.Tensor:
        """Return the weights [batch, H, rows, columns] after the softmax, changed as the kind requires."""
        return weights

    def raw_scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the scaled scores [batch, H, rows, columns] of queries and keys.

        Queries are [batch, H, rows, any], and keys are [batch, G, columns, any]."""
        return torch.matmul(query, repeat_kv(key, self.num_key_value_groups).transpose(2, 3)) * self.scaling

    def normalize_scores(self, scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return weights [batch, H, rows, columns] of the scores under the additive float32 mask of `block_bias`."""
        return torch.softmax(scores.float() + bias, dim=-1).to(scores.dtype)

    def attend_block(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: tuple, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output [batch, rows, H, head_dim] and weights [batch, H, rows, columns] of a block of queries.

        `mask` holds the arguments of `block_bias`. It is called here, so that the backward pass keeps no mask."""
        scores = self.compose_scores(self.raw_scores(query, key), **kwargs)
        weights = self.normalize_scores(scores, block_bias(*mask))
        weights = self.compose_weights(weights, **kwargs)
        weights = torch.nn.functional.dropout(weights, p=self.attention_dropout, training=self.training)
        output = torch.matmul(weights, repeat_kv(value, self.num_key_value_groups))
        return output.transpose(1, 2), weights

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        length = query_states.shape[2]
        num_keys = key_states.shape[2]
        offset = query_offset(length, num_keys)

        blocks = query_blocks(query_states, BLOCK)
        outputs = []
        weights = []
        for rows in blocks:
            columns = block_columns(attention_mask, rows, self.sliding_window, length, num_keys)
            states = (query_states[:, :, rows], key_states[:, :, columns], value_states[:, :, columns])
            mask = (attention_mask, rows, columns, offset, query_states.device)
            output, block_weights = recomputed(self.attend_block, len(blocks), *states, mask, **kwargs)
            outputs.append(output)
            if self.core == "eager":
                weights.append(over_all_keys(block_weights, columns, num_keys))
        return join(outputs, dim=1), join(weights, dim=2) if weights else None
