# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define the base of the options of attention kinds, which are fields of strict dataclasses.

A field has a default, a test, and words for what the test expects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict, validated_field
from transformers.models.llama.configuration_llama import LlamaConfig


@strict
@dataclass
class KindOptions:
    """Hold the options of an attention kind."""

    example: ClassVar[dict] = {}  # options other than the defaults, for tests and documents

    def check(self, config: LlamaConfig, kind: str) -> None:
        """Raise a ValueError for an `IHAConfig` whose layers of the kind cannot be built or would ignore a field."""


def option(default: Any, expected: str, is_valid: Callable[[Any], bool]) -> Any:
    """Return a field of an options dataclass. `expected` completes the sentence "it must be ..."."""

    def validate(value: Any) -> None:
        if not is_valid(value):
            raise ValueError(f"it must be {expected}")

    return validated_field(validate, default=default, metadata={"expected": expected})


def switch(default: bool) -> Any:
    """Return a field that is true or false."""
    return option(default, "true or false", lambda value: type(value) is bool)


def is_whole(value: Any, minimum: int = 1) -> bool:
    """Return whether a value is an integer of at least `minimum`, and not True or False."""
    return type(value) is int and value >= minimum
