"""Stand in for FlashAttention in a model without data, so that PyTorch can count what attention computes and keeps.

PyTorch counts the products of SDPA for all pairs of a query and a key. The attention function "counted_attention"
knows causality and windows, and counts the pairs that they leave. As FlashAttention it keeps queries, keys, values,
output and log-sum-exp for the backward pass, which computes the scores again.
"""

import math
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from iha.errors import UserError
from modeling_iha.interleaved_attention import has_virtual_heads


NAME = "counted_attention"


# `recompute_virtual_tokens` keeps the output of operators with arguments of these names.
@torch.library.custom_op("flash_attn_counted::forward", mutates_args=())
def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output [batch, N, H, features of values] and the log-sum-exp [batch, H, N]."""
    raise NotImplementedError("Models without data alone call this.")


@forward.register_fake
def _(query, key, value, pairs):
    batch, heads, length, _ = query.shape
    output = value.new_empty(batch, length, heads, value.shape[-1])
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("flash_attn_counted::backward", mutates_args=())
def backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    raise NotImplementedError("Models without data alone call this.")


@backward.register_fake
def _(gradient, query, key, value, pairs):
    return tuple(torch.empty_like(states, memory_format=torch.contiguous_format) for states in (query, key, value))


def keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, ctx.pairs = inputs
    ctx.save_for_backward(query, key, value, *output)


def differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple:
    query, key, value, *_ = ctx.saved_tensors
    return *torch.ops.flash_attn_counted.backward(gradient, query, key, value, ctx.pairs), None


forward.register_autograd(differentiate, setup_context=keep)


def forward_flops(query: tuple, key: tuple, value: tuple, pairs: int, **kwargs) -> int:
    """Return the FLOPs of query-key and weight-value products, two for each multiply-add."""
    batch, heads = query[:2]
    return 2 * batch * heads * pairs * (query[-1] + value[-1])


def backward_flops(gradient: tuple, query: tuple, key: tuple, value: tuple, pairs: int, **kwargs) -> int:
    """Return the FLOPs of the scores, which are computed again, and of four products of gradients."""
    batch, heads = query[:2]
    return 2 * batch * heads * pairs * (3 * query[-1] + 2 * value[-1])


def grouped_mm_flops(a: tuple, b: tuple, *args, out_shape: tuple, **kwargs) -> int:
    """Return the FLOPs of the experts of a mixture: each row meets the matrix of its expert, or its gradient."""
    products = a[0] * a[1] * b[-1] if len(a) == 2 else a[0] * a[1] * a[2] * b[-1]
    return 2 * products


FLOPS = {
    torch.ops.flash_attn_counted.forward: forward_flops,
    torch.ops.flash_attn_counted.backward: backward_flops,
    torch.ops.aten._grouped_mm: grouped_mm_flops,
}


def visible_pairs(length: int, window: int | None = None, chunk: int | None = None) -> int:
    """Count the pairs (v, u) of `length` tokens with u <= v.

    With a window v sees the keys u with v - window < u, and with chunks those of its own chunk."""
    if chunk is not None and chunk < length:
        return length // chunk * visible_pairs(chunk) + visible_pairs(length % chunk)
    span = length if window is None else min(window, length)
    return span * (span + 1) // 2 + (length - span) * span


def reach(module: nn.Module, window: int | None) -> dict[str, int | None]:
    """Return the window or the chunk of an attention module in the tokens that it attends over.

    Some models have them in their masks alone, and not in the arguments of the attention function."""
    config: Any = module.config
    virtual = config.num_pseudo_heads if has_virtual_heads(module) else 1
    types = getattr(config, "layer_types", None)
    layer_type = types[module.layer_idx] if types else None
    if layer_type == "chunked_attention":
        return {"chunk": config.attention_chunk_size * virtual}
    if window is None and layer_type == "sliding_attention":
        window = config.sliding_window * virtual
    return {"window": window}


def attend(
    module: nn.Module, query, key, value, attention_mask, sliding_window=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Stand in for an attention function of Transformers, for rows without padding."""
    length, num_keys = query.shape[2], key.shape[2]
    is_causal = kwargs.get("is_causal") is not False and getattr(module, "is_causal", True) is not False
    pairs = visible_pairs(length, **reach(module, sliding_window)) if is_causal else length * num_keys
    states = query.to(value.dtype), key.to(value.dtype), value
    return torch.ops.flash_attn_counted.forward(*states, pairs)[0], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


# Rows that processes share (sft/sequence_parallel.py)


@torch.library.custom_op("flash_attn_counted::exchange", mutates_args=())
def exchange(states: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Send states to other processes, and return what comes from them and the own part."""
    raise NotImplementedError("Models without data alone call this.")


@exchange.register_fake
def _(states, shape):
    return states.new_empty(shape)


def keep_shape(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.shape = inputs[0].shape


def exchange_back(ctx: Any, gradient: torch.Tensor) -> tuple:
    return torch.ops.flash_attn_counted.exchange(gradient.contiguous(), ctx.shape), None


exchange.register_autograd(exchange_back, setup_context=keep_shape)


def attend_to_shared_row(
    num_processes: int, module: nn.Module, query, key, value, attention_mask, sliding_window=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Stand in for a process in the middle of a row: with a window it gets keys from others, and else heads."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    total = query.shape[2] * num_processes
    window = reach(module, sliding_window)["window"]
    if window is None or window >= total:
        return attend_by_heads(query, key, value, num_processes, total), None
    return attend_by_neighbours(query, key, value, total, window), None


def attend_by_heads(query, key, value, num_processes: int, total: int) -> torch.Tensor:
    """Return the output of the own tokens, after attention to the whole row with a share of the heads."""
    heads, groups = query.shape[1], key.shape[1]
    shared = math.lcm(num_processes, groups)  # with fewer key heads than processes, some have the same ones
    if heads % shared:
        raise UserError(f"{num_processes} processes cannot share {heads} heads of {groups} key heads.")
    states = [query, *(each.repeat_interleave(shared // groups, dim=1) for each in (key, value))]

    def exchanged(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.ops.flash_attn_counted.exchange(tensor.clone(), [1, *shape])

    row = [exchanged(each, each.shape[1] // num_processes, total, each.shape[3]) for each in states]
    output, _ = torch.ops.flash_attn_counted.forward(*row, visible_pairs(total))
    return exchanged(output, query.shape[2], heads, value.shape[3])


def attend_by_neighbours(query, key, value, total: int, window: int) -> torch.Tensor:
    """Return the output of the own tokens, after the keys and values before them have come from other processes."""
    length = query.shape[2]
    own = torch.cat((key, value), dim=-1)
    before = min(window, total - length)
    shape = [*own.shape[:2], before, own.shape[3]]
    states = torch.cat((torch.ops.flash_attn_counted.exchange(own.clone(), shape), own), dim=2)
    key, value = states.split((key.shape[-1], value.shape[-1]), dim=-1)
    return torch.ops.flash_attn_counted.forward(query, key, value, length * window)[0]


@cache  # a name is registered once and stays: no public method removes it
def of_shared_rows(num_processes: int) -> str:
    """Register the attention of rows that processes share, and return its name."""
    name = f"{NAME}_of_{num_processes}_processes"
    AttentionInterface.register(name, partial(attend_to_shared_row, num_processes))
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name
