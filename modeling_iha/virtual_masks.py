# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make masks over virtual tokens by the mask functions of Transformers.

Transformers' models make masks through one registry and call attention through another. Here each core, such as
"sdpa", has a second name for masks, such as "iha_sdpa", under which a mask is over P virtual tokens for each token."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.utils.import_utils import is_tracing

from .windows import (
    Documents,
    documents_of,
    first_keys_of,
    has_first_keys,
    latest,
    plain_window,
    plain_window_mask,
)


# Each checkpoint brings a copy of this code, and copies in one process share the registries. The name of each
# copy's package is unique. It is hashed here, because "flash" in it would ask for a flash core.
PREFIX = "iha_" if __package__ == "modeling_iha" else f"iha_{zlib.crc32(__package__.encode()):08x}_"
CORES: dict[str, str] = {}  # from a name of `register_masks` to its core
WINDOWED = "windowed_"  # prefix of names for models with a window of their own, which the base model lacks
# The attention kinds of `IHAConfig` whose layers make P virtual tokens of each token.
VIRTUAL_KINDS = {"iha", "paired_heads"}
CREATE_MASK = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
# These values hide a pair in an additive mask of the dtype. The eager core takes its softmax in float32, where the
# lowest float64 is -inf, and a row of -inf becomes NaN.
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
LOWEST[torch.float64] = LOWEST[torch.float32]


def register_masks(core: str) -> str:
    """Register masks over virtual tokens for a core of Transformers, and return their name."""
    if core not in ALL_MASK_ATTENTION_FUNCTIONS or core.startswith("iha_"):  # of another copy of this code
        raise ValueError(f"attn_implementation={core!r} makes no masks, which interleaved heads need.")
    name = PREFIX + core.replace("/", "_")
    CORES[name] = core
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(virtual_mask, core))
    return name


def core_of(name: str) -> str:
    """Return the core under a name of `register_masks`, in this process or another, and any other name as it is."""
    return CORES.get(name, name.removeprefix(WINDOWED).removeprefix(PREFIX))


def virtual_tokens(config: PreTrainedConfig) -> int:
    """Return the number of virtual tokens that masks have for each token of a model."""
    if VIRTUAL_KINDS.isdisjoint(getattr(config, "attention_kinds", VIRTUAL_KINDS)):
        return 1
    return getattr(config, "num_pseudo_heads", 1)  # the towers of other media have none


def virtual_mask(core: str, config: PreTrainedConfig, mask_function: Callable, attention_mask=None, **kwargs) -> Any:
    """Return the mask that Transformers makes for the core, over P virtual tokens for each token.

    If token n sees token m, pseudo-head p of n sees pseudo-heads 0 to p of m. If token n - 1 of the same document sees
    the earlier token m, pseudo-head p of n also sees pseudo-heads p + 1 to P - 1 of m, whether or not n itself sees m.
    The later pseudo-heads of its own token thus stay hidden, and those of token n - W are visible. This makes a window
    of W tokens exactly the last W * P virtual tokens.

    For SDPA a mask of windows, documents and padding comes as the first key of each query (`_first_keys`)."""
    num_pseudo_heads = virtual_tokens(config)
    make_mask = partial(ALL_MASK_ATTENTION_FUNCTIONS[core], config=config)
    make_token_mask = partial(make_mask, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    may_skip = kwargs.get("allow_is_causal_skip", True)
    if core == "sdpa" and may_skip and _may_need_no_mask(attention_mask, **kwargs):
        # Transformers decides this from shapes. `_first_keys` looks at values, for which a GPU would wait.
        if make_token_mask() is None:
            return None
    if core == "sdpa" and hasattr(config, "num_pseudo_heads"):
        first_keys = _first_keys(num_pseudo_heads, mask_function, attention_mask, **kwargs)
        if first_keys is not None:
            if first_keys.any():
                return first_keys
            if may_skip:
                return None  # all queries see from the first key on: plain causal attention
    if num_pseudo_heads == 1:
        return make_token_mask()

    def sees(batch, head, query, key):
        query_token = query // num_pseudo_heads
        key_token = key // num_pseudo_heads
        sees_token = mask_function(batch, head, query_token, key_token)
        # Pseudo-heads after the query's own are seen if token n - 1 sees the key's token and is in the same document.
        token_before_sees = mask_function(batch, head, query_token - 1, key_token)
        continues = mask_function(batch, head, query_token, query_token - 1)
        is_earlier = token_before_sees & continues & (key_token < query_token)
        is_later = sees_token & (key_token > query_token)  # tokens of an image may see later ones
        is_after = key % num_pseudo_heads > query % num_pseudo_heads
        # ONNX Runtime loads no `where` of three booleans.
        return (~is_after & sees_token) | (is_after & (is_earlier | is_later))

    if attention_mask is not None:
        attention_mask = attention_mask.repeat_interleave(num_pseudo_heads, dim=-1)
    sizes = ("q_length", "kv_length", "q_offset", "kv_offset", "local_size")
    kwargs |= {name: kwargs[name] * num_pseudo_heads for name in sizes if kwargs.get(name) is not None}
    mask = make_mask(mask_function=sees, attention_mask=attention_mask, **kwargs)
    if isinstance(mask, BlockMask):
        mask.of_tokens = make_token_mask()  # for layers that are not interleaved
    return mask


def _may_need_no_mask(attention_mask, q_length: int, kv_length: int, local_size: int | None = None, **kwargs) -> bool:
    """Return whether a call is one new token, or tokens without a cache, padding or window."""
    if q_length == 1:
        return True
    return attention_mask is None and q_length == kv_length and local_size is None


def _first_keys(
    num_pseudo_heads: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor | None:
    """Return the first key of each query if it sees all keys from there to its own, or `None` for another mask.

    This is a mask [batch, 1, N * P, 1] in O(N). It is a tensor of numbers, because Transformers' models, hooks of
    accelerate and FSDP, checkpointing and compiled layers take, slice, move and trace tensors. A separate object would
    be refused, and an attribute of a tensor is lost when the tensor is copied or sliced, so attributes of mask tensors
    hold only results that can be recomputed. It is int32, as no other mask is, and FSDP casts no int.

    The mask function tells the documents: one begins where a token does not see the one before it. Each chunk of
    chunked attention counts as a document, and so does each run of padding. The result is `None` for bidirectional
    blocks, such as image tokens.

    The result is checked against the mask function at both ends of what each token sees, and at distances of powers of
    two. This is a sample: a mask function that differs only at other distances would be mistaken for one of these.
    Transformers makes none such, and a mask of the user's goes through `expand_mask`."""
    place = torch.arange(q_length, device=device)
    if q_length == 1 or kv_length < q_length:
        return None
    if use_vmap or is_tracing(place) or place.is_meta:
        return None  # there are no values to look at
    if q_offset != 0 or kv_offset != 0:
        return None  # cached tokens come first
    rows = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=device)
    window = local_size or q_length

    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_function(rows, head, query, key).expand(batch_size, -1)

    begins = torch.nn.functional.pad(~sees(place[1:], place[:-1]), (1, 0), value=True)
    first = torch.maximum(latest(begins), place - window + 1)
    sees_first = sees(place, first).all()
    sees_none_before = (~sees(place, (first - 1).clamp(min=0)) | (first == 0)).all()
    checks = [sees_first, sees_none_before]
    for distance in [0] + [2**power for power in range((q_length - 1).bit_length())]:
        later = place[distance:]
        earlier = place[: q_length - distance]
        checks.append((sees(later, earlier) == (first[:, distance:] <= earlier)).all())
        if distance > 0:
            checks.append(~sees(earlier, later).any())
    if attention_mask is not None:
        real = torch.nn.functional.pad(attention_mask, (0, q_length - attention_mask.shape[-1])).to(device).bool()
        # This needs the documents without padding, so it comes before padding becomes a document.
        checks.append(~_resumes_after_padding(real, begins).any())
        begins = begins | torch.nn.functional.pad(real[:, 1:] != real[:, :-1], (1, 0))
    if not torch.stack(checks).all():
        return None
    return first_keys_of(begins, num_pseudo_heads, window)


def _resumes_after_padding(real: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Return where a real token follows padding and sees real tokens of its document before that padding.

    First keys cannot say this, because padding is a document of its own. All are boolean [batch, N]."""
    before = real.cumsum(dim=-1) - real.long()
    follows = torch.nn.functional.pad(real[:, 1:] & ~real[:, :-1], (1, 0)) & ~begins
    return follows & (before > before.gather(1, latest(begins)))


def token_mask(mask: Any, num_pseudo_heads: int) -> Any:
    """Return the mask over tokens for a layer that is not interleaved: that of the last pseudo-heads."""
    if mask is None or num_pseudo_heads == 1:
        return mask
    if not isinstance(mask, torch.Tensor):
        return mask.of_tokens  # a BlockMask
    if has_first_keys(mask):
        return _first_keys_over_tokens(mask, num_pseudo_heads)
    last = slice(num_pseudo_heads - 1, None, num_pseudo_heads)
    if mask.ndim == 2:
        return mask[:, last]
    return mask[..., last, last]


def _first_keys_over_tokens(mask: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Return the first keys of tokens from those of virtual tokens: the ones of the last pseudo-heads."""
    window = plain_window(mask)
    if window is not None:
        return plain_window_mask(mask.shape[1] // num_pseudo_heads, window // num_pseudo_heads, mask.device)
    first_keys = mask[:, :, num_pseudo_heads - 1 :: num_pseudo_heads, :1] // num_pseudo_heads
    width = mask.shape[-1]
    if width > 1:
        return first_keys.expand(-1, -1, -1, width // num_pseudo_heads)
    if not torch.compiler.is_compiling():
        # To look for the documents again would make a GPU wait.
        documents = documents_of(mask)
        first_keys.documents = Documents(
            bounds=documents.bounds // num_pseudo_heads,
            longest=documents.longest // num_pseudo_heads,
            reach=documents.reach // num_pseudo_heads,
        )
    return first_keys


def in_window(mask: Any, window: int | None) -> Any:
    """Hide the keys that lie `window` or more places before a query's own key.

    The result is kept on the mask, because all layers ask for it. A query's own key is the last key that it sees.
    Without unused places of a static cache, the own keys are the last columns of the mask."""
    if mask is None or window is None:
        return mask
    if not isinstance(mask, torch.Tensor):
        raise ValueError("flex_attention takes no sliding_window of interleaved layers: use sdpa, eager or flash.")
    if has_first_keys(mask) or mask.ndim == 2:
        return mask  # their cores take the window as an argument
    # The layers of a model share one window, so the mask alone is the key.
    made = getattr(mask, "in_window", None)
    if made is not None:
        return made
    length, width = mask.shape[-2:]
    device = mask.device
    places = torch.arange(width, dtype=torch.int32, device=device)
    own = torch.arange(width - length, width, dtype=torch.int32, device=device)[:, None]
    if width > length:
        visible = mask if mask.dtype == torch.bool else mask == 0
        own = torch.minimum(own, torch.where(visible, places, 0).amax(dim=-1, keepdim=True))
    recent = places > own - window
    made = mask & recent if mask.dtype == torch.bool else mask.masked_fill(~recent, torch.finfo(mask.dtype).min)
    if not is_tracing(mask):
        mask.in_window = made
    return made


def expand_mask(
    mask: torch.Tensor, num_pseudo_heads: int, past: int | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a user's mask over tokens [batch, heads or 1, N, K] as an additive one over virtual tokens.

    The mask does not order the virtual tokens of one token, so they stay causal. `past` tokens are cached. A boolean
    mask becomes one of `dtype`. Raise a ValueError for a mask of another shape or dtype."""
    if mask.ndim != 4 or mask.dtype not in (torch.bool, *LOWEST):
        raise ValueError(
            f"attention_mask is {mask.dtype} {list(mask.shape)}: pass one [batch, tokens], or a boolean or additive "
            "floating-point one [batch, 1, queries, keys]."
        )
    if mask.dtype == torch.bool:
        # The eager and flex cores add the mask to the scores: True would be 1.
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, LOWEST[dtype])
    mask = mask.repeat_interleave(num_pseudo_heads, dim=-1).repeat_interleave(num_pseudo_heads, dim=-2)
    query = torch.arange(mask.shape[-2], device=mask.device)[:, None] + past * num_pseudo_heads
    key = torch.arange(mask.shape[-1], device=mask.device)
    later = (key > query) & (key // num_pseudo_heads == query // num_pseudo_heads)
    return mask.masked_fill(later, LOWEST[mask.dtype])
