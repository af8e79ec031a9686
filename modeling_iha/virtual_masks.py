# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make masks over virtual tokens by the mask functions of Transformers.

Transformers' models make masks through one registry and call attention through another. Here each core, such as
"sdpa", has a second name for masks, such as "iha_sdpa", under which a mask is over P virtual tokens for each token.
Interleaved decoders register attention under such names too (modeling_interleaved.py):

    "iha_sdpa"           attend over virtual tokens. With the mixing of exact_start.py this computes what "sdpa" does.
    "iha_1a2b3c4d_sdpa"  the same, of a copy of this code that a checkpoint brought
    "changed_iha_sdpa"   attend over virtual tokens, in a model whose outputs are known to differ from its base's:
                         with paired heads, a window or loaded mixing (`differs_from_base`)

A fourth name, "recorded_iha_sdpa", is "sdpa" itself with masks over tokens: `interleave_heads` records the calls of a
probe under it.
"""

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
    flash_attention_mask,
)
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from .first_keys import (
    FirstKeys,
    compiled_first_keys_of_mask_function,
    first_keys_of_mask_function,
)
from .tracing import is_exported


# Each checkpoint brings a copy of this code, and copies in one process share the registries. Each copy's package has a
# unique name. We use a hash of it, because a package name that contains "flash" would make Transformers treat every
# core as a flash core.
PREFIX = "iha_" if __package__ == "modeling_iha" else f"iha_{zlib.crc32(__package__.encode()):08x}_"
CORES: dict[str, str] = {}  # from a registered name to its core
CHANGED = "changed_"  # prefix of names for models that compute something other than their base
# The attention kinds of `IHAConfig` whose layers make P virtual tokens of each token.
VIRTUAL_KINDS = {"iha", "paired_heads"}
CREATE_MASK = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
# These values hide a pair in an additive mask of the dtype. The eager core takes its softmax in float32, where the
# lowest float64 is -inf, and a row of -inf becomes NaN.
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
LOWEST[torch.float64] = LOWEST[torch.float32]
# A user's additive mask hides a pair with such a value or, in older code, with -10000, which is -9984 in bfloat16.
MASKED = -9984.0


def register_masks(core: str) -> str:
    """Register masks over virtual tokens for a core of Transformers, and return their name."""
    if core.removeprefix(CHANGED).startswith("iha_"):
        raise ValueError(
            f"attn_implementation={core!r} was registered by another copy of this code: pass the core itself, such as "
            "'sdpa'."
        )
    if core not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"attn_implementation={core!r} makes no masks, which interleaved heads need: use 'sdpa', 'eager', "
            "'flex_attention' or a flash core."
        )
    if ALL_MASK_ATTENTION_FUNCTIONS[core] is flash_attention_mask and not is_flash_core(core):
        raise ValueError(
            f"attn_implementation={core!r} takes the masks of FlashAttention, and Transformers and this package know "
            "such a core by 'flash' in its name: register it under another name, with 'flash' in it."
        )
    name = PREFIX + core.replace("/", "_")
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        CORES[name] = core
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(virtual_mask, core))
    return name


def is_flash_core(core: str) -> bool:
    """Return whether a core is one of FlashAttention. Transformers knows such cores by their names."""
    return is_flash_attention_requested(requested_attention_implementation=core)


def core_of(name: str) -> str:
    """Return the core for which a name of this copy of the code stands. Any other name is returned unchanged.

    The name may be of another process, but then not of a core with "/" in its name."""
    if name in CORES:
        return CORES[name]
    bare = name.removeprefix(CHANGED).removeprefix(PREFIX)
    return bare if bare in ALL_MASK_ATTENTION_FUNCTIONS else name  # a name of another copy may have our prefix too


def virtual_tokens_per_token(config: PreTrainedConfig) -> int:
    """Return the number of virtual tokens that masks have for each token of a model."""
    kinds = getattr(config, "attention_kinds", None)  # only `IHAConfig` has the field
    if kinds is not None and VIRTUAL_KINDS.isdisjoint(kinds):
        return 1
    return getattr(config, "num_pseudo_heads", 1)  # vision and audio towers do not have the field


def virtual_mask(core: str, config: PreTrainedConfig, mask_function: Callable, attention_mask=None, **kwargs) -> Any:
    """Return the mask that Transformers makes for the core, over P virtual tokens for each token.

    Without a window this is plain causal attention over virtual tokens. With a window of W tokens, pseudo-head p of
    token n sees the last W * P virtual tokens up to itself. These begin within token n - W, of which it sees the
    pseudo-heads after p. For P = 2 and W = 2 pseudo-head 0 of token n sees virtual tokens (n - 2, 1), (n - 1, 0),
    (n - 1, 1) and (n, 0), and pseudo-head 1 sees (n - 1, 0), (n - 1, 1), (n, 0) and (n, 1).

    Transformers' mask functions tell which tokens a token sees. Pseudo-head p of token n sees the pseudo-heads up to p
    of each token that n sees. It also sees the pseudo-heads after p of each earlier token that n - 1 sees, if n - 1 is
    in the same document: of token n - W these are the ones that still lie in its window.

    For SDPA a mask of windows, documents and padding comes as the first key of each query (first_keys.py)."""
    num_pseudo_heads = virtual_tokens_per_token(config)
    if attention_mask is not None:
        attention_mask = attention_mask.expand(kwargs["batch_size"], -1)  # one row may stand for all
    make_mask = partial(ALL_MASK_ATTENTION_FUNCTIONS[core], config=config)
    make_token_mask = partial(make_mask, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    if num_pseudo_heads == 1 and kwargs["q_length"] == 1:
        return make_token_mask()  # a new token has no first keys
    if core == "sdpa":
        may_skip = kwargs.get("allow_is_causal_skip", True)
        # Transformers decides this from shapes. The first keys are found from values, for which a GPU would wait.
        if may_skip and _may_need_no_mask(attention_mask, **kwargs) and make_token_mask() is None:
            return None
        first_keys = _first_keys_of_call(config, mask_function, attention_mask, **kwargs)
        if first_keys is not None and not first_keys.is_plain_causal():
            return first_keys.as_mask()
        if first_keys is not None and may_skip:
            return None
        # A caller that wants a mask even for plain causal attention gets a dense one.
    if num_pseudo_heads == 1:
        return make_token_mask()
    mask = _dense_virtual_mask(make_mask, num_pseudo_heads, mask_function, attention_mask, **kwargs)
    if isinstance(mask, BlockMask):
        # For layers that are not interleaved. A copy lacks it, and `token_mask` then raises an error.
        mask.of_tokens = make_token_mask()
    return mask


def _first_keys_of_call(
    config: PreTrainedConfig, mask_function: Callable, attention_mask: torch.Tensor | None, **kwargs
) -> FirstKeys | None:
    """Return the first keys of a call on SDPA, or `None` if its mask has to be dense.

    The arguments are those of `virtual_mask`."""
    if not hasattr(config, "num_pseudo_heads"):
        return None  # Only decoders have this field. Vision and audio towers get Transformers' own mask.
    num_pseudo_heads = virtual_tokens_per_token(config)
    if is_known_when_compiled(config, attention_mask, **kwargs):
        return compiled_first_keys_of_mask_function(num_pseudo_heads, mask_function, attention_mask, **kwargs)
    return first_keys_of_mask_function(num_pseudo_heads, mask_function, attention_mask, **kwargs)


def _dense_virtual_mask(
    make_mask: Callable,
    num_pseudo_heads: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> Any:
    """Return the mask that `make_mask`, a mask function of Transformers, makes over virtual tokens.

    The other arguments are those of `virtual_mask`, in tokens."""

    def sees(batch, head, query, key):
        query_token = query // num_pseudo_heads
        key_token = key // num_pseudo_heads
        sees_token = mask_function(batch, head, query_token, key_token)
        # Pseudo-heads after the query's own are seen if token n - 1 sees the key's token and is in the same document.
        # Token 0 has no token before it: no key is earlier, so what the mask function says of token -1 does not count.
        token_before_sees = mask_function(batch, head, query_token - 1, key_token)
        continues = mask_function(batch, head, query_token, query_token - 1)
        is_earlier = token_before_sees & continues & (key_token < query_token)
        is_later = sees_token & (key_token > query_token)  # tokens of an image may see later ones
        is_after = key % num_pseudo_heads > query % num_pseudo_heads
        # ONNX Runtime cannot load a `where` of three boolean tensors.
        return (~is_after & sees_token) | (is_after & (is_earlier | is_later))

    if attention_mask is not None:
        attention_mask = attention_mask.repeat_interleave(num_pseudo_heads, dim=-1)
    sizes = ("q_length", "kv_length", "q_offset", "kv_offset", "local_size")
    kwargs |= {name: kwargs[name] * num_pseudo_heads for name in sizes if kwargs.get(name) is not None}
    return make_mask(mask_function=sees, attention_mask=attention_mask, **kwargs)


def _may_need_no_mask(attention_mask, q_length: int, kv_length: int, local_size: int | None = None, **kwargs) -> bool:
    """Return whether a call is one new token, or tokens without a cache, padding or window."""
    if q_length == 1:
        return True
    return attention_mask is None and q_length == kv_length and local_size is None


def is_known_when_compiled(
    config: PreTrainedConfig,
    attention_mask: torch.Tensor | None,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs,
) -> bool:
    """Return whether compiled code knows a decoder's mask to be one of a window, chunks and padding.

    A graph cannot read the values of a mask function, but Transformers says by `allow_is_causal_skip` that the mask
    is causal without padding and for tokens within `local_size`. It does not say so of packed documents, of the blocks
    of images and of functions of the user's. In a compiled call without a cache and without `attention_mask` it always
    adds a function for packed documents.

    Without any window a dense mask, made once for all layers, serves as well. The attention kinds of `IHAConfig` have
    masks of their own (`make_masks`) or read no such first keys."""
    if is_exported() or not torch.compiler.is_compiling() or not hasattr(config, "interleaved_window"):
        return False
    if local_size is None and config.interleaved_window is None:
        return False
    if use_vmap or not allow_is_causal_skip:
        return False
    # Query i is token i only if no token is cached.
    has_no_cache = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0
    return has_no_cache and (attention_mask is None or attention_mask.shape[1] == q_length)


def token_mask(mask: Any, num_pseudo_heads: int) -> Any:
    """Return the mask over tokens for a layer that is not interleaved: that of the last pseudo-heads.

    `mask` comes from `read_mask`. Raise a RuntimeError for a copied `BlockMask`, because a copy loses its mask over
    tokens."""
    if mask is None or num_pseudo_heads == 1:
        return mask
    if isinstance(mask, FirstKeys):
        return mask.over_tokens(num_pseudo_heads)
    if isinstance(mask, BlockMask):
        if not hasattr(mask, "of_tokens"):
            raise RuntimeError(
                "Something, such as a hook of accelerate, copied the BlockMask of flex_attention, and the copy lacks "
                "the mask of the layers that are not interleaved. Use sdpa, or interleave all layers."
            )
        return mask.of_tokens
    last = slice(num_pseudo_heads - 1, None, num_pseudo_heads)
    if mask.ndim == 2:
        return mask[:, last]
    return mask[..., last, last]


def in_window(mask: Any, virtual_window: int | None, past: int | torch.Tensor | None = None) -> Any:
    """Hide the keys that lie `virtual_window` or more virtual tokens before a query's own key.

    The own key of query i is column `past` + i. Layers do not know `past`. Without it the own key is guessed: of L
    queries and K columns, query i has column min(i + K - L, last column that it sees), because the unused columns of a
    static cache come last. `_check_own_window` of modeling_interleaved.py refuses the masks for which this guess is
    wrong.

    The result is kept on the mask, because all layers ask for it."""
    if mask is None or virtual_window is None:
        return mask
    if not isinstance(mask, torch.Tensor):
        raise ValueError("flex_attention takes no sliding_window of interleaved layers: use sdpa, eager or flash.")
    if mask.ndim == 2:
        return mask  # flash cores take the window as an argument
    made_for, made = getattr(mask, "in_window", (None, None))
    if made_for == virtual_window:
        return made
    length, width = mask.shape[-2:]
    device = mask.device
    columns = torch.arange(width, dtype=torch.int32, device=device)
    before = width - length if past is None else past
    own = torch.arange(length, dtype=torch.int32, device=device)[:, None] + before
    if past is None and width > length:
        own = torch.minimum(own, torch.where(is_visible(mask), columns, 0).amax(dim=-1, keepdim=True))
    recent = columns > own - virtual_window
    made = mask & recent if mask.dtype == torch.bool else mask.masked_fill(~recent, LOWEST[mask.dtype])
    if not is_tracing(mask):
        mask.in_window = (virtual_window, made)
    return made


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Return where a boolean or additive mask shows a key."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def mask_over_virtual_tokens(
    mask: torch.Tensor, num_pseudo_heads: int, past: int | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a user's mask over tokens [batch, heads or 1, N, K] as an additive one over virtual tokens.

    A token that the mask hides is hidden with all its pseudo-heads. A window in such a mask therefore hides token
    n - W completely, while the window of `virtual_mask` shows some of its pseudo-heads. The mask does not order the
    virtual tokens of one token, so they stay causal. `past` tokens are cached. A boolean mask becomes one of `dtype`.
    Raise a ValueError for a mask of another shape or dtype."""
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


def check_mask_type(mask: Any) -> None:
    """Raise a ValueError for a `BlockMask` of the user's, which is over tokens and cannot be read."""
    if isinstance(mask, BlockMask):
        raise ValueError("attention_mask is a BlockMask: pass one [batch, tokens], or [batch, 1, queries, keys].")


def check_causal(config: PreTrainedConfig, is_causal: bool | None = None, **kwargs) -> None:
    """Raise a ValueError for `is_causal=False`, by which Transformers makes the attention of a model bidirectional.

    `is_causal` and `kwargs` are keyword arguments of a forward. Attention over virtual tokens is causal also where no
    mask says so."""
    if is_causal is None:
        is_causal = getattr(config, "is_causal", True)
    if not is_causal:
        raise ValueError("is_causal=False: the layers of this model are causal. Leave it out, or use the plain model.")


# Register the known cores once: a registration within a compiled call would invalidate the guards of its graph. A core
# that is added to Transformers later gets its name when a model first uses it.
for _core in list(ALL_MASK_ATTENTION_FUNCTIONS):
    if not _core.startswith(("iha_", CHANGED, "recorded_")):
        register_masks(_core)
