# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Show an object with other attributes than its own."""

from typing import Any


class Overlay:
    """Show an object, such as a config, with the attributes of `overrides` instead of its own, for reading."""

    def __init__(self, target: Any, **overrides):
        self._target = target
        self._overrides = overrides

    def __getattr__(self, name: str) -> Any:
        if name in ("_target", "_overrides"):
            raise AttributeError(name)  # `copy` and `pickle` ask an object that has no attributes yet
        return self._overrides[name] if name in self._overrides else getattr(self._target, name)
