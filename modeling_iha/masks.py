# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make the mask of every kind of layer, and choose the form in which "iha" layers compute."""

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from .interleaving import Overlay, beats_a_mask, has_varlen, is_absorbed, keep_window_edge, virtual_positions
from .mask_inputs import MaskInputs, MaskKey


# These values hide a pair in an additive mask of the dtype. The eager core takes its softmax in float32, where the
# lowest float64 is -inf, and a row of -inf becomes NaN.
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
LOWEST[torch.float64] = LOWEST[torch.float32]


class LayerMask(NamedTuple):
    """Tell a layer which tokens see each other, and in which form an "iha" layer computes.

    Where attention builds no mask, the document of each token replaces it."""

    attention_mask: torch.Tensor | None = None  # as Transformers makes it for the core; `None` for causal attention
    # Int [batch or 1, keys], equal where tokens may see each other, -1 for padding. Attention is causal and within the
    # layer's window.
    document_ids: torch.Tensor | None = None
    # As `maskless_attention` takes them; `None` where every row is one document.
    document_bounds: tuple[torch.Tensor, int] | None = None
    attention_form: str | None = None  # see `choose_form`


def recomputes(attention_form: str | None, num_pseudo_heads: int) -> bool:
    """Return whether training expands the virtual tokens again in the backward pass."""
    return attention_form == "base" and num_pseudo_heads > 1


def choose_form(inputs: MaskInputs, key: MaskKey, num_keys: int) -> str | None:
    """Return the form in which "iha" layers compute steps 2 to 5 of IHA, Algorithm 1.

    `None` is the algorithm as written, on the core of `attn_implementation`. `"absorbed"` decodes one new token from
    the `num_keys` cached base states. `"recomputed"` keeps the base states only, and expands them in the backward too.
    Raise a ValueError for an `attention_form` of another name."""
    config, form, length = inputs.config, inputs.attention_form, inputs.inputs_embeds.shape[1]
    if form not in (None, "virtual", "base"):
        raise ValueError(f'attention_form is {form!r}: expected None, "virtual" or "base".')
    if key.num_pseudo_heads == 1 or form == "virtual":
        return None
    core, dropout = config._attn_implementation, config.attention_dropout
    if length == 1 and is_absorbed(core, config, dropout, inputs.inputs_embeds, num_keys, always=form == "base"):
        return "absorbed"
    return "recomputed" if recomputes(form, key.num_pseudo_heads) and torch.is_grad_enabled() else None


def create_masks(inputs: MaskInputs, layers: list[MaskKey]) -> dict[MaskKey, LayerMask]:
    """Return the mask of each kind of layer among `layers`, the keys of a model's layers in order.

    Raise a ValueError for a custom mask that the core does not take."""
    if inputs.past_key_values is not None:
        # The window of the first past query begins earlier. A stock cache for a window of one token drops none.
        one = inputs.config.sliding_window == 1
        more = [key.is_sliding * (key.past_queries or (key.num_pseudo_heads > 1 or one)) for key in layers]
        keep_window_edge(inputs.past_key_values, more, inputs.config.sliding_window)
    length, window = inputs.inputs_embeds.shape[1], inputs.config.sliding_window or 0
    in_window = not is_tracing(inputs.inputs_embeds) and inputs.past_key_values is None and length <= window
    masks = {}
    for key in dict.fromkeys(layers):
        layer_idx = layers.index(key)
        form = choose_form(inputs, key, inputs.key_span(layer_idx)[1])
        # A window that reaches every token hides nothing.
        effective = key._replace(layer_type="full_attention") if in_window else key
        layer_mask = _maskless(inputs, effective, layer_idx, form)
        if layer_mask is None:
            mask = _dense_mask(inputs, effective, layer_idx)
            # For one token of a static cache that holds nothing yet the core makes no mask.
            layer_mask = LayerMask(mask, attention_form=None if mask is None and form == "absorbed" else form)
        masks[key] = layer_mask
    return masks


def _maskless(inputs: MaskInputs, key: MaskKey, layer_idx: int, form: str | None) -> LayerMask | None:
    """Return the form and the documents of a layer whose attention builds no dense mask, or `None` if it needs one."""
    config, embeds, cache = inputs.config, inputs.inputs_embeds, inputs.past_key_values
    length = embeds.shape[1]
    # Traced lengths and documents have no values.
    if config._attn_implementation != "sdpa" or inputs.has_custom_mask or is_tracing(embeds):
        return None
    # One token's mask on a static cache may go to a compiled forward, and the keys may go on after the token.
    if cache is not None and length == 1 and cache.is_compileable:
        return None
    past, num_keys, first = inputs.key_span(layer_idx)
    if first + num_keys != past + length:
        return None
    if form == "absorbed":
        return LayerMask(document_ids=inputs.document_ids(first, num_keys), attention_form=form)
    # Documents are what lies between padding, so no document may have padding inside.
    if past > 0 or inputs.has_holes:
        return None
    varlen = has_varlen(embeds, config.head_dim, config.attention_dropout)
    window = (config.sliding_window or 0) * key.num_pseudo_heads
    has_documents = inputs.may_be_packed or inputs.may_be_padded
    if key.is_sliding:
        is_faster = beats_a_mask(length * key.num_pseudo_heads, window, varlen)
    else:
        # Without `varlen_attn` a dense mask is as good for padded rows and for batches.
        is_faster = has_documents if varlen else inputs.may_be_packed and len(embeds) == 1
    if not is_faster:
        return None
    bounds = inputs.document_bounds if has_documents or varlen else None
    return LayerMask(document_ids=inputs.document_ids(0, length), document_bounds=bounds, attention_form=form)


def _dense_mask(inputs: MaskInputs, key: MaskKey, layer_idx: int) -> torch.Tensor | None:
    """Return the mask that Transformers makes for the core, over virtual tokens."""
    config, num_pseudo_heads, past = inputs.config, key.num_pseudo_heads, inputs.key_span(layer_idx)[0]
    # A static cache's length is a tensor, a traced one a symbol. Rows without a query see nothing.
    past_rows = min(key.past_queries, past) if isinstance(past, int) else key.past_queries
    if inputs.has_custom_mask:
        if is_flash_attention_requested(config):
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} takes no custom mask [batch, 1, queries, keys]: "
                f"pass attention_mask [batch, keys], or use 'sdpa', 'eager' or 'flex_attention'."
            )
        return _custom_mask(inputs, key, layer_idx, past_rows)
    batch_size, length = inputs.inputs_embeds.shape[:2]
    padding, cache, position_ids = inputs.attention_mask, inputs.past_key_values, inputs.position_ids
    if not (is_tracing(inputs.inputs_embeds) or inputs.may_be_packed):
        position_ids = None  # Transformers would look for documents again, and a GPU would wait for each answer.
    create_mask = create_sliding_window_causal_mask if key.is_sliding else create_causal_mask
    mask: Any = create_mask(
        config=Overlay(config, sliding_window=(config.sliding_window or 0) * num_pseudo_heads),
        inputs_embeds=inputs.inputs_embeds.new_empty(batch_size, past_rows + length * num_pseudo_heads, 0),
        attention_mask=None if padding is None else padding.repeat_interleave(num_pseudo_heads, dim=1),
        past_key_values=None if cache is None else _virtual_cache(cache, num_pseudo_heads, past_rows),
        position_ids=None if position_ids is None else virtual_positions(position_ids, num_pseudo_heads),
        layer_idx=layer_idx,
        allow_is_causal_skip=past_rows == 0,
    )
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.float64:
        mask = mask.clamp_min(LOWEST[torch.float64])
    return mask


def _virtual_cache(cache: Cache, num_pseudo_heads: int, past_rows: int) -> Any:
    """Show a cache of base keys and values in virtual tokens, where the last `past_rows` are queries, too."""

    def get_mask_sizes(query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = cache.get_mask_sizes((query_length - past_rows) // num_pseudo_heads, layer_idx)
        return length * num_pseudo_heads, offset * num_pseudo_heads

    def get_query_offset(layer_idx: int) -> int:
        return cache.get_query_offset(layer_idx) * num_pseudo_heads - past_rows

    return Overlay(cache, get_query_offset=get_query_offset, get_mask_sizes=get_mask_sizes)


def _custom_mask(inputs: MaskInputs, key: MaskKey, layer_idx: int, past_rows: int) -> torch.Tensor:
    """Return the additive mask [batch, heads or 1, queries * P, keys * P] of a layer from a custom mask over tokens.

    The custom mask does not order the virtual tokens of one token, so they stay causal. A sliding layer keeps its
    window. The past queries see what the first new query sees, up to themselves."""
    mask, num_pseudo_heads, dtype = inputs.attention_mask, key.num_pseudo_heads, inputs.inputs_embeds.dtype
    if mask.ndim != 4 or mask.dtype not in (torch.bool, *LOWEST):
        raise ValueError(
            f"attention_mask is {mask.dtype} {list(mask.shape)}: pass one [batch, tokens], or a boolean or additive "
            "floating-point one [batch, 1, queries, keys]."
        )
    if mask.dtype == torch.bool:
        # The eager and flex cores add the mask to the scores: True would be 1.
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, LOWEST[dtype])
    past, num_keys, first = inputs.key_span(layer_idx)
    if inputs.past_key_values is not None:
        mask = mask[..., first : first + num_keys]
    mask = mask.repeat_interleave(num_pseudo_heads, dim=-1).repeat_interleave(num_pseudo_heads, dim=-2)
    mask = torch.cat((mask[..., :1, :].expand(*mask.shape[:-2], past_rows, -1), mask), dim=-2)
    q = torch.arange(mask.shape[-2], device=mask.device)[:, None] + past * num_pseudo_heads - past_rows
    k = torch.arange(mask.shape[-1], device=mask.device) + first * num_pseudo_heads
    hidden = (k > q) & ((k // num_pseudo_heads == q // num_pseudo_heads) | (q < past * num_pseudo_heads))
    if key.is_sliding:
        hidden |= k <= q - inputs.config.sliding_window * num_pseudo_heads
    return mask.masked_fill(hidden, LOWEST[mask.dtype])
