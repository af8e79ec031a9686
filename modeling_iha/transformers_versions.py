# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Name the versions of Transformers that this code runs on, and what they call a cache. `setup.py` reads this too.

From Transformers 5.24 on a cache is called `cache`: in arguments, in the inputs of `generate` and in outputs. Earlier
versions call it `past_key_values`, and by `cache` they mean the pages of continuous batching."""

import warnings
from collections.abc import Callable
from functools import wraps
from importlib import metadata
from inspect import signature
from typing import Any

from packaging.version import Version
from transformers.utils.versions import require_version


OLDEST = "5.17"
FIRST_UNTESTED = "5.25"

# This comes before any other import of Transformers, so that a version that cannot run this code gives this error.
require_version(f"transformers>={OLDEST},<6")
if Version(metadata.version("transformers")) >= Version(FIRST_UNTESTED):
    warnings.warn(
        f"This model's code was tested with Transformers before {FIRST_UNTESTED}, and "
        f"{metadata.version('transformers')} is installed: if it fails, pip install "
        f'"transformers<{FIRST_UNTESTED}".'
    )

from transformers.masking_utils import create_causal_mask


IS_FROM_5_24 = "cache" in signature(create_causal_mask).parameters
CACHE = "cache" if IS_FROM_5_24 else "past_key_values"


def pop_cache(kwargs: dict) -> Any:
    """Remove the cache, of either name, from the keywords of a call, and return it or `None`."""
    caches = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
    if None not in caches:
        raise ValueError("cache and past_key_values are two names of one argument: pass one of them.")
    return caches[0] if caches[1] is None else caches[1]


def takes_cache(function: Callable) -> Callable:
    """Let a function with an argument `cache` take it by the name `past_key_values` too."""

    @wraps(function)
    def call(*args, **kwargs):
        cache = pop_cache(kwargs)
        return function(*args, **kwargs) if cache is None else function(*args, cache=cache, **kwargs)

    return call
