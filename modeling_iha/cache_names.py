# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Take caches by either of Transformers' names, and hand them on by the name of the installed version.

From Transformers 5.24 on a cache is called `cache`: in arguments, in the inputs of `generate` and in outputs. Earlier
versions call it `past_key_values`, and by `cache` they mean the pages of continuous batching. Here it is `cache`, and
pages are known by their class alone.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from transformers.masking_utils import create_causal_mask


IS_FROM_5_24 = "cache" in signature(create_causal_mask).parameters  # whether this is Transformers 5.24 or a later one
# The name by which this version of Transformers passes a cache.
CACHE = "cache" if IS_FROM_5_24 else "past_key_values"


def pop_cache(kwargs: dict) -> Any:
    """Remove the cache, of either name, from the keywords of a call, and return it or `None`.

    Raise a ValueError if both names hold one."""
    cache = kwargs.pop("cache", None)
    former = kwargs.pop("past_key_values", None)
    if cache is not None and former is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass one of them.")
    return former if cache is None else cache


def takes_cache(function: Callable) -> Callable:
    """Let a function with an argument `cache` take it by the name `past_key_values` too."""

    @wraps(function)
    def call(*args, **kwargs):
        cache = pop_cache(kwargs)
        return function(*args, **kwargs) if cache is None else function(*args, cache=cache, **kwargs)

    return call
