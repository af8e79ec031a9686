# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define multi-head attention, kind "mha": Llama's with QK-norm and a window. It is the base of the other kinds.

interleaving.py lists the symbols of shapes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, apply_rotary_pos_emb

from .cache_names import takes_cache
from .configuration_iha import IHAConfig
from .cpu_precision import in_product_dtype, product_dtype
from .paged_requests import PagedRequests, fill_pages
from .virtual_core import virtual_attention


# The attention functions of vLLM and SGLang, which replace a layer's keys and values by those of their own cache.
SERVER_CORES = ("vllm", "vllm_mla", "sglang")


class MultiHeadAttention(LlamaAttention):
    """Attend as Llama does, in steps that the other kinds share.

    The steps of `forward` are `project`, `attend`, `combine_heads` and the output projection. A core is an attention
    function of Transformers, by its name in `attn_implementation`, such as "sdpa"."""

    # Submodules that mix heads. Adapters train them in full (PEFT's `modules_to_save`).
    mixing_modules: tuple[str, ...] = ()
    rope_table = "token"  # which table of `IHARotaryEmbedding.tables` rotates the queries and keys
    caches_like_llama = True  # whether cached keys and values are [batch, G, N, head_dim]
    convolves = False  # whether a token's neighbours in the row change its scores
    gives_weights = True  # whether `attend` can return attention weights
    attends_on_stock_core = True  # whether `attend` calls `virtual_attention`, which reads every kind of mask

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.layer_type = config.layer_types[layer_idx]
        self.use_rope = config.no_rope_layers[layer_idx] == 1
        self.attention_dropout = config.attention_dropout or 0.0  # a configuration may hold `None`
        if config.use_qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.check_core()

    @property
    def sliding_window(self) -> int | None:
        """Return the window in tokens, or `None`. It is read at each call, because the masks read it then too."""
        return self.config.sliding_window if self.layer_type == "sliding_attention" else None

    def check_core(self):
        """Raise a ValueError for a core that would compute something other than this layer."""
        core = self.config._attn_implementation
        kind = self.config.attention_kinds[self.layer_idx]
        if core in SERVER_CORES and (kind != "mha" or self.sliding_window is not None):
            raise ValueError(
                f"attn_implementation={core!r} knows full-attention layers of kind 'mha' only, and layer "
                f"{self.layer_idx} is a {self.layer_type} layer of kind {kind!r}: serve it by vLLM with the plugin "
                "vllm_iha, or use generate or generate_batch of Transformers."
            )

    @classmethod
    def for_layer(cls, config: IHAConfig, layer_idx: int) -> "MultiHeadAttention":
        """Build the attention module of a layer of this kind."""
        return cls(config, layer_idx)

    def project_value(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return values [batch, N, G * head_dim] of hidden states [batch, N, hidden_size]."""
        return self.v_proj(hidden_states)

    def map_heads(self, query_states: torch.Tensor, key_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys [batch, N, heads, head_dim] unchanged.

        Kinds that map heads before QK-norm and RoPE override this."""
        return query_states, key_states

    def rotate(
        self, query_states: torch.Tensor, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries [batch, H, N, head_dim] and keys [batch, G, N, head_dim] by RoPE [batch, N, head_dim]."""
        return apply_rotary_pos_emb(query_states, key_states, cos, sin)

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        cache: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [batch, H, N, head_dim] of the new tokens, and keys and values of all tokens.

        Hidden states are [batch, N, hidden_size], values and (rotated) keys [batch, G, cached + N, head_dim]."""
        hidden_shape = (*hidden_states.shape[:-1], -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape)
        key_states = self.k_proj(hidden_states).view(hidden_shape)
        query_states, key_states = self.map_heads(query_states, key_states)
        value_states = self.project_value(hidden_states).view(hidden_shape).transpose(1, 2)
        if self.config.use_qk_norm:
            query_states = self.q_norm(query_states)
            key_states = self.k_norm(key_states)
        query_states = query_states.transpose(1, 2)
        key_states = key_states.transpose(1, 2)

        if self.use_rope:
            query_states, key_states = self.rotate(query_states, key_states, *position_embeddings[self.rope_table])

        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
        return query_states, key_states, value_states

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: Any,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute causal attention on the core of `config._attn_implementation` (see `virtual_attention`).

        Return the output [batch, N, H, head_dim] and, where the core gives them, the weights: [batch, H, N, K], or
        over virtual tokens [batch, H, N * P, K * P] (H / P heads if they are paired). `kwargs` are passed to the core:
        `sliding_window`, and arguments that only some kinds or cores use."""
        return virtual_attention(
            self.config._attn_implementation or "eager",
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            # Only the path of one new token reads this. Several queries were converted before
            # (`attend_in_product_dtype`).
            product_dtype=product_dtype(value_states),
            **kwargs,
        )

    def attend_in_product_dtype(self, query_states: torch.Tensor, *args, **kwargs):
        """Call `attend` with states in the dtype whose products are fast."""
        # A conversion here would copy all cached keys. A product with one row is fast in every dtype, and the path of
        # one new token, whose products have more rows, converts a slice of the cache at a time (new_token.py).
        if query_states.shape[2] == 1:
            return self.attend(query_states, *args, **kwargs)
        return in_product_dtype(self.attend)(query_states, *args, **kwargs)

    def combine_heads(self, attn_output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output of `attend` [batch, N, H, head_dim] unchanged.

        Kinds that gate or combine heads override this."""
        return attn_output

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | PagedAttentionCache | None = None,
        paged_requests: PagedRequests | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run as Llama's attention does, with tables of `IHARotaryEmbedding` and a mask of `create_masks`.

        In continuous batching `paged_requests` holds the requests and their pages. If all layers are full-attention
        "mha" layers (`IHAModel.runs_on_paged_cores`), it is `None`, `cache` holds the pages, and Transformers' paged
        cores run."""
        self.check_core()  # again, because `set_attn_implementation` may have changed the core
        pages = cache if isinstance(cache, PagedAttentionCache) else None
        token_cache = cache if pages is None else None
        query_states, key_states, value_states = self.project(hidden_states, position_embeddings, token_cache)
        if pages is not None:
            # This also changes `kwargs`, which the core below gets.
            key_states, value_states = fill_pages(pages, key_states, value_states, self.layer_idx, kwargs)
        attend: Callable = self.attend_in_product_dtype
        if paged_requests is not None:
            attend = partial(paged_requests.attend, attend, self.layer_idx)
        attn_output, attn_weights = attend(
            query_states,
            key_states,
            value_states,
            attention_mask,
            sliding_window=self.sliding_window,
            # T_p, if some "iha" layer has interleaved positions. Layers without mixing ignore it.
            rotation=position_embeddings.get("pseudo_head") if self.use_rope else None,
            **kwargs,
        )
        attn_output = self.combine_heads(attn_output, hidden_states)
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.o_proj(attn_output), attn_weights
