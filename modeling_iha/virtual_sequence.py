# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make masks for the virtual sequence of Interleaved Head Attention, and choose how to compute on it.

P pseudo-heads turn token n into the P consecutive virtual tokens n * P .. n * P + P - 1. Masks, windows, document
boundaries and cache lengths are given in tokens. Attention cores see virtual tokens. Every translation between the two
is in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from .configuration_iha import IHAConfig
from .window_blocks import MIN_BLOCK, has_varlen


# The largest dense mask for virtual tokens. On "sdpa" a row of N * P = 65536 virtual tokens takes it.
MAX_MASK_BYTES = 4 * 2**30
# These values hide a pair in an additive mask of the dtype. The eager core takes its softmax in float32, where the
# lowest float64 is -inf, and a row of -inf becomes NaN.
MASKED = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
MASKED[torch.float64] = MASKED[torch.float32]


class MaskKey(NamedTuple):
    """Hold what the mask of a layer depends on."""

    layer_type: str  # "full_attention" or "sliding_attention"
    num_pseudo_heads: int  # virtual tokens per token

    @property
    def is_sliding(self) -> bool:
        return self.layer_type == "sliding_attention"


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


@dataclass
class MaskInputs:
    """Hold what masks are made from, with all lengths in tokens."""

    config: IHAConfig
    inputs_embeds: torch.Tensor  # [batch, N, any]; gives batch, length, dtype and device
    # [batch, cached + N], nonzero for real tokens, or a custom boolean or additive [batch, 1, N, cached + N]. Sliding
    # layers keep their window under a custom mask.
    attention_mask: torch.Tensor | None = None
    past_key_values: Cache | None = None  # the cache before it takes the N tokens
    position_ids: torch.Tensor | None = None  # [batch or 1, N]; a restart begins a packed document
    attention_form: str | None = None  # see `IHAModel.attention_form`
    # Each answer waits for a GPU, so it is kept.
    _packed: bool | None = None
    _padded: bool | None = None
    _bounds: tuple[torch.Tensor, int] | None = None

    @property
    def has_custom_mask(self) -> bool:
        return self.attention_mask is not None and self.attention_mask.ndim == 4

    @property
    def may_be_packed(self) -> bool:
        """Return whether positions restart in an input that has neither mask nor cache.

        Traced positions have no values, so they may restart."""
        if self.position_ids is None or self.attention_mask is not None or self.past_key_values is not None:
            return False
        if self._packed is None:
            traced = is_tracing(self.inputs_embeds)
            self._packed = traced or bool((self.position_ids.diff(dim=-1) != 1).any())
        return self._packed

    @property
    def may_be_padded(self) -> bool:
        """Return True for a mask [batch, keys] that hides tokens, and for a traced one."""
        if self.attention_mask is None:
            return False
        if self._padded is None:
            self._padded = is_tracing(self.inputs_embeds) or not bool(self.attention_mask.all())
        return self._padded

    @property
    def document_bounds(self) -> tuple[torch.Tensor, int]:
        """Return the bounds of the documents of an input without cached tokens, as `maskless_attention` takes them."""
        if self._bounds is None:
            rows, length = self.inputs_embeds.shape[:2]
            self._bounds = document_bounds(_document_ids(self, 0, length).expand(rows, -1))
        return self._bounds

    def key_span(self, layer_idx: int) -> tuple[int, int, int]:
        """Return (all cached tokens, tokens that the layer will see, position of the first that it sees)."""
        length = self.inputs_embeds.shape[1]
        if self.past_key_values is None:
            return 0, length, 0
        return (
            self.past_key_values.get_query_offset(layer_idx),
            *self.past_key_values.get_mask_sizes(length, layer_idx),
        )


def create_masks(inputs: MaskInputs, layers: list[MaskKey]) -> dict[MaskKey, LayerMask]:
    """Return the mask of each kind of layer among `layers`, the keys of a model's layers in order.

    Raise a ValueError for a custom mask that the core does not take, and for a dense mask above MAX_MASK_BYTES."""
    if inputs.attention_form not in (None, "virtual", "base"):
        raise ValueError(f'attention_form is {inputs.attention_form!r}: expected None, "virtual" or "base".')
    if inputs.past_key_values is not None:
        keep_window_edge(inputs.past_key_values, layers, inputs.config.sliding_window)
    masks = {}
    for layer_idx, key in enumerate(layers):
        if key not in masks:
            form = choose_form(inputs, key, inputs.key_span(layer_idx)[1])
            masks[key] = _maskless(inputs, key, layer_idx, form)
            if masks[key] is None:
                mask = _dense_mask(inputs, key, layer_idx)
                # For one token of a static cache that holds nothing yet the core makes no mask.
                masks[key] = LayerMask(mask, attention_form=None if mask is None and form == "absorbed" else form)
    return masks


def choose_form(inputs: MaskInputs, key: MaskKey, num_keys: int) -> str | None:
    """Return the form in which "iha" layers compute steps 2 to 5 of IHA, Algorithm 1.

    `None` is the algorithm as written, on the core of `attn_implementation`. `"absorbed"` computes one new token from
    the cached base states (`absorbed_attention`), with fewer operations than it takes to expand their `num_keys`
    tokens. `"recomputed"` keeps the base states only, and expands them again in the backward pass. No other place
    decides the form.
    """
    config, rows, length = inputs.config, *inputs.inputs_embeds.shape[:2]
    if key.num_pseudo_heads == 1 or inputs.attention_form == "virtual":
        return None
    is_plain = config._attn_implementation == "sdpa" and config.pseudo_collapse == "per_head"
    if length == 1 and is_plain and not config.attention_dropout:
        # On a CPU, expanding is faster for few tokens (benchmarks/default_form.py).
        on_cpu = inputs.inputs_embeds.device.type == "cpu"
        return None if on_cpu and inputs.attention_form is None and rows * num_keys < 128 else "absorbed"
    return "recomputed" if inputs.attention_form == "base" and torch.is_grad_enabled() else None


def _maskless(inputs: MaskInputs, key: MaskKey, layer_idx: int, form: str | None) -> LayerMask | None:
    """Return the form and the documents of a layer whose attention builds no dense mask, or `None` if it needs one."""
    config, embeds, cache = inputs.config, inputs.inputs_embeds, inputs.past_key_values
    length = embeds.shape[1]
    # Traced lengths and documents have no values.
    if config._attn_implementation != "sdpa" or inputs.has_custom_mask or is_tracing(embeds):
        return None
    # The mask of one token on a static cache may go to a compiled forward, and its keys need not end with the token.
    if cache is not None and length == 1 and cache.is_compileable:
        return None
    past, num_keys, first = inputs.key_span(layer_idx)
    if first + num_keys != past + length:
        return None
    if form == "absorbed":
        return LayerMask(document_ids=_document_ids(inputs, first, num_keys), attention_form=form)
    varlen = has_varlen(embeds)
    apart = inputs.may_be_packed or inputs.may_be_padded
    if past > 0:
        return None
    # A dense mask is as good for short inputs and padded rows.
    windowed = key.is_sliding and (length - config.sliding_window) * key.num_pseudo_heads > (
        0 if varlen else MIN_BLOCK
    )
    by_document = apart if varlen else inputs.may_be_packed and len(embeds) == 1
    if not windowed and (key.is_sliding or not by_document):
        return None
    bounds = inputs.document_bounds if apart or varlen else None
    return LayerMask(document_ids=_document_ids(inputs, 0, length), document_bounds=bounds, attention_form=form)


def _document_ids(inputs: MaskInputs, first: int, num_keys: int) -> torch.Tensor:
    """Return the document of each of `num_keys` keys from position `first` on, as in [`LayerMask`]."""
    embeds, mask, positions = inputs.inputs_embeds, inputs.attention_mask, inputs.position_ids
    if mask is not None:
        # As Transformers allows, the mask may be on another device and may cover tokens to come.
        return -(mask[:, first : first + num_keys].to(embeds.device) == 0).int()
    if inputs.may_be_packed:
        return (positions.diff(prepend=positions[:, :1] - 1) != 1).int().cumsum(dim=-1)
    return torch.zeros(1, num_keys, dtype=torch.int, device=embeds.device)


def document_bounds(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Compute the bounds that `maskless_attention` takes from ids [batch, N], waiting for a GPU once."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids.diff(dim=-1) != 0
    bounds = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel()).int()
    return bounds, int(bounds.diff().max())


def _dense_mask(inputs: MaskInputs, key: MaskKey, layer_idx: int) -> torch.Tensor | None:
    """Return the mask that Transformers makes for the core, over virtual tokens."""
    config, virtual = inputs.config, key.num_pseudo_heads
    if virtual > 1:
        _check_mask_size(inputs, key, layer_idx)
    if inputs.has_custom_mask:
        if is_flash_attention_requested(config):
            raise ValueError(
                f"attn_implementation={config._attn_implementation!r} takes no custom mask [batch, 1, queries, keys]: "
                f"pass attention_mask [batch, keys], or use 'sdpa', 'eager' or 'flex_attention'."
            )
        return _custom_mask(inputs, key, layer_idx)
    batch_size, length = inputs.inputs_embeds.shape[:2]
    mask, cache, position_ids = inputs.attention_mask, inputs.past_key_values, inputs.position_ids
    create_mask = create_sliding_window_causal_mask if key.is_sliding else create_causal_mask
    mask = create_mask(
        config=_Virtual(config, sliding_window=(config.sliding_window or 0) * virtual),
        inputs_embeds=inputs.inputs_embeds.new_empty(batch_size, length * virtual, 0),
        attention_mask=None if mask is None else mask.repeat_interleave(virtual, dim=1),
        past_key_values=None if cache is None else _virtual_cache(cache, virtual),
        position_ids=None if position_ids is None else virtual_positions(position_ids, virtual),
        layer_idx=layer_idx,
    )
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.float64:
        mask = mask.clamp_min(MASKED[torch.float64])
    return mask


def _custom_mask(inputs: MaskInputs, key: MaskKey, layer_idx: int) -> torch.Tensor:
    """Return the additive mask [batch, heads or 1, queries * P, keys * P] of a layer from a custom mask over tokens.

    The custom mask does not order the virtual tokens of one token, so they stay causal. A sliding layer keeps its
    window."""
    mask, virtual, dtype = inputs.attention_mask, key.num_pseudo_heads, inputs.inputs_embeds.dtype
    if mask.dtype == torch.bool:
        # The eager and flex cores add the mask to the scores: True would be 1.
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, MASKED[dtype])
    past, num_keys, first = inputs.key_span(layer_idx)
    if inputs.past_key_values is not None:
        mask = mask[..., first : first + num_keys]
    mask = mask.repeat_interleave(virtual, dim=-1).repeat_interleave(virtual, dim=-2)
    q = torch.arange(mask.shape[-2], device=mask.device)[:, None] + past * virtual
    k = torch.arange(mask.shape[-1], device=mask.device) + first * virtual
    hidden = (k > q) & (k // virtual == q // virtual)
    if key.is_sliding:
        hidden |= k <= q - inputs.config.sliding_window * virtual
    return mask.masked_fill(hidden, MASKED[mask.dtype])


class _Virtual:
    """Replace attributes of a config or cache by `overrides`, which count virtual tokens."""

    def __init__(self, target, **overrides):
        self.__dict__.update(overrides, _target=target)

    def __getattr__(self, name):
        return getattr(self._target, name)


def _virtual_cache(cache: Cache, num_pseudo_heads: int) -> _Virtual:
    """Wrap a cache of base keys and values so that its lengths count virtual tokens instead of tokens."""

    def get_mask_sizes(query_length: int, layer_idx: int) -> tuple[int, int]:
        sizes = cache.get_mask_sizes(query_length // num_pseudo_heads, layer_idx)
        return tuple(size * num_pseudo_heads for size in sizes)

    def get_query_offset(layer_idx: int) -> int:
        return cache.get_query_offset(layer_idx) * num_pseudo_heads

    return _Virtual(cache, get_query_offset=get_query_offset, get_mask_sizes=get_mask_sizes)


def virtual_positions(position_ids: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Return positions n * P + p of virtual tokens, [batch, N * P], from positions n of tokens, [batch, N]."""
    offsets = torch.arange(num_pseudo_heads, device=position_ids.device)
    return (position_ids[..., None] * num_pseudo_heads + offsets).flatten(-2)


def virtual_kwargs(kwargs: dict, num_pseudo_heads: int) -> dict:
    """Convert the keyword arguments by which cores find windows and packed documents to virtual tokens.

    Positions become n * P + p even where RoPE shares n: a core would take a repeated position for a new document."""
    virtual = dict(kwargs)
    if kwargs.get("position_ids") is not None:
        virtual["position_ids"] = virtual_positions(kwargs["position_ids"], num_pseudo_heads)
    if kwargs.get("document_ids") is not None:
        virtual["document_ids"] = kwargs["document_ids"].repeat_interleave(num_pseudo_heads, dim=1)
    if kwargs.get("document_bounds") is not None:
        bounds, longest = kwargs["document_bounds"]
        virtual["document_bounds"] = bounds * num_pseudo_heads, longest * num_pseudo_heads
    for name in ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            virtual[name] = kwargs[name] * num_pseudo_heads
    return virtual


def keep_window_edge(past_key_values: Cache, layers: list[MaskKey], sliding_window: int | None) -> None:
    """Make the sliding layers of a fresh stock cache keep one more token where P > 1.

    A window of W * P virtual tokens reaches from (n, p) back to (n - W, p + 1). All pseudo-heads but the last still
    see token n - W, which a cache for a window of W tokens has dropped. A window of one token needs this for every P:
    its stock cache layer should drop every token, but drops none."""
    for layer, key in zip(past_key_values.layers, layers):
        if not key.is_sliding or (key.num_pseudo_heads == 1 and sliding_window > 1) or not layer.is_sliding:
            continue
        # A dynamic layer names its window, and a static layer has its length. A layer that is shorter by choice stays.
        name = "sliding_window" if hasattr(layer, "sliding_window") else "max_cache_len"
        if getattr(layer, name) != sliding_window:
            continue
        if layer.get_seq_length() > 0:
            raise ValueError(
                f"The cache was filled for a window of sliding_window={sliding_window} tokens, but a sliding layer with "
                f"{key.num_pseudo_heads} pseudo-heads needs one more. Pass a new cache, or none: the model makes its own."
            )
        setattr(layer, name, sliding_window + 1)
        if layer.is_initialized and name == "max_cache_len":
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])  # `generate` has allocated it


def _check_mask_size(inputs: MaskInputs, key: MaskKey, layer_idx: int) -> None:
    """Raise a ValueError for a dense mask above MAX_MASK_BYTES.

    "eager" always builds a dense mask. "sdpa" builds one for windows, padding, packing and chunks on a cache."""
    config, embeds = inputs.config, inputs.inputs_embeds
    core, virtual = config._attn_implementation, key.num_pseudo_heads
    # An export may leave the sizes open.
    if core not in ("eager", "sdpa") or torch.compiler.is_exporting():
        return
    rows, queries = embeds.shape[:2]
    past, keys, _ = inputs.key_span(layer_idx)
    additive = inputs.has_custom_mask or core == "eager"
    size = rows * queries * keys * virtual**2 * (embeds.dtype.itemsize if additive else 1)
    if size <= MAX_MASK_BYTES:
        return
    # SDPA needs no mask for causal attention over the whole input.
    if not additive:
        windowed = key.is_sliding and keys >= config.sliding_window
        if not (windowed or past != 0 or inputs.may_be_padded or inputs.may_be_packed):
            return
    raise ValueError(
        f"attn_implementation={core!r} needs a mask of {size / 2**30:.3g} GiB here: {rows} rows of {queries} x {virtual} "
        f"queries and {keys} x {virtual} keys; at most {MAX_MASK_BYTES / 2**30:.3g} GiB are allocated. Use "
        f"attn_implementation='flash_attention_2' or 'flash_attention_4', which take windows, padding and packing without "
        f"a mask, 'flex_attention', whose mask is in blocks, or a smaller batch."
    )


def check_packing(inputs: MaskInputs, **kwargs) -> None:
    """Raise a ValueError for packed documents that the attention core would silently join.

    `position_ids` [batch, N] that restart declare them, or `cu_seq_lens_q` among `kwargs`. Masks and flash cores look
    for these in some cases only."""
    config, mask, cache = inputs.config, inputs.attention_mask, inputs.past_key_values
    position_ids, cu_seq_lens = inputs.position_ids, kwargs.get("cu_seq_lens_q")
    flash = is_flash_attention_requested(config)
    if not flash and config._attn_implementation not in ("eager", "flex_attention", "sdpa"):
        return  # Other cores, such as the paged ones, have ways of their own.
    if is_tracing(inputs.inputs_embeds) or inputs.inputs_embeds.is_meta or inputs.has_custom_mask:
        return  # There are no values to look at, or a custom mask decides.

    restarts = False
    if position_ids is not None and position_ids.shape[-1] > 1:
        restart = position_ids.diff(dim=-1) < 1
        if mask is not None:
            # `generate` counts from the first real token, so positions of padding may restart.
            real = mask[:, -position_ids.shape[-1] :].bool()
            restart = restart & real[:, 1:] & real[:, :-1]
        restarts = bool(restart.any())
    if not restarts and (cu_seq_lens is None or len(cu_seq_lens) <= 2):
        return

    if flash:
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        by_lengths = all(kwargs.get(name) is not None for name in names)
        by_positions = (
            restarts
            and len(inputs.inputs_embeds) == 1
            and (cache is None or cache.get_seq_length() == 0)
            and bool((position_ids[:, 1:][restart] == position_ids[0, 0]).all())
        )
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
            f"attn_implementation={config._attn_implementation!r} keeps them apart {how}."
        )
