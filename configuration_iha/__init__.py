# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Named configurations as data: one JSON file each, which `AutoConfig.from_pretrained` reads and
`IHAConfig.from_preset` finds by name. README.md says where each comes from."""

from pathlib import Path

from modeling_iha import IHAConfig


PRESETS = sorted(path.stem for path in Path(__file__).parent.glob("*.json"))

__all__ = ["PRESETS", "IHAConfig"]
