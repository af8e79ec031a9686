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
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation import GenerationConfig

from .interleaving import Overlay
from .virtual_core import CREATE_MASK, core_of, register_masks


# What describes the packed row as a whole.
OF_THE_ROW = ("cache", "position_ids", "is_causal", "read_index", "write_index", "block_table", "logits_indices")
OF_THE_ROW += ("logits_processor_args", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

# The tokens that pages keep more than they would. They keep W - 1 tokens before the new ones for a window of W tokens,
# and an "iha" layer reaches back W tokens (see `keep_window_edge`).
WINDOW_EDGE = 1


class RequestBatch(NamedTuple):
    """Hold requests of equally many new tokens N as a batch, padded on the left as `generate` pads prompts."""

    tokens: torch.Tensor | int  # [rows, N], the places of the new tokens in the packed row; see `_or_rows`
    keys: dict[str, torch.Tensor | int]  # [rows, keys] by layer type, their places among the keys of all requests
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
    """Hold the requests of one forward, and fill and read their pages.

    Args:
        decoder: the model that holds the layers.
        position_ids: [1, T], each request's own positions of the T new tokens, one request after another.
        cu_seq_lens_q: int [requests + 1], where requests begin in the row, and T.
        cache: the `PagedAttentionCache` of Transformers.
        kwargs: what else Transformers gives to the forward, such as indices into the pages.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        position_ids: torch.Tensor,
        cu_seq_lens_q: torch.Tensor,
        cache: Any,
        **kwargs,
    ):
        config = paged_config(decoder)
        self.cache, self.kwargs, self.layer_types = cache, kwargs, config.layer_types
        # Transformers makes no mask beside one of four dimensions. Each batch of requests has its own.
        self.attention_mask = torch.zeros(1, 1, 1, 1, dtype=decoder.dtype, device=position_ids.device)
        # Transformers 5.17 takes the indices alone, and returns [keys, G, head_dim].
        self.takes_indices = "kwargs" not in inspect.signature(cache.update).parameters
        starts, lengths = cu_seq_lens_q[:-1].long(), cu_seq_lens_q.diff()
        past = position_ids[0, starts.clamp_max(position_ids.shape[1] - 1)]
        # The cached tokens that pages keep for each request, by layer type. A window's keep W: see `init_requests`.
        kept = dict.fromkeys(self.layer_types, past)
        if "sliding_attention" in kept:
            kept["sliding_attention"] = past.clamp(max=config.sliding_window)
        # A fork whose prompt is in shared pages has no new token: no position tells its past, and `read` does.
        read = kwargs["cu_seq_lens_k"]
        read = read if isinstance(read, dict) else dict.fromkeys(kept, read)
        counts = {name: (kept[name] + lengths).where(lengths > 0, read[name].diff()) for name in kept}
        ends = {name: count.cumsum(0) for name, count in counts.items()}
        self.num_keys = {name: int(end[-1]) for name, end in ends.items()}
        # The row as a whole is not causal, so Transformers says is_causal=False for the time of the forward.
        name_of_core = register_masks(core_of(config._attn_implementation))
        config = Overlay(config, is_causal=True, _attn_implementation=name_of_core)
        self.batches, order = [], []
        for length in lengths[lengths > 0].unique().tolist():
            rows = lengths == length
            tokens = starts[rows, None] + torch.arange(length, device=starts.device)
            keys = {name: _places(ends[name][rows], counts[name][rows]) for name in kept}
            longest, padding = int(past[rows].max()), None
            if bool((past[rows] != longest).any()):
                padding = torch.arange(longest + length, device=starts.device) >= longest - past[rows, None]
            cached: Any = KeyLengths(longest, [keys[layer_type].shape[1] for layer_type in self.layer_types])
            embeds = self.attention_mask.new_empty(*tokens.shape, 0)
            masks = {
                name: CREATE_MASK[name](config, embeds, padding, cached, layer_idx=self.layer_types.index(name))
                for name in kept
            }
            order.append(tokens.flatten())
            keys_or_rows = {name: _or_rows(places, self.num_keys[name]) for name, places in keys.items()}
            self.batches.append(RequestBatch(_or_rows(tokens, position_ids.shape[1]), keys_or_rows, masks))
        self.order = torch.cat(order).argsort() if len(order) > 1 else slice(None)

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

        Raise a RuntimeError for a mask that the base model has changed, and if the pages keep too few tokens or too
        many."""
        if attention_mask.numel() != 1:
            raise RuntimeError(f"Layer {layer_idx} adds to the mask of attention, which has no place in its requests.")
        layer_type, outputs = self.layer_types[layer_idx], []
        key_states, value_states = self.update(key_states, value_states, layer_idx)
        kwargs = {name: value for name, value in kwargs.items() if name not in OF_THE_ROW}
        for batch in self.batches:
            keys = batch.keys[layer_type]
            states = (_pick(query_states, batch.tokens), _pick(key_states, keys), _pick(value_states, keys))
            outputs.append(attend(*states, batch.masks[layer_type], **kwargs)[0].flatten(0, 1))
        return torch.cat(outputs)[self.order].unsqueeze(0), None

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


def _places(ends: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return [rows, longest], the last `counts` places before `ends` [rows]; padding repeats a row's first place."""
    longest = int(counts.max())
    places = ends[:, None] - longest + torch.arange(longest, device=ends.device)
    return torch.maximum(places, (ends - counts)[:, None])


def _pick(states: torch.Tensor, places: torch.Tensor | int) -> torch.Tensor:
    """Return [rows, heads, N, head_dim] of [1, heads, tokens, head_dim] at places [rows, N]; see `_or_rows`."""
    if isinstance(places, int):
        return states[0].unflatten(1, (places, -1)).transpose(0, 1)
    return states[0].transpose(0, 1)[places].transpose(1, 2)


def _or_rows(places: torch.Tensor, total: int) -> torch.Tensor | int:
    """Return the number of rows for places that are all `total` places in their order, which need no copy."""
    in_order = places.numel() == total and places.flatten().equal(torch.arange(total, device=places.device))
    return len(places) if in_order else places


def paged_config(decoder: PreTrainedModel) -> Any:
    """Return the config of a decoder with the type of each layer's pages, and with their window in tokens.

    Layers with a window of `interleave_heads` keep that window, unless the base model has windows of its own. Raise a
    NotImplementedError for types of layers that have no pages."""
    config, window = decoder.config, getattr(decoder.config, "sliding_window", None)
    one = "sliding_attention" if window else "full_attention"
    layer_types = list(getattr(config, "layer_types", None) or [one] * config.num_hidden_layers)
    if others := sorted(set(layer_types) - set(CREATE_MASK)):
        raise NotImplementedError(
            f"Continuous batching has pages for full and sliding attention, and {config.model_type} has layers of "
            f"type {', '.join(others)}. Use generate, which takes batches too."
        )
    given = getattr(config, "interleaved_window", None)
    if given and "sliding_attention" not in layer_types:
        window = given
        for module in decoder.modules():
            if hasattr(module, "q_mix"):
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
    """Start continuous batching by `init` of [`GenerationMixin`], on the core that the model has.

    Raise a ValueError for CUDA graphs and compilation, which need inputs of fixed shapes."""
    deprecated = getattr(generation_config or model.generation_config, "continuous_batching_config", None)
    batching = copy.copy(continuous_batching_config or deprecated or ContinuousBatchingConfig())
    compiles = batching.varlen_compile_config or batching.decode_compile_config or batching.default_compile_level > 0
    if any(batching.cuda_graph_booleans) or compiles:
        raise ValueError(
            "Continuous batching of this model runs without CUDA graphs and compilation: leave use_cuda_graph, "
            "varlen_compile_config, decode_compile_config and default_compile_level unset."
        )
    batching.use_cuda_graph, batching.max_blocks_per_request, batching.auto_switch_to_flash = False, 0, False
    text = paged_config(decoder)
    edge = Overlay(text, sliding_window=text.sliding_window and text.sliding_window + WINDOW_EDGE)
    config: Any = model.config
    core, config._attn_implementation_internal = config._attn_implementation, "paged|eager"
    try:  # Transformers asks by name whether the core takes pages
        manager = init(generation_config, batching, workload_hints)
    finally:
        config._attn_implementation_internal = core  # and makes no masks for that name

    def create_batch_processor():
        manager.model = Overlay(model, config=Overlay(config, get_text_config=lambda: edge))
        try:
            return type(manager)._create_batch_processor(manager)
        finally:
            manager.model = model

    manager._create_batch_processor = create_batch_processor
    return manager
