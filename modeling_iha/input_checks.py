# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuse too short masks, packed documents that would see each other, and tokens that are cached."""

import warnings

import torch
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from .mask_inputs import MaskInputs


def check_inputs(inputs: MaskInputs, **kwargs) -> None:
    """Raise a ValueError for packed documents that the core would silently join, and for what misfits the cache.

    `position_ids` [batch, N] that restart declare documents, or `cu_seq_lens_q` among `kwargs`. Masks and flash cores
    look for these in some cases only."""
    config, embeds, mask, cache = inputs.config, inputs.inputs_embeds, inputs.attention_mask, inputs.past_key_values
    position_ids, cu_seq_lens = inputs.position_ids, kwargs.get("cu_seq_lens_q")
    core, flash = config._attn_implementation, is_flash_attention_requested(config)
    if core == "flex_attention" and embeds.device.type == "cpu" and not torch.compiler.is_compiling():
        warnings.warn("FlexAttention compiled for a CPU may fail, crash or err in silence: use 'sdpa' or 'eager'.")
    if not flash and core not in ("eager", "flex_attention", "sdpa"):
        return  # Other cores, such as the paged ones, have ways of their own.
    if is_tracing(embeds) or embeds.is_meta or inputs.has_custom_mask:
        return  # There are no values to look at, or a custom mask decides.

    restarts, is_cached, length = False, False, embeds.shape[1]
    past = 0 if cache is None else cache.get_seq_length()
    past = past if length == 1 else int(past)  # that of a static cache waits for a GPU
    is_short = mask is not None and isinstance(past, int) and mask.shape[1] < past + length
    if position_ids is not None and length > 1 and not is_short:
        restart, first = position_ids.diff(dim=-1) < 1, position_ids < 1
        if mask is not None:
            # `generate` counts from the first real token, so positions of padding may restart. A mask may be longer.
            real = mask[:, : past + length][:, -length:].to(restart.device).bool()
            restart = restart & real[:, 1:] & real[:, :-1]
            first = first & real & mask[:, :past].any(dim=-1, keepdim=True).to(restart.device)
        restarts = (mask is not None or cache is not None or inputs.may_be_packed) and bool(restart.any())
        is_cached = past > 0 and not restarts and bool(first.any())
    # Short masks would hide the newest tokens. Assisted decoding on a cache passes these, or cached tokens again.
    if is_cached or is_short:
        raise ValueError(
            f"{length} tokens come after {past} cached ones, but position_ids begin at 0 or attention_mask has fewer "
            f"than {past + length} columns: pass new tokens alone and a mask over all tokens, or no past_key_values."
        )
    if not restarts and (cu_seq_lens is None or len(cu_seq_lens) <= 2):
        return

    if flash:
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        by_lengths = all(kwargs.get(name) is not None for name in names)
        one_row = restarts and past == 0 and len(embeds) == 1
        by_positions = one_row and bool((position_ids[:, 1:][restart] == position_ids[0, 0]).all())
        apart = (by_lengths or by_positions) and (mask is None or bool(mask.all()))
        how = (
            "by cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k together, or in a batch of one row that "
            "continues no cache by position_ids that restart at their first value; in both cases without padding in "
            "attention_mask"
        )
    else:
        apart = restarts and mask is None and cache is None
        how = "by position_ids that restart, without attention_mask and without a cache (use_cache=False)"
    if not apart:
        raise ValueError(
            f"Packed documents (position_ids that restart, or cu_seq_lens) would attend to one another here: "
            f"attn_implementation={core!r} keeps them apart {how}."
        )
