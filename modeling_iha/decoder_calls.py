# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Read and change the arguments of a call of an interleaved decoder before its own code gets them.

What a call declares, its padding, its documents and its cache, is read here, once for all layers. They get padding and
documents as `cu_seq_lens_q` (sdpa_in_blocks.py), and a cache keeps what windows of virtual tokens reach.
"""

import math
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from .interleaved_attention import PREFIX, has_virtual_heads
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .sdpa_in_blocks import read_documents
from .transformers_versions import CACHE, IS_FROM_5_24, pop_cache
from .virtual_tokens import check_mask_over_tokens, keep_window_edge


def prepare_decoder(names: list[str], decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Check and change the arguments of a decoder's forward: a pre-hook of the decoder.

    `names` are those of the positional arguments. Windows of the cache become one token longer (`keep_windows`) before
    the forward reads its lengths. `logits_to_keep` becomes `None`, because Gemma 4 crops the rows of a mask to it,
    which are virtual tokens here."""
    config = decoder_config(decoder)
    if not config._attn_implementation.startswith(PREFIX):
        raise RuntimeError(
            f"The attention of this model was set to {config._attn_implementation!r} behind its back, which would "
            "leave out the interleaved heads: call model.set_attn_implementation."
        )
    kwargs = dict(**dict(zip(names, args)), **kwargs)
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False: interleaved heads are causal. Leave it out, or use the plain model.")
    if "logits_to_keep" in names:
        kwargs["logits_to_keep"] = None
    cache = pop_cache(kwargs)
    if cache is None:
        cache = new_cache(decoder, kwargs.get("use_cache"))
    if cache is not None:
        keep_windows(decoder, cache)
        kwargs[CACHE] = cache
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    mask = kwargs.get("attention_mask")
    if tokens is not None and isinstance(mask, torch.Tensor | None):
        if mask is not None and mask.ndim == 4 and mask.shape[2] == tokens.shape[1]:
            windows = config.interleaved_window, getattr(config, "sliding_window", None)
            check_mask_over_tokens(mask, tokens.shape[1], cache, min(each or math.inf for each in windows))
        if passes_documents(config):
            kwargs |= declared(tokens, kwargs, cache)
    return args[len(names) :], kwargs


def passes_documents(config: PreTrainedConfig) -> bool:
    """Return whether the layers take documents from `cu_seq_lens_q`: `interleave_heads` has tried it."""
    is_in_blocks = config._attn_implementation == PREFIX + SDPA_IN_BLOCKS
    return is_in_blocks and getattr(config, "passes_cu_seq_lens", False)


def declared(tokens: torch.Tensor, kwargs: dict, cache: Cache | None) -> dict[str, Any]:
    """Return the keyword arguments that tell all layers what a call declares, in place of dense masks.

    A call without a mask gets one of ones, a single number that is expanded. Without it Transformers would look for
    documents in the positions again, and compiled code, which cannot look, would get dense masks."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    # Positions of images have three or four axes, and are no declaration.
    positions = positions if positions is not None and positions.ndim == 2 else None
    if mask is not None and mask.ndim != 2:
        return {}
    documents = read_documents("sdpa", tokens, mask, positions, cache, kwargs.get("cu_seq_lens_q"))
    if mask is None and cache is None and (documents or kwargs.get("cu_seq_lens_q") is not None):
        documents["attention_mask"] = torch.ones((), dtype=torch.bool, device=tokens.device).expand(tokens.shape[:2])
    return documents


def new_cache(decoder: PreTrainedModel, use_cache: bool | None) -> Cache | None:
    """Return the cache of a call to which none is given, or `None` to leave it to the base model.

    A base makes its own in the forward, which is too late for `keep_windows` if it has windows."""
    config = decoder_config(decoder)
    if use_cache is None:
        use_cache = getattr(config, "use_cache", False)
    # A base with activation checkpointing makes no cache, and Transformers finds packed documents only without one.
    is_checkpointed = getattr(decoder, "gradient_checkpointing", False) and decoder.training
    if IS_FROM_5_24:
        is_checkpointed = is_checkpointed and torch.is_grad_enabled()
    # RecurrentGemma, which is stateful, resets its states where it makes a cache.
    if not use_cache or is_checkpointed or decoder._is_stateful or not getattr(config, "sliding_window", None):
        return None
    return DynamicCache(config=decoder.config)


def keep_windows(model: PreTrainedModel, cache: Cache) -> None:
    """Let a cache keep what windows of virtual tokens reach: one token more than the window.

    If the base has no window and the interleaved layers have one, their empty dynamic layers of the cache become
    sliding ones."""
    cache = getattr(cache, "self_attention_cache", cache)  # that of a decoder with cross-attention
    config = decoder_config(model)
    window = getattr(config, "sliding_window", None)
    if window:
        keep_window_edge(cache, window)
        return
    layers = getattr(cache, "layers", [])
    empty = {i for i, layer in enumerate(layers) if type(layer) is DynamicLayer and not layer.is_initialized}
    # CODEPATH: a window of the interleaved layers alone.
    if config.interleaved_window is None or "flex" in config._attn_implementation:  # a `BlockMask` cannot be cut
        return
    for module in model.modules():
        if has_virtual_heads(module) and module.layer_idx in empty:
            layers[module.layer_idx] = DynamicSlidingWindowLayer(config.interleaved_window + 1)


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the text decoder, which attention modules and masks read."""
    return model.config.get_text_config(decoder=True)
