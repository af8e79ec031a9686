# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Compute in float32 on a CPU that has no instructions for half precision.

PyTorch then multiplies matrices in plain loops. Without AVX-512 a bfloat16 product takes 6 to 80 times as long as a
float32 product, and the backward pass of SDPA 5 times. float16 is as slow on every CPU without AVX512-FP16.
"""

from collections.abc import Callable

import torch


def _is_slow(name: str) -> bool:
    """Return whether oneDNN, which PyTorch asks first, has no products of the dtype ("bf16" or "fp16") on this CPU."""
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return supported is None or not supported()


SLOW_DTYPES = [dtype for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")) if _is_slow(name)]


def product_dtype(states: torch.Tensor) -> torch.dtype:
    """Return the dtype for products of the states: float32 where a CPU is slow in their own dtype."""
    return torch.float32 if states.device.type == "cpu" and states.dtype in SLOW_DTYPES else states.dtype


def in_product_dtype(attend: Callable) -> Callable:
    """Make `attend` compute on states in their `product_dtype`.

    It is a function of queries, keys, values, a mask and keywords that returns outputs and weights."""

    def widened(query, key, value, attention_mask, **kwargs):
        dtype = value.dtype
        products = product_dtype(value)
        if products == dtype:
            return attend(query, key, value, attention_mask, **kwargs)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point():
            attention_mask = attention_mask.to(products)
        # Autocast would convert the states back to half precision.
        with torch.autocast("cpu", enabled=False):
            states = (states.to(products) for states in (query, key, value))
            output, weights = attend(*states, attention_mask, **kwargs)
        return output.to(dtype), None if weights is None else weights.to(dtype)

    return widened
