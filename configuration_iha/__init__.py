# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Hold named configurations, one JSON file each. The class `IHAConfig` is in `modeling_iha.configuration_iha`.

`AutoConfig.from_pretrained` reads a file, and `IHAConfig.from_preset` finds it by name. README.md says where each is
from."""

from pathlib import Path

from modeling_iha import IHAConfig


PRESETS = sorted(path.stem for path in Path(__file__).parent.glob("*.json"))

__all__ = ["PRESETS", "IHAConfig"]
