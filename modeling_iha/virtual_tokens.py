# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Run an attention layer over virtual tokens: an ordinary layer over a sequence that is P times as long.

P pseudo-heads turn token n into the virtual tokens n * P .. n * P + P - 1 (interleaving.py, or pairing.py). The
attention functions of Transformers run over these, and its mask functions make the masks, asked for N * P tokens. Here
the positions, windows and lengths that both get are multiplied by P. For P = 2 and three tokens, each query sees the
keys marked x (with a window of two tokens, the last four x of its row):

                                  key of token 0   token 1   token 2
                     pseudo-head             0 1       0 1       0 1
    query of token 0, pseudo-head 0          x
                      pseudo-head 1          x x
    query of token 1, pseudo-head 0          x x       x
                      pseudo-head 1          x x       x x
    query of token 2, pseudo-head 0          x x       x x       x
                      pseudo-head 1          x x       x x       x x

The shapes of all files are in these symbols:

    N  tokens of a call       H  query heads                P  pseudo-heads of a head
    W  window, in tokens      G  key and value heads        M  H for queries, G for keys and values
    K  keys of a call, cached ones included
"""

from collections.abc import Callable
from functools import cache as keep_results
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .sdpa_in_blocks import is_cpu_inference, is_for_any_length, needs_no_dense_mask, padding_mask


PREFIX = "iha_"  # "iha_sdpa" attends by "sdpa" in a model in place (interleaved_attention.py)
# Virtual queries, keys and values that are made at once: by a backward pass, and on a CPU without gradients.
PART_BYTES = 2**31
CPU_PART_BYTES = 2**25
# Cached tokens, of a row and of all rows, from which on a CPU computes one new token faster without virtual tokens
LEAST_CACHED, LEAST_CACHED_OF_ROWS = 64, 128


class View:
    """Show an object with some of its attributes replaced. In PyTorch 2.11 `copy` would break a compiled graph."""

    def __init__(self, viewed: Any, **attributes):
        self._viewed = viewed
        for name, value in attributes.items():
            setattr(self, name, value)

    def __getattr__(self, name: str):
        # `copy` and `pickle` ask an object that has no attributes yet, and the viewed one has methods of its own.
        if name == "_viewed" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._viewed, name)


def refuse_pages(*args, **kwargs) -> None:
    """Raise an error, as a method of models with virtual tokens, where a server would keep one key for each token."""
    raise NotImplementedError(
        "Pages of continuous batching, vLLM and SGLang hold one key for each token, and interleaved heads need P: "
        "call generate, which takes batches too, or install the plugin vllm_iha and leave out --model-impl."
    )


def core_of(config: PreTrainedConfig) -> str:
    """Return the name of the attention function that computes over virtual tokens, or that an `IHAModel` was given.

    `IHAModel` is this package's own model, of which a checkpoint of a decoder in place has nothing."""
    return config._attn_implementation.removeprefix(PREFIX)


def in_virtual_tokens(kwargs: dict, num_pseudo_heads: int) -> dict:
    """Return the keyword arguments of an attention function, with windows, lengths and positions in virtual tokens."""
    virtual = dict(kwargs)
    for name in ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            virtual[name] = kwargs[name] * num_pseudo_heads
    if kwargs.get("document_lengths") is not None:
        virtual["document_lengths"] = tuple(each * num_pseudo_heads for each in kwargs["document_lengths"])
    positions = kwargs.get("position_ids")
    if positions is not None:  # n * P + p, whatever RoPE uses: a repeated position would begin a document
        offsets = torch.arange(num_pseudo_heads, device=positions.device)
        virtual["position_ids"] = (positions[..., None] * num_pseudo_heads + offsets).flatten(-2)
    return virtual


# Masks


def virtual_mask(core: str, *, mask_function: Callable, attention_mask=None, **kwargs) -> Any:
    """Return the mask of layers with `config.num_pseudo_heads` pseudo-heads, of an `IHAModel` or in place.

    The arguments are those of a mask function of Transformers, in tokens. If the core takes a flat mask for them, the
    mask is `None` or [batch, keys], in tokens. Otherwise it is dense over virtual tokens (`sees_virtual_token`)."""
    num_pseudo_heads = kwargs["config"].num_pseudo_heads
    if num_pseudo_heads > 1 and not getattr(kwargs["config"], "is_causal", True):
        raise ValueError("is_causal=False: interleaved heads are causal. Leave it out, or use the plain model.")
    # Lengths are in tokens here. In virtual tokens one new token would be P queries, and look like a prompt.
    if takes_flat_mask(core, **kwargs):
        make_mask = padding_mask if core == SDPA_IN_BLOCKS else ALL_MASK_ATTENTION_FUNCTIONS[core]
        return make_mask(attention_mask=attention_mask, **kwargs)
    if attention_mask is not None:
        attention_mask = attention_mask.repeat_interleave(num_pseudo_heads, dim=-1)
    for name in ("q_length", "kv_length", "q_offset", "kv_offset", "local_size"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name] * num_pseudo_heads
    sees = partial(sees_virtual_token, mask_function, num_pseudo_heads) if num_pseudo_heads > 1 else mask_function
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa" if core == SDPA_IN_BLOCKS else core]
    return make_mask(mask_function=sees, attention_mask=attention_mask, **kwargs)


def takes_flat_mask(core: str, **kwargs) -> bool:
    """Return whether a core takes a flat mask for the arguments of a mask function."""
    return "flash" in core or (core == SDPA_IN_BLOCKS and needs_no_dense_mask(**kwargs))


def sees_virtual_token(sees_token: Callable, num_pseudo_heads: int, batch, head, query, key) -> torch.Tensor:
    """Return whether queries see keys, by their places among virtual tokens, as Transformers' mask functions do.

    `sees_token` is the mask function over tokens. Query n * P + p sees key k * P + j if

        j <= p and token n sees token k, or j > p and token n - 1 sees token k.

    Without a window this is causality over virtual tokens. A window of W > 1 tokens becomes the last W * P virtual
    tokens, as FlashAttention computes it, and these begin within a token. For example, in the table at the top of this
    file with a window of two tokens, pseudo-head 0 of token 2 sees pseudo-head 0 of tokens 1 and 2, and pseudo-head 1
    of tokens 0 and 1.

    The places are single numbers, or a grid of all pseudo-heads of tokens, [1, 1, queries, 1] and [1, 1, 1, keys]. A
    grid is evaluated for its tokens, and the result repeated."""
    is_grid = query.ndim == 4 and key.ndim == 4
    queries, keys = (query[..., ::num_pseudo_heads, :], key[..., ::num_pseudo_heads]) if is_grid else (query, key)
    query_token, key_token = queries // num_pseudo_heads, keys // num_pseudo_heads
    by_own_token = sees_token(batch, head, query_token, key_token)
    by_token_before = token_before_sees(sees_token, batch, head, query_token, key_token)
    # A mask within an image also shows later tokens. All of their pseudo-heads are seen if token n sees them.
    by_token_before = by_token_before | (by_own_token & (key_token > query_token))

    is_later_pseudo_head = key % num_pseudo_heads > query % num_pseudo_heads
    if is_grid:
        both = torch.broadcast_tensors(by_own_token, by_token_before)
        by_own_token, by_token_before = (repeat_pairs(each, num_pseudo_heads) for each in both)
    return torch.where(is_later_pseudo_head, by_token_before, by_own_token)


def token_before_sees(sees_token: Callable, batch, head, query, key) -> torch.Tensor:
    """Return whether the token before a query is of the query's document and sees a key, by places of tokens."""
    is_in_document = sees_token(batch, head, query, query - 1)  # false where a document begins
    is_earlier = key < query  # the first query would look up the token before at -1, which is the last one
    return is_in_document & sees_token(batch, head, query - 1, key) & is_earlier


def repeat_pairs(mask: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Repeat each entry of a mask [..., N, K] for the pseudo-heads of its tokens."""
    return mask.repeat_interleave(num_pseudo_heads, dim=-1).repeat_interleave(num_pseudo_heads, dim=-2)


def mask_over_virtual_tokens(mask: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Return a user's mask [batch, heads, N, K] over virtual tokens. No window is added to it."""
    if num_pseudo_heads == 1:
        return mask
    mask = repeat_pairs(mask, num_pseudo_heads)
    keys = torch.arange(mask.shape[-1], device=mask.device)
    queries = keys[-mask.shape[-2] :, None]  # the last keys: a static cache, which has more, is rejected
    hidden = (keys > queries) & (keys // num_pseudo_heads == queries // num_pseudo_heads)
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


# Attention


def virtual_attention(
    attend: Callable, module: nn.Module, heads: Any, query, key, value, attention_mask: Any, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, N, H, head_dim] of attention over virtual tokens, and the weights over them.

    Args:
        attend: an attention function of Transformers, whose first argument is `module`.
        heads: `MixedHeads` or `PairedHeads`, which make virtual tokens of heads and collapse the output.
        query, key, value: [batch, H, N, head_dim] and [batch, G, K, head_dim], as in an ordinary layer.
        attention_mask: flat, in tokens, or dense, over virtual tokens.
        kwargs: keyword arguments of the attention function, in tokens."""
    states = (query.to(value.dtype), key.to(value.dtype), value)  # autocast leaves rotated states in float32
    mask = mask_of_heads(attention_mask, heads)
    if takes_new_token(module, heads, query, key, mask, kwargs.get("dropout")):
        return heads.attend_new_token(*states, mask, kwargs.get("scaling") or query.shape[-1] ** -0.5), None
    kwargs = in_virtual_tokens(kwargs, heads.num_pseudo_heads)
    run: Callable = partial(attend_to_virtual_tokens, attend, module, mask, kwargs)
    is_recomputed = recomputes(module, *states)
    if is_recomputed:
        run = recomputed(run)
    if has_same_mask_in_all_heads(mask) and kwargs.get("s_aux") is None:
        parts = heads.in_parts(num_parts(states, heads.num_pseudo_heads, is_recomputed))
    else:
        parts = [heads]
    if len(parts) == 1:
        return run(heads, *states)
    return torch.cat([run(part, *states)[0] for part in parts], dim=2), None


def mask_of_heads(mask: Any, heads: Any) -> Any:
    """Return the mask of a layer for its virtual tokens and virtual heads."""
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask.repeat_interleave(heads.num_pseudo_heads, dim=-1)
    return heads.mask_of_virtual_heads(mask)


def has_same_mask_in_all_heads(mask: Any) -> bool:
    """Return whether all heads have the same mask for certain: a flat one, or none. A dense one may differ by head."""
    return mask is None or len(mask.shape) == 2


def attend_to_virtual_tokens(
    attend: Callable, module: nn.Module, mask: Any, kwargs: dict, heads: Any, *states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the collapsed output, and the weights over virtual tokens, of an attention function."""
    output, weights = attend(module, *heads.make_virtual_tokens(*states), mask, **kwargs)
    return heads.collapse_output(output), weights


def num_parts(states: tuple[torch.Tensor, ...], num_pseudo_heads: int, is_recomputed: bool) -> int:
    """Return in how many parts the heads go one after the other, so that few virtual tokens exist at a time."""
    if not is_recomputed and not is_cpu_inference(states[0]):
        return 1
    most_bytes = PART_BYTES if is_recomputed else CPU_PART_BYTES
    return sum(each.nbytes for each in states) * num_pseudo_heads // most_bytes + 1


# The backward pass


def recomputed(run: Callable) -> Callable:
    """Return a function of heads and states whose backward pass makes the virtual tokens again."""
    contexts = partial(create_selective_checkpoint_contexts, keep_attention)
    return partial(checkpoint, run, use_reentrant=False, context_fn=contexts)


def recomputes(module: nn.Module, *states: torch.Tensor) -> bool:
    """Return whether the backward pass makes virtual tokens again (`recompute_virtual_tokens` of the config).

    `states` are those of tokens. Activation checkpointing and other hooks of autograd have precedence; only a private
    function tells of them. In compiled code the compiler chooses what to keep."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # also while a program is traced
        return False
    config = module.config
    choice = getattr(config, "recompute_virtual_tokens", None)
    if choice is None and states[0].device.type == "cuda":
        kept = sum(each.nbytes for each in states) * config.num_pseudo_heads * config.num_hidden_layers
        return kept > torch.cuda.get_device_properties(states[0].device).total_memory / 4
    return bool(choice)


def keep_attention(context: Any, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    """Keep what attention functions return, and compute everything else again."""
    return CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@keep_results
def is_attention(operator: Any) -> bool:
    """Return whether an operator takes queries, keys and values by its schema, whatever its name is."""
    schema = getattr(operator, "_schema", None)  # operators of higher order, such as FlexAttention, have none
    names = set() if schema is None else {argument.name for argument in schema.arguments}
    return names >= {"query", "key", "value"} or names >= {"q", "k", "v"}


# One new token


def takes_new_token(module: nn.Module, heads: Any, query, key, mask: Any, dropout: float | None) -> bool:
    """Return whether to compute one new token from the cached keys, without virtual ones (`attend_new_token`).

    On a CPU that is slower where few tokens are cached. Next to cached tokens there always is a mask: for P queries
    Transformers makes one."""
    if core_of(module.config) not in ("sdpa", SDPA_IN_BLOCKS):
        return False
    if query.shape[2] > 1 or dropout or mask is None or len(mask.shape) != 4 or not heads.collapses_per_head:
        return False
    if query.device.type != "cpu":
        return True
    if is_for_any_length():
        return False  # comparing lengths would specialize the program
    return key.shape[2] >= LEAST_CACHED and len(query) * key.shape[2] >= LEAST_CACHED_OF_ROWS


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return probabilities over the keys of scores [batch, heads, P of the query, P of the keys, K], in float32 or 64.

    `mask` is boolean or additive, [batch or 1, heads or 1, P of the query, K * P]."""
    num_pseudo_heads, num_keys = scores.shape[-2:]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    mask = mask.unflatten(-1, (num_keys, num_pseudo_heads)).transpose(-1, -2)
    if mask.dtype == torch.bool:  # padding sees nothing, and a row of -inf would become NaN
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return (scores - scores.logsumexp(dim=(-2, -1), keepdim=True)).exp()


# Caches


def keep_window_edge(cache: Cache | None, window: int | None) -> None:
    """Let the empty sliding layers of a cache keep one token more than a window of `window` tokens.

    A sliding layer of W tokens keeps W - 1 and returns them before the N new ones, so that the first of these sees W.
    But W * P virtual tokens reach from pseudo-head p of token n back to pseudo-head p + 1 of token n - W.

    Raise a ValueError for a layer that is filled already."""
    for layer in getattr(cache, "layers", ()):
        if not getattr(layer, "is_sliding", False):
            continue
        is_static = not hasattr(layer, "sliding_window")  # a `StaticSlidingWindowLayer` has `max_cache_len` instead
        field = "max_cache_len" if is_static else "sliding_window"
        if getattr(layer, field) != window:
            continue
        # A static layer is allocated anew below, and a dynamic one drops keys once it has W - 1.
        longest = 0 if is_static else window - 1
        if layer.get_seq_length() > longest:
            raise ValueError("The filled cache keeps one token too few for this model: pass an empty cache, or none.")
        setattr(layer, field, window + 1)
        if hasattr(layer, "_sliding_window_tensor"):
            layer._sliding_window_tensor.fill_(window + 1)
        if is_static and layer.is_initialized:  # allocated already, one token too short
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])
