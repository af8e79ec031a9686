"""Name the presets and the fields to change in one, without PyTorch, whose import takes seconds."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from iha.errors import UserError
from iha.files import parse_yaml


def fields_of(changes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of FIELD=VALUE words, with values of JSON or else of YAML. Raise `UserError`."""
    fields = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"{change}: expected FIELD=VALUE.")
        try:
            fields[name] = json.loads(value)  # which reads 1e-5 as a number
        except ValueError:
            fields[name] = parse_yaml(value, change, Any)
    return fields


def preset_names() -> list[str]:
    """Return the names of the presets, without importing the package that holds them, which imports PyTorch."""
    package = find_spec("configuration_iha")
    return sorted(path.stem for path in Path(str(package and package.origin)).parent.glob("*.json"))
