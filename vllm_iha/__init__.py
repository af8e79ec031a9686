# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Let vLLM serve models of `interleave_heads` and `pair_heads`, and `IHAForCausalLM` of the kinds in checks.py."""

from importlib.util import find_spec


ARCHITECTURES = ("InterleavedForCausalLM", "InterleavedForImageTextToText", "IHAForCausalLM")
REFUSED = "InterleavedForMultimodalLM"  # registered so that it is refused in one line


def register() -> None:
    """Register the models with vLLM, which calls this in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .checks import InterleavedModelConfig

    if find_spec("modeling_iha"):  # It registers its classes. --trust-remote-code brings the checkpoint's own.
        import modeling_iha  # noqa: F401
    for architecture in (*ARCHITECTURES, REFUSED):
        name = architecture if architecture in ARCHITECTURES else ARCHITECTURES[0]
        ModelRegistry.register_model(architecture, f"vllm_iha.model:{name}")
        MODELS_CONFIG_MAP[architecture] = InterleavedModelConfig
