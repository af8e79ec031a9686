# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend to the requests of continuous batching (`generate_batch`, `transformers serve --continuous-batching`).

Transformers packs the new tokens of all requests into one row, and keeps their keys and values in pages. Its attention
cores fill and read the pages, with one key per token. Here a layer does so itself, before its mechanism attends: pages
then hold base keys and values, as any other cache does, and every core and mask is that of `generate`. One class
serves `IHAForCausalLM` and interleaved decoders.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache

from .cache_edge import WINDOW_EDGE
from .cache_names import IS_FROM_5_24
from .overlay import Overlay
from .virtual_heads import virtual_heads_class
from .virtual_masks import CREATE_MASK, core_of, register_masks


class RequestBatch(NamedTuple):
    """Hold requests of equally many new tokens N as a batch, padded on the left as `generate` pads prompts."""

    tokens: torch.Tensor  # [requests, N], the places of the new tokens in the packed row
    keys: dict[str, torch.Tensor]  # [requests, keys] by layer type, their places among the keys of all requests
    masks: dict[str, Any]  # by layer type


class KeyLengths:
    """Tell a mask how many keys a layer sees, as a cache does."""

    layers = ()
    is_compileable = False

    def __init__(self, past: int, keys_of_layers: list[int]):
        self.past = past
        self.keys_of_layers = keys_of_layers

    def get_query_offset(self, layer_idx: int) -> int:
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        num_keys = self.keys_of_layers[layer_idx]
        return num_keys, self.past + query_length - num_keys


class PagedRequests:
    """Hold the requests of one forward, and fill and read their pages.

    Args:
        decoder: the model that holds the layers.
        cache: the pages.
        forward_kwargs: the other keyword arguments of the forward: `position_ids` [1, T] of the packed new tokens,
            `cu_seq_lens_q` [requests + 1] (start of each request, then T), `cu_seq_lens_k`, and the page indices.
    """

    def __init__(self, decoder: PreTrainedModel, cache: PagedAttentionCache, **forward_kwargs):
        self.cache = cache
        self.forward_kwargs = forward_kwargs
        self.attended = set[int]()  # the layers that have filled their pages
        config = paged_config(decoder)
        self.layer_types = config.layer_types
        # A placeholder that no layer reads: Transformers' mask functions return a mask of four dimensions unchanged,
        # and each batch of requests has masks of its own.
        self.attention_mask = torch.zeros(1, 1, 1, 1, dtype=decoder.dtype, device=decoder.device)
        positions = forward_kwargs["position_ids"][0]
        starts = forward_kwargs["cu_seq_lens_q"][:-1].long()
        lengths = forward_kwargs["cu_seq_lens_q"].diff()
        # A request that was forked from another and has no new token yet starts at T, one place past the end.
        past = positions[starts.clamp_max(len(positions) - 1)]
        counts = _key_counts(config, past, lengths, forward_kwargs["cu_seq_lens_k"])
        ends = {layer_type: count.cumsum(0) for layer_type, count in counts.items()}
        self.num_keys = {layer_type: int(end[-1]) for layer_type, end in ends.items()}
        # The packed row is not causal, so Transformers sets is_causal=False for this forward. Each request is causal.
        core = register_masks(core_of(config._attn_implementation))
        config = Overlay(config, is_causal=True, _attn_implementation=core)
        self.batches = []
        for length in lengths[lengths > 0].unique().tolist():
            same_length = lengths == length  # [requests]
            tokens = starts[same_length, None] + torch.arange(length, device=starts.device)
            keys = {}
            for layer_type in counts:
                keys[layer_type] = _last_indices(ends[layer_type][same_length], counts[layer_type][same_length])
            masks = self._masks(config, tokens, keys, past[same_length])
            self.batches.append(RequestBatch(tokens, keys, masks))
        self.order = torch.cat([batch.tokens.flatten() for batch in self.batches]).argsort()

    def _masks(self, config: Any, tokens: torch.Tensor, keys: dict, past: torch.Tensor) -> dict[str, Any]:
        """Return the mask of each layer type for requests of N tokens each, after `past` [requests] tokens."""
        longest = int(past.max())
        is_real = None
        if bool((past != longest).any()):
            places = torch.arange(longest + tokens.shape[1], device=past.device)
            is_real = places >= longest - past[:, None]
        cached = KeyLengths(longest, [keys[layer_type].shape[1] for layer_type in self.layer_types])
        embeds = self.attention_mask.new_empty(*tokens.shape, 0)
        masks = {}
        for layer_type in keys:
            index = self.layer_types.index(layer_type)
            masks[layer_type] = CREATE_MASK[layer_type](config, embeds, is_real, cached, layer_idx=index)
        return masks

    def attend(
        self,
        attend: Callable,
        layer_idx: int,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Return the output [1, T, ...] of `attend` for the row's queries, keys and values [1, heads, T, head_dim].

        Raise a RuntimeError if the pages keep too few tokens or too many."""
        cache = self.cache
        if "kwargs" in inspect.signature(cache.update).parameters:
            states = cache.update(key_states, value_states, layer_idx, dict(self.forward_kwargs))
        else:  # Transformers 5.17 takes the indices alone, and returns [keys, G, head_dim]
            indices = (self.forward_kwargs["read_index"], self.forward_kwargs["write_index"])
            states = cache.update(key_states, value_states, layer_idx, *indices)
            states = [pages.transpose(0, 1).unsqueeze(0) for pages in states]
        layer_type = self.layer_types[layer_idx]
        num_keys = states[0].shape[2]
        expected = self.num_keys[layer_type]
        if num_keys != expected:
            raise RuntimeError(
                f"The pages of layer {layer_idx} hold {num_keys} keys, and its requests need {expected}: "
                "this version of Transformers lays pages out in another way. Use generate, which takes batches too."
            )
        # The forward's arguments describe the packed row, and `attend` gets one batch.
        kwargs = {name: value for name, value in kwargs.items() if name not in self.forward_kwargs}
        outputs = []
        for batch in self.batches:
            keys, values = (_pick(pages, batch.keys[layer_type]) for pages in states)
            output, _ = attend(_pick(query_states, batch.tokens), keys, values, batch.masks[layer_type], **kwargs)
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs)[self.order].unsqueeze(0), None


def fill_pages(
    cache: PagedAttentionCache, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the pages for a model that uses Transformers' paged cores.

    Return the keys and values to pass to the core. New keys and values are [1, G, T, head_dim]. Modify `kwargs` in
    place. Up to Transformers 5.23 the core itself updates the pages, passed to it as `cache`."""
    if not IS_FROM_5_24:
        kwargs["cache"] = cache
        return key_states, value_states
    return cache.update(key_states, value_states, layer_idx, kwargs=kwargs)


def _key_counts(
    config: Any, past: torch.Tensor, lengths: torch.Tensor, key_starts: torch.Tensor | dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return how many keys each request reads, [requests] by layer type.

    `past` are the tokens before its `lengths` new ones. `key_starts` are Transformers' `cu_seq_lens_k`."""
    if not isinstance(key_starts, dict):
        key_starts = dict.fromkeys(config.layer_types, key_starts)
    counts = {}
    for layer_type in dict.fromkeys(config.layer_types):
        # For a window pages keep W cached tokens, because `init_requests` adds one to the W - 1 of the base model.
        kept = past.clamp(max=config.sliding_window) if layer_type == "sliding_attention" else past
        # A fork with a shared prompt has no new token, hence no position. Its number of cached keys comes from
        # `cu_seq_lens_k`.
        counts[layer_type] = (kept + lengths).where(lengths > 0, key_starts[layer_type].diff())
    return counts


def _last_indices(ends: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the `counts` indices before `ends`, padded on the left with the first of them."""
    longest = int(counts.max())
    places = ends[:, None] - longest + torch.arange(longest, device=ends.device)
    return torch.maximum(places, (ends - counts)[:, None])


def _pick(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return states [requests, heads, N, head_dim] of [1, heads, tokens, head_dim] at places [requests, N]."""
    return states[0].transpose(0, 1)[places].transpose(1, 2)


def paged_config(decoder: PreTrainedModel) -> Any:
    """Return the config of a decoder with the type of each layer's pages, and with their window in tokens.

    Layers with a window of `interleave_heads` keep that window, unless the base model has windows of its own. Raise a
    NotImplementedError for types of layers that have no pages."""
    config = decoder.config
    window = getattr(config, "sliding_window", None)
    only_type = "sliding_attention" if window else "full_attention"
    layer_types = list(getattr(config, "layer_types", None) or [only_type] * config.num_hidden_layers)
    without_pages = sorted(set(layer_types) - set(CREATE_MASK))
    if without_pages:
        raise NotImplementedError(
            f"Continuous batching has pages for full and sliding attention, and {config.model_type} has layers of "
            f"type {', '.join(without_pages)}. Use generate, which takes batches too."
        )
    given = getattr(config, "interleaved_window", None)
    if given and "sliding_attention" not in layer_types:
        window = given
        for module in decoder.modules():
            if virtual_heads_class(module) is not None:
                layer_types[module.layer_idx] = "sliding_attention"
    return Overlay(config, layer_types=layer_types, sliding_window=window)


def init_requests(
    init: Callable,
    model: PreTrainedModel,
    decoder: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: Any = None,
) -> Any:
    """Start continuous batching on the attention core that the model has.

    `init` is the unbound `GenerationMixin.init_continuous_batching`. Raise a ValueError for CUDA graphs and
    compilation, which need inputs of fixed shapes."""
    deprecated = getattr(generation_config or model.generation_config, "continuous_batching_config", None)
    batching = copy.copy(continuous_batching_config or deprecated or ContinuousBatchingConfig())
    compiles = batching.varlen_compile_config or batching.decode_compile_config or batching.default_compile_level > 0
    if any(batching.cuda_graph_booleans) or compiles:
        raise ValueError(
            "Continuous batching of this model runs without CUDA graphs and compilation: leave use_cuda_graph, "
            "varlen_compile_config, decode_compile_config and default_compile_level unset."
        )
    batching.use_cuda_graph = False
    batching.max_blocks_per_request = 0
    batching.auto_switch_to_flash = False
    config = paged_config(decoder)
    window = config.sliding_window
    if window:
        # For a window of W tokens pages keep W - 1 tokens before the new ones, and an "iha" layer reaches back W.
        window += WINDOW_EDGE
    config_of_pages = Overlay(config, sliding_window=window)
    # Transformers asks by name whether the core takes pages, and makes no masks for this name.
    paged: Any = Overlay(model, config=Overlay(model.config, _attn_implementation="paged|eager"))
    manager = init(paged, generation_config, batching, workload_hints)
    manager.model = model

    def create_batch_processor():
        manager.model = Overlay(model, config=Overlay(model.config, get_text_config=lambda: config_of_pages))
        try:
            return type(manager)._create_batch_processor(manager)
        finally:
            manager.model = model

    # Transformers builds the pages from the model's config and takes no other. This manager alone is changed, and only
    # while it builds them, so another copy of this code is not affected.
    manager._create_batch_processor = create_batch_processor
    return manager
