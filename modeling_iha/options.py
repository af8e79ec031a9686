# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define the base of the options of attention kinds, which are strict dataclasses."""

from dataclasses import dataclass
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig


@strict
@dataclass
class KindOptions:
    """Hold the options of an attention kind; this class has none."""

    example: ClassVar[dict] = {}  # options other than the defaults, for tests and documents

    def check(self, config: LlamaConfig, kind: str) -> None:
        """Raise a ValueError for an `IHAConfig` whose layers of the kind cannot be built or would ignore a field."""
