# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Options of an attention kind as a strict dataclass: fields with a default, a test, and words for what the test
asks."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassFieldValidationError


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


@strict
@dataclass
class NoOptions:
    """A kind without options."""


def parse_options(options_class: type, kind: str, options: Any) -> Any:
    """The options of a kind as its dataclass. Raises a ValueError that names option, value, and what is allowed."""
    if not isinstance(options, dict):
        raise ValueError(f"attention_options[{kind!r}]={options!r}; it must be a dict of options, perhaps empty.")
    known = {field.name: field for field in fields(options_class)}
    for name, value in options.items():
        if name not in known:
            allowed = ", ".join(map(repr, known)) or "none"
            raise ValueError(f"attention_options[{kind!r}] has the option {name!r}; options of this kind: {allowed}.")
        try:
            options_class(**{name: value})
        except StrictDataclassFieldValidationError as error:
            expected = known[name].metadata["expected"]
            raise ValueError(f"attention_options[{kind!r}] has {name}={value!r}; it must be {expected}.") from error
    return options_class(**options)
