# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend causally within sliding windows and documents on SDPA, without a dense mask.

Windows go through the core in blocks (`window_attention`), documents one by one. In an "iha" layer the cost is
O(N W P^2). On a GPU in half precision one call of PyTorch's FlashAttention does both.
"""

import inspect
from collections.abc import Callable

import torch
from transformers.models.llama.modeling_llama import repeat_kv

from .configuration_iha import IHAConfig
from .interleaving import window_attention


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of PyTorch without it
    varlen_attn = None


def has_varlen(config: IHAConfig, states: torch.Tensor) -> bool:
    """Return whether `varlen_attn` computes the attention of the states after autocast.

    It takes half precision on a GPU from Ampere on, heads of 8 to 256 entries by eights, and no dropout."""
    if varlen_attn is None or states.device.type != "cuda" or config.attention_dropout:
        return False
    if config.head_dim % 8 or config.head_dim > 256 or torch.cuda.get_device_capability(states.device) < (8, 0):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else states.dtype
    allowed = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()  # as `sdpa_kernel` says
    return allowed and dtype in (torch.float16, torch.bfloat16)


def maskless_attention(
    core: Callable,
    document_bounds: tuple[torch.Tensor, int] | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, L, H, head_dim] of attention within documents and windows.

    Query v sees the keys u of its own document with v - sliding_window < u <= v.

    Args:
        core: an attention function of Transformers that takes a boolean mask.
        document_bounds: the starts of documents among the batch * L tokens of all rows and the last end, int32
            [documents + 1], and the longest length; `None` where every row is one document.
        query, key, value: [batch, H or G, L, head_dim].
    """
    if document_bounds is None:
        return window_attention(core, module, query, key, value, None, sliding_window, **kwargs)
    if has_varlen(module.config, query):
        return varlen_attention(document_bounds, module, query, key, value, sliding_window, **kwargs)
    # The gradient of a split is one concatenation; that of each slice would be a tensor as long as all documents.
    lengths = document_bounds[0].diff().tolist()
    documents = zip(*(states.transpose(0, 1).flatten(1, 2).split(lengths, dim=1) for states in (query, key, value)))
    outputs = [
        window_attention(core, module, q[None], k[None], v[None], None, sliding_window, **kwargs)[0]
        for q, k, v in documents
    ]
    return torch.cat(outputs, dim=1).view(query.shape[0], query.shape[2], *outputs[0].shape[2:]), None


def varlen_attention(
    document_bounds: tuple[torch.Tensor, int],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute `maskless_attention` by one call of FlashAttention on the tokens of all rows."""
    bounds, longest = document_bounds
    batch, length = query.shape[0], query.shape[2]
    options: dict = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:
        key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
    # Autocast leaves rotated queries and keys in float32, and does not reach this operator.
    query, key, value = (states.to(value.dtype).transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    output = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    return output.unflatten(0, (batch, length)), None
