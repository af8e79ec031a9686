# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Check a model and vLLM's options before a worker starts or weights are loaded."""

import math

from huggingface_hub.errors import StrictDataclassError
from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from . import architectures


KERNEL_BLOCK = 32  # The CPU kernel takes blocks of a multiple of this many keys; 16 would do on a GPU.
DEFAULT_BLOCK = 128  # vLLM's own on a CPU
# `served_by_vllm` of `iha.kinds` says the same. The plugin imports nothing of the package, because it also serves
# checkpoints with their own code where the package is missing.
KINDS = ("mha", "iha", "paired_heads")
LOGIT_FACTORS = ("lm_head_multiplier", "output_multiplier")  # of Falcon H1 and Muse Glimmer
WITH_IMAGES = ("llava",)  # model types of bases
# Their frequencies are the same at every length, as the keys in a cache need.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class InterleavedModelConfig(VerifyAndUpdateConfig):
    """Reject what the plugin cannot serve, and set the block size."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Set the block size. Raise a NotImplementedError of one line for what the plugin cannot serve.

        It is no ValueError, because Pydantic would print that in several lines."""
        config = vllm_config.model_config.hf_config
        cache_config = vllm_config.cache_config
        try:
            config.validate()  # vLLM's options have replaced fields since the config was read and checked.
        except StrictDataclassError as error:
            raise NotImplementedError(
                f"{error.__cause__} Correct config.json, or leave out the option that changed it (--hf-overrides, "
                "--disable-sliding-window)."
            ) from error
        # A block must hold whole tokens (a multiple of P virtual tokens) and suit the kernel (a multiple of 32). A
        # layer without virtual tokens stores as many tokens in a block of the same bytes.
        step = math.lcm(KERNEL_BLOCK, vllm_config.model_config.hf_text_config.num_pseudo_heads)
        if not cache_config.user_specified_block_size:
            cache_config.block_size = step * math.ceil(DEFAULT_BLOCK / step)
            cache_config.user_specified_block_size = True  # so that the platform keeps it
        if message := refused_model(vllm_config):
            raise NotImplementedError(f"{message}: run this model by Transformers.")
        if message := refused_option(vllm_config, step):
            raise NotImplementedError(message)


def refused_model(vllm_config: VllmConfig) -> str | None:
    """Return what in a model the plugin cannot serve, or `None`."""
    model_config = vllm_config.model_config
    config = vllm_config.model_config.hf_text_config
    whole = model_config.hf_config
    architecture = whole.architectures[0]
    if architecture not in architectures():
        return f"{architecture} was not tested in vLLM, which serves decoders of text, and of images and text"
    if model_config.is_multimodal_model and whole.model_type not in WITH_IMAGES:
        return f"Images were tested in vLLM with {', '.join(WITH_IMAGES)} alone, and this is {whole.model_type}"
    if model_config.is_multimodal_model and model_config.is_moe:
        return "A model of images with experts does not load in vLLM"
    if other_kinds := sorted(set(getattr(config, "attention_kinds", ())) - set(KINDS)):
        served = ", ".join(map(repr, KINDS))
        return f"attention_kinds holds {', '.join(map(repr, other_kinds))}, and vLLM serves {served}"
    for field in LOGIT_FACTORS:
        if getattr(config, field, 1.0) != 1.0:
            return f"{field}={getattr(config, field)} of the logits is not served by vLLM"
    if getattr(config, "mlp_gate_groups", None) is not None:
        return f"mlp_gate_groups={config.mlp_gate_groups} is not served by vLLM"
    for field in ("output_gate", "exclusive_attention"):
        if architecture == "IHAForCausalLM" and getattr(config, field, None):
            return f"{field}={getattr(config, field)!r} is not served by vLLM"
    if architecture == "IHAForCausalLM" and 0 in (getattr(config, "no_rope_layers", None) or ()):
        return "no_rope_layers is not served by vLLM"
    if architecture == "IHAForCausalLM" and "sliding_attention" in (getattr(config, "rope_parameters", None) or {}):
        return "rope_parameters of each layer type are not served by vLLM"
    if getattr(config, "kv_lora_rank", None):
        return "Multi-head latent attention caches no keys that interleaved heads could mix"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        return f"layer_types holds {', '.join(map(repr, others))}, which was not tested in vLLM"
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in [each for each in parameters.values() if isinstance(each, dict)] or [parameters]:
        if (rope_type := each.get("rope_type", "default")) not in ROPE_TYPES:
            return f"rope_type={rope_type!r}, and vLLM serves {', '.join(map(repr, ROPE_TYPES))}"
    head_dim = model_config.get_head_size()
    head_sizes = CPUAttentionBackend.get_supported_head_sizes()
    if current_platform.is_cpu() and head_dim not in head_sizes:
        return f"head_dim={head_dim}, and vLLM's attention on a CPU takes {', '.join(map(str, head_sizes))}"
    return None


def refused_option(vllm_config: VllmConfig, step: int) -> str | None:
    """Return a line on an option that cannot be served, or `None`. Blocks must hold a multiple of `step` tokens."""
    model_config = vllm_config.model_config
    cache_config = vllm_config.cache_config
    parallel_config = vllm_config.parallel_config
    config = model_config.hf_text_config
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_theta = parameters.get("rope_theta")
    given = getattr(config, "rope_theta", rope_theta)
    if given != rope_theta:
        return (
            f"rope_theta={given} has no effect next to rope_parameters={parameters}: set it in rope_parameters, and "
            "repeat the other keys."
        )
    if isinstance(model_config.hf_overrides, dict) and "mixing_scale" in model_config.hf_overrides:
        return "mixing_scale belongs to the saved weights, which no option changes: leave it out of --hf-overrides."
    if model_config.enable_sleep_mode:
        return "Sleep mode was not tested on interleaved heads: leave out --enable-sleep-mode."
    if parallel_config.world_size > 1 or parallel_config.decode_context_parallel_size > 1:
        return (
            "Interleaving mixes all heads of a layer, and pipeline stages were not tested: leave out "
            "--tensor-parallel-size, --pipeline-parallel-size and the context-parallel sizes."
        )
    if vllm_config.weight_transfer_config is not None:
        return "A transfer of weights was not tested on interleaved heads: leave out --weight-transfer-config."
    if model_config.runner_type != "generate":
        return "vLLM serves interleaved heads for generation alone: leave out --runner and --convert."
    if model_config.quantization is not None:
        return f"quantization={model_config.quantization!r} was not tested: serve the unquantized checkpoint."
    if vllm_config.lora_config is not None:
        return "vLLM's LoRA would leave out an adapter's mixing weights: serve the merged model (merge_and_unload)."
    if vllm_config.speculative_config is not None:
        return "Speculative decoding was not tested on interleaved heads: leave out --speculative-config."
    if vllm_config.kv_transfer_config is not None or cache_config.kv_offloading_size is not None:
        return (
            "A connector moves one key for each token, and interleaved heads have num_pseudo_heads of them: leave out "
            "--kv-transfer-config and --kv-offloading-size."
        )
    if cache_config.cache_dtype != "auto":
        return f"kv_cache_dtype={cache_config.cache_dtype!r} was not tested: leave out --kv-cache-dtype."
    if cache_config.block_size % step:
        return f"block_size={cache_config.block_size} is not a multiple of {step}: leave out --block-size."
    return None
