# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Name the versions of Transformers that this code runs on. `setup.py` reads this too.

From 5.24 on a cache is called `cache` in arguments and outputs. Earlier versions call it `past_key_values`, and by
`cache` they mean the pages of continuous batching."""

from importlib import metadata
from inspect import signature
from typing import Any

from packaging.version import Version
from transformers.utils import logging
from transformers.utils.versions import require_version


OLDEST = "5.17"
FIRST_UNTESTED = "5.25"

# This comes before any other import of Transformers, so that a version that cannot run this code gives this error.
require_version(f"transformers>={OLDEST},<6")
if Version(metadata.version("transformers")) >= Version(FIRST_UNTESTED):
    logging.get_logger().warning_once(  # for the package and a checkpoint together, because both use this logger
        f"This model's code was tested with Transformers before {FIRST_UNTESTED}, and "
        f'{metadata.version("transformers")} is installed: if it fails, pip install "transformers<{FIRST_UNTESTED}".'
    )

from transformers.masking_utils import create_causal_mask


IS_FROM_5_24 = "cache" in signature(create_causal_mask).parameters
CACHE = "cache" if IS_FROM_5_24 else "past_key_values"


def pop_cache(kwargs: dict) -> Any:
    """Remove the cache, by either of its names, from the keywords of a call, and return it or `None`."""
    caches = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
    return caches[0] if caches[1] is None else caches[1]
