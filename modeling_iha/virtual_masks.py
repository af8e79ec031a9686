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
CORES: dict[str, str] = {}  # by the names of `register_masks`
WINDOWED = "windowed_"  # before the names for models with a window that their base lacks
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

    Pseudo-head p of token n sees the tokens that n sees, except the pseudo-heads after p of n itself. It also sees the
    pseudo-heads after p of the token just before the window: in a window of W tokens, the last W * P virtual tokens.

    For SDPA a mask of windows, documents and padding comes as the first key of each query (`_first_keys`)."""
    make_mask, num_pseudo_heads = partial(ALL_MASK_ATTENTION_FUNCTIONS[core], config=config), virtual_tokens(config)
    of_tokens = partial(make_mask, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    # Where Transformers needs no mask none is made, and a GPU need not wait for an answer.
    whole = attention_mask is None and kwargs["q_length"] == kwargs["kv_length"] and kwargs.get("local_size") is None
    skips = kwargs.get("allow_is_causal_skip", True) and (whole or kwargs["q_length"] == 1)
    if core == "sdpa" and skips and of_tokens() is None:
        return None
    if core == "sdpa" and hasattr(config, "num_pseudo_heads"):
        first_keys = _first_keys(num_pseudo_heads, mask_function, attention_mask, **kwargs)
        if first_keys is not None and first_keys.any():
            return first_keys
        if first_keys is not None and kwargs.get("allow_is_causal_skip", True):
            return None  # causal from the first token on
    if num_pseudo_heads == 1:
        return of_tokens()

    def sees(batch, head, query, key):
        token, cached, later = query // num_pseudo_heads, key // num_pseudo_heads, key % num_pseudo_heads
        same = mask_function(batch, head, token, cached)
        before = mask_function(batch, head, token - 1, cached) & mask_function(batch, head, token, token - 1)
        # Tokens of an image may see later ones.
        visible_after_p = (before & (cached < token)) | (same & (cached > token))
        is_after_p = later > query % num_pseudo_heads
        return (~is_after_p & same) | (is_after_p & visible_after_p)  # ONNX Runtime loads no `where` of three booleans

    if attention_mask is not None:
        attention_mask = attention_mask.repeat_interleave(num_pseudo_heads, dim=-1)
    sizes = ("q_length", "kv_length", "q_offset", "kv_offset", "local_size")
    kwargs |= {name: kwargs[name] * num_pseudo_heads for name in sizes if kwargs.get(name) is not None}
    mask = make_mask(mask_function=sees, attention_mask=attention_mask, **kwargs)
    if isinstance(mask, BlockMask):
        mask.of_tokens = of_tokens()  # for layers that are not interleaved
    return mask


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
    accelerate and FSDP, checkpointing and compiled layers take, slice, move and trace tensors: an object would be
    refused, and what hangs on a tensor alone would be lost. It is int32, as no other mask is, and FSDP casts no int.

    The mask function tells the documents: one begins where a token does not see the one before it. The result is
    checked against the mask function at both ends of what each token sees, and at distances of powers of two. Chunks
    are documents, padding is a document of its own, and for blocks that see each other both ways the result is `None`.
    """
    place = torch.arange(q_length, device=device)
    if q_length == 1 or kv_length < q_length or use_vmap or is_tracing(place) or place.is_meta:
        return None
    if q_offset != 0 or kv_offset != 0:
        return None
    rows, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    window = local_size or q_length

    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_function(rows, head, query, key).expand(batch_size, -1)

    begins = torch.nn.functional.pad(~sees(place[1:], place[:-1]), (1, 0), value=True)
    first = torch.maximum(latest(begins), place - window + 1)
    checks = [sees(place, first).all(), (~sees(place, (first - 1).clamp(min=0)) | (first == 0)).all()]
    for distance in [0] + [2**power for power in range((q_length - 1).bit_length())]:
        later, earlier = place[distance:], place[: q_length - distance]
        checks.append((sees(later, earlier) == (first[:, distance:] <= earlier)).all())
        checks.append(~sees(earlier, later).any() if distance else checks[0])
    if attention_mask is not None:
        real = torch.nn.functional.pad(attention_mask, (0, q_length - attention_mask.shape[-1])).to(device).bool()
        before = real.cumsum(dim=-1) - real.long()
        # Padding between tokens of one document parts them, and they see each other.
        resumes = torch.nn.functional.pad(real[:, 1:] & ~real[:, :-1], (1, 0)) & ~begins
        checks.append(~(resumes & (before > before.gather(1, latest(begins)))).any())
        begins = begins | torch.nn.functional.pad(real[:, 1:] != real[:, :-1], (1, 0))
    if not torch.stack(checks).all():
        return None
    return first_keys_of(begins, num_pseudo_heads, window)


def token_mask(mask: Any, num_pseudo_heads: int) -> Any:
    """Return the mask over tokens for a layer that is not interleaved: that of the last pseudo-heads."""
    if mask is None or num_pseudo_heads == 1:
        return mask
    if not isinstance(mask, torch.Tensor):
        return mask.of_tokens
    if has_first_keys(mask):
        if (window := plain_window(mask)) is not None:
            return plain_window_mask(mask.shape[1] // num_pseudo_heads, window // num_pseudo_heads, mask.device)
        tokens = mask[:, :, num_pseudo_heads - 1 :: num_pseudo_heads, :1] // num_pseudo_heads
        if mask.shape[-1] > 1:
            return tokens.expand(-1, -1, -1, mask.shape[-1] // num_pseudo_heads)
        if not torch.compiler.is_compiling():
            bounds, longest, reach = documents_of(mask)
            virtual = num_pseudo_heads
            tokens.documents = Documents(bounds // virtual, longest // virtual, reach // virtual)
        return tokens
    last = slice(num_pseudo_heads - 1, None, num_pseudo_heads)
    return mask[:, last] if mask.ndim == 2 else mask[..., last, last]


def in_window(mask: Any, window: int | None) -> Any:
    """Return a mask that also hides what is `window` keys back, made once for all layers.

    A core of first keys gets the window by itself. Else the last keys are the queries' own, unless a static cache has
    more places: then a query's own key is the last that it sees."""
    if mask is None or window is None or has_first_keys(mask) or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return mask
    if not isinstance(mask, torch.Tensor):
        raise ValueError("flex_attention takes no sliding_window of interleaved layers: use sdpa, eager or flash.")
    if (made := getattr(mask, "in_window", None)) is not None:
        return made
    (length, width), device = mask.shape[-2:], mask.device
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
