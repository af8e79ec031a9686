# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Let vLLM serve models of `interleave_heads` and `pair_heads`, and `IHAForCausalLM` of the kinds in checks.py."""

import logging
from importlib.util import find_spec


VLLM = ("0.31", "0.32")
# Tasks of Transformers, with the class of model.py that serves interleaved models of a task.
SERVED = {"CAUSAL_LM": "InterleavedForCausalLM", "IMAGE_TEXT_TO_TEXT": "InterleavedForImageTextToText"}
# Their models are registered so that they are rejected in one line.
REFUSED = ("MULTIMODAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")


def interleaved_names(task: str) -> list[str]:
    """Return the architectures of a task, as `interleaved_class` of modeling_iha names the classes of models.

    The longer name is that of a model type that uses the models of another type."""
    from transformers.models.auto import configuration_auto, modeling_auto

    names = []
    for model_type, base in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
        config = configuration_auto.CONFIG_MAPPING_NAMES.get(model_type)
        names += [f"Interleaved{base}", f"Interleaved{base}_of_{config}"]
    return names


def architectures() -> dict[str, str]:
    """Return the served architectures, each with the name of its class in model.py."""
    names = {name: own for task, own in SERVED.items() for name in interleaved_names(task)}
    return {**names, "IHAForCausalLM": "IHAForCausalLM"}


def register() -> None:
    """Register the models with vLLM, which calls this in each of its processes.

    An exception here would end every server of the environment, whatever it serves. Another vLLM, and a modeling_iha
    that cannot be imported, get a warning."""
    import vllm

    warn = logging.getLogger("vllm.plugins").warning
    if not vllm.__version__.startswith(tuple(f"{version}." for version in VLLM)):
        known = " and ".join(VLLM)
        warn(
            "vllm_iha is made for vLLM %s, and this is %s, so it registers no model. Install vLLM %s to serve "
            "interleaved heads.",
            known,
            vllm.__version__,
            VLLM[-1],
        )
        return
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from .checks import InterleavedModelConfig

    if find_spec("modeling_iha"):  # It registers its classes. --trust-remote-code brings the checkpoint's own.
        try:
            import modeling_iha  # noqa: F401
        except Exception as error:
            warn("vllm_iha registers no model, because modeling_iha cannot be imported: %s", error)
            return
    refused = {name: "InterleavedForCausalLM" for task in REFUSED for name in interleaved_names(task)}
    for architecture, name in (refused | architectures()).items():
        ModelRegistry.register_model(architecture, f"vllm_iha.model:{name}")
        # vLLM has no public way to register the checks of a model. It reads this dictionary by architecture, and a
        # second registration writes the same.
        MODELS_CONFIG_MAP[architecture] = InterleavedModelConfig
