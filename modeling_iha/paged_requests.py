# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend to the requests of continuous batching (`generate_batch`, `transformers serve --continuous-batching`).

Transformers packs the new tokens of all requests into one row, and keeps their keys and values in pages. Its attention
cores fill and read the pages, with one key per token. Here a layer does so itself, before its mechanism attends: pages
then hold base keys and values, as any other cache does, and every core and mask is that of `generate`.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig

from .interleaving import Overlay
from .masks import create_masks


class RequestBatch(NamedTuple):
    """Hold requests of equally many new tokens N as a batch, padded on the left as `generate` pads prompts."""

    tokens: torch.Tensor  # [rows, N], the places of the new tokens in the packed row
    keys: dict[str, torch.Tensor]  # [rows, keys] by layer type, their places among the keys of all requests
    masks: dict[str, Any]  # by layer type


class KeyLengths:
    """Tell a mask how many keys a layer sees, as a cache does."""

    layers = ()
    is_compileable = False

    def __init__(self, past: int, keys_of_layers: list[int]):
        self.past, self.keys_of_layers = past, keys_of_layers

    def get_query_offset(self, layer_idx: int) -> int:
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        num_keys = self.keys_of_layers[layer_idx]
        return num_keys, self.past + query_length - num_keys


class PagedRequests:
    """Hold the requests of one forward, and stand where the cache of a model stands.

    Args:
        model: the `IHAModel`.
        inputs_embeds: [1, T, hidden_size], the T new tokens of all requests, one request after another.
        position_ids: [1, T], each request's own positions.
        cu_seq_lens_q: int [requests + 1], where requests begin in the row, and T.
        cache: the `PagedAttentionCache` of Transformers.
        kwargs: what else Transformers gives to the forward, such as indices into the pages.
    """

    def __init__(
        self,
        model: Any,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seq_lens_q: torch.Tensor,
        cache: Any,
        **kwargs,
    ):
        self.cache, self.kwargs, self.layer_types = cache, kwargs, model.config.layer_types
        # Transformers 5.17 takes the indices alone, and returns [keys, G, head_dim].
        self.takes_indices = "kwargs" not in inspect.signature(cache.update).parameters
        starts, lengths = cu_seq_lens_q[:-1].long(), cu_seq_lens_q.diff()
        past = position_ids[0, starts.clamp_max(position_ids.shape[1] - 1)]
        # The cached tokens that pages keep for each request, by layer type. A window's keep W: see `keep_page_edge`.
        kept = dict.fromkeys(self.layer_types, past)
        if "sliding_attention" in kept:
            kept["sliding_attention"] = past.clamp(max=model.config.sliding_window)
        # A fork whose prompt is in shared pages has no new token: no position tells its past, and `read` does.
        read = kwargs["cu_seq_lens_k"]
        read = read if isinstance(read, dict) else dict.fromkeys(kept, read)
        counts = {name: (kept[name] + lengths).where(lengths > 0, read[name].diff()) for name in kept}
        ends = {name: count.cumsum(0) for name, count in counts.items()}
        self.num_keys = {name: int(end[-1]) for name, end in ends.items()}
        # The row as a whole is not causal, so Transformers says is_causal=False for the time of the forward.
        config: Any = Overlay(model.config, is_causal=True)
        self.batches = []
        for length in lengths[lengths > 0].unique().tolist():
            rows = lengths == length
            tokens = starts[rows, None] + torch.arange(length, device=starts.device)
            keys = {name: _places(ends[name][rows], counts[name][rows]) for name in kept}
            longest, padding = int(past[rows].max()), None
            if bool((past[rows] != longest).any()):
                padding = torch.arange(longest + length, device=starts.device) >= longest - past[rows, None]
            cached: Any = KeyLengths(longest, [keys[layer_type].shape[1] for layer_type in self.layer_types])
            embeds = inputs_embeds.new_empty(*tokens.shape, 0)
            masks = create_masks(config, embeds, padding, cached, None)
            self.batches.append(RequestBatch(tokens, keys, masks))
        self.order = torch.cat([batch.tokens.flatten() for batch in self.batches]).argsort()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values [1, G, T, head_dim] to the pages, and return those of all requests.

        They are [1, G, keys, head_dim]. Raise a RuntimeError if the pages keep too few tokens or too many."""
        if self.takes_indices:
            indices = {name: self.kwargs[name] for name in ("read_index", "write_index")}
            states = self.cache.update(key_states, value_states, layer_idx, **indices)
            states = [pages.transpose(0, 1).unsqueeze(0) for pages in states]
        else:
            states = self.cache.update(key_states, value_states, layer_idx, dict(self.kwargs))
        expected = self.num_keys[self.layer_types[layer_idx]]
        if states[0].shape[2] != expected:
            raise RuntimeError(
                f"The pages of layer {layer_idx} hold {states[0].shape[2]} keys, and its requests need {expected}: "
                "this version of Transformers lays pages out in another way. Use generate, which takes batches too."
            )
        return states[0], states[1]

    def attend(
        self,
        attend: Callable,
        layer_idx: int,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: None = None,
        sliding_window: int | None = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        **packed,
    ) -> tuple[torch.Tensor, None]:
        """Return the output [1, T, ...] of `attend` for queries [1, H, T, head_dim].

        Keys and values are those that `update` returned. `packed` describes the row as a whole and is left out."""
        layer_type, outputs = self.layer_types[layer_idx], []
        for batch in self.batches:
            keys = batch.keys[layer_type]
            states = (_pick(query_states, batch.tokens), _pick(key_states, keys), _pick(value_states, keys))
            output, _ = attend(*states, batch.masks[layer_type], sliding_window=sliding_window, rotation=rotation)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs)[self.order].unsqueeze(0), None


def _places(ends: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return [rows, longest], the last `counts` places before `ends` [rows]; padding repeats a row's first place."""
    longest = int(counts.max())
    places = ends[:, None] - longest + torch.arange(longest, device=ends.device)
    return torch.maximum(places, (ends - counts)[:, None])


def _pick(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return [rows, heads, N, head_dim] of [1, heads, tokens, head_dim] at places [rows, N]."""
    return states[0].transpose(0, 1)[places].transpose(1, 2)


def requests_config(config: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
    """Return the config without what needs Transformers' own paged attention.

    Raise a ValueError for CUDA graphs and compilation, which need inputs of fixed shapes."""
    compiles = config.varlen_compile_config or config.decode_compile_config or config.default_compile_level > 0
    if any(config.cuda_graph_booleans) or compiles:
        raise ValueError(
            "Continuous batching of this model runs without CUDA graphs and compilation: leave use_cuda_graph, "
            "varlen_compile_config, decode_compile_config and default_compile_level unset."
        )
    config = copy.copy(config)
    config.use_cuda_graph, config.max_blocks_per_request, config.auto_switch_to_flash = False, 0, False
    return config


def keep_page_edge(manager: Any) -> None:
    """Make the pages of sliding layers keep one more token, as `keep_window_edge` does for other caches.

    They keep W - 1 tokens before the new ones, and an "iha" layer reaches back W tokens."""

    def create_batch_processor():
        model = manager.model
        config = copy.copy(model.config)
        if config.sliding_window is not None:
            config.sliding_window += 1
        manager.model = Overlay(model, config=config)
        try:
            return type(manager)._create_batch_processor(manager)
        finally:
            manager.model = model

    manager._create_batch_processor = create_batch_processor
