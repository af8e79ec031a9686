# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""The fields of a strict dataclass that holds an attention kind's options: a default, a test, and words for what the
test asks. `IHAConfig.options_of` reads them."""

from collections.abc import Callable
from typing import Any

from huggingface_hub.dataclasses import validated_field


def option(default: Any, expected: str, is_valid: Callable[[Any], bool]) -> Any:
    """A field of an options dataclass. `expected` completes the sentence "it must be ..."."""

    def validate(value: Any) -> None:
        if not is_valid(value):
            raise ValueError(f"it must be {expected}")

    return validated_field(validate, default=default, metadata={"expected": expected})


def switch(default: bool) -> Any:
    """A field that is true or false."""
    return option(default, "true or false", lambda value: type(value) is bool)


def is_whole(value: Any, minimum: int = 1) -> bool:
    """Whether a value is a whole number, at least `minimum`. (True and False are not.)"""
    return type(value) is int and value >= minimum
