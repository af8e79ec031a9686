# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Let vLLM serve models of `interleave_heads`, and checkpoints whose attention kinds are "iha" and "mha"."""

from importlib.util import find_spec


ARCHITECTURES = ("InterleavedForCausalLM", "IHAForCausalLM")


def register() -> None:
    """Register the models with vLLM, which calls this in each of its processes."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .checks import InterleavedModelConfig

    if find_spec("modeling_iha"):  # --trust-remote-code brings the checkpoint's own.
        from transformers import AutoConfig

        from modeling_iha import IHAConfig

        class ServedConfig(IHAConfig):
            """Say in one line what is wrong with a config.json, where pydantic would wrap a ValueError in several."""

            @classmethod
            def from_dict(cls, *arguments, **options):
                try:
                    return IHAConfig.from_dict(*arguments, **options)
                except Exception as error:
                    raise NotImplementedError(f"config.json: {' '.join(str(error).split())}") from error

        AutoConfig.register(IHAConfig.model_type, ServedConfig, exist_ok=True)
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"vllm_iha.model:{architecture}")
        MODELS_CONFIG_MAP[architecture] = InterleavedModelConfig
