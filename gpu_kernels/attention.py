# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels for whatever input: `model.base_model.attention_form = attention` takes them where they fit, and the
stock form elsewhere, which it says once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from gpu_kernels import fused_triton
from gpu_kernels.decode_triton import decode_attention
from gpu_kernels.fused_triton import fused_attention
from modeling_iha.absorbed_decode import absorbed_attention
from modeling_iha.attention_iha import collapse, interleave, mix
from modeling_iha.collapse_first import IHAWeights, rotate
from modeling_iha.window_blocks import window_attention


logger = logging.get_logger(__name__)

# Larger ones are not tested; wider heads, in bytes, take more shared memory than a multiprocessor has.
MAX_PSEUDO_HEADS, MAX_HEAD_DIM, MAX_HEAD_BYTES = 32, 128, 256
# Where a GPU takes the kernels without being asked for them: its compute capability and P, and the measurement. An
# entry is added when `make gpu` has shown the kernels to be the fastest form in every case of that P: of "layer" and
# "kernels", forward and backward, and of "decode". It is empty: no GPU has run them.
MEASURED_TO_WIN: dict[tuple[tuple[int, int], int], str] = {}


def obstacle(value: torch.Tensor, weights: IHAWeights) -> str | None:
    """Why the kernels cannot take values [batch, G, N, head_dim] and the weights; `None` where they can."""
    num_pseudo_heads, head_dim = weights.collapse.shape[1], value.shape[-1]
    if fused_triton.triton is None:
        return "Triton is not installed"
    if value.device.type == "cpu" and not fused_triton.triton.knobs.runtime.interpret:
        return "the tensors are on the CPU"
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the dtype is {value.dtype}"
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}, where it must be even and at most {MAX_HEAD_DIM}"
    if head_dim * value.itemsize > MAX_HEAD_BYTES:
        return f"a head has {head_dim * value.itemsize} bytes, where at most {MAX_HEAD_BYTES} fit"
    if num_pseudo_heads > MAX_PSEUDO_HEADS:
        return f"there are {num_pseudo_heads} pseudo-heads, where at most {MAX_PSEUDO_HEADS} fit"
    return None


def stock_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: IHAWeights,
    scaling: float,
    window: int | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """IHA, Algorithm 1, steps 2 to 5, as written, on SDPA: arguments and result of `fused_attention`. Documents
    without a window take a dense mask."""
    num_pseudo_heads = weights.collapse.shape[1]
    states = [mix(base, alpha) for base, alpha in zip((query, key, value), weights)]
    if weights.rotation is not None:
        cos, sin = (table.to(query.dtype).unsqueeze(1) for table in weights.rotation)
        states[:2] = [rotate(virtual, cos, sin) for virtual in states[:2]]
    states = [interleave(virtual).to(value.dtype) for virtual in states]
    length = states[0].shape[2]
    if document_ids is not None:
        document_ids = document_ids.repeat_interleave(num_pseudo_heads, dim=1)
    layer = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    if window is not None and window * num_pseudo_heads < length:
        if document_ids is None:
            document_ids = torch.zeros(1, length, dtype=torch.int, device=query.device)
        options = {"sliding_window": window * num_pseudo_heads, "scaling": scaling}
        output, _ = window_attention(sdpa_attention_forward, document_ids, layer, *states, None, **options)
    else:
        mask = None
        if document_ids is not None:
            mask = (document_ids[:, :, None] == document_ids[:, None, :]).tril_().unsqueeze(1)
        output, _ = sdpa_attention_forward(layer, *states, mask, scaling=scaling)
    return collapse(output, weights.collapse, num_pseudo_heads)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: IHAWeights,
    scaling: float,
    window: int | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fused_attention`, or `decode_attention` for one new token; with one warning where a kernel does not fit,
    `stock_attention` and `absorbed_attention`."""
    reason = obstacle(value, weights)
    kernel, stock = fused_attention, stock_attention
    if query.shape[2] == 1:
        kernel, stock = decode_attention, absorbed_attention
        if reason is None and torch.is_grad_enabled():
            reason = "the kernel for one new token has no backward pass"
    if reason is not None:
        logger.warning_once(f"The fused kernels of gpu_kernels are not used, the stock form is: {reason}.")
    form = kernel if reason is None else stock
    return form(query, key, value, weights, scaling, window, document_ids)


def default_form(model: torch.nn.Module) -> Callable | None:
    """The `attention_form` of an IHA model on its device: `attention` where it was measured to win, else `None`."""
    if model.device.type != "cuda":
        return None
    where = torch.cuda.get_device_capability(model.device), model.config.num_pseudo_heads
    return attention if where in MEASURED_TO_WIN else None
