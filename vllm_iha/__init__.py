# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Let vLLM serve checkpoints whose attention kinds are "iha" and "mha"."""

from importlib.util import find_spec


ARCHITECTURE = "IHAForCausalLM"


def register() -> None:
    """Register the model with vLLM, which calls this in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .checks import IHAModelConfig

    if find_spec("modeling_iha"):
        import modeling_iha  # noqa: F401  It registers the config; --trust-remote-code brings the checkpoint's own.
    ModelRegistry.register_model(ARCHITECTURE, "vllm_iha.model:IHAForCausalLM")
    MODELS_CONFIG_MAP[ARCHITECTURE] = IHAModelConfig
