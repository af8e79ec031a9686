# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Check a model and vLLM's options before a worker starts or weights are loaded."""

import math

import vllm
from huggingface_hub.errors import StrictDataclassError
from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


VLLM = ("0.31", "0.32")
KERNEL_BLOCK = 32  # The CPU kernel takes blocks of a multiple of so many keys; 16 would do on a GPU.
DEFAULT_BLOCK = 128  # vLLM's own on a CPU
# Their frequencies are the same at every length, as the keys in a cache need.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class IHAModelConfig(VerifyAndUpdateConfig):
    """Refuse what the plugin cannot serve, and set the block size."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raise a NotImplementedError of one line.

        Pydantic would wrap a ValueError in several lines."""
        config, cache_config = vllm_config.model_config.hf_config, vllm_config.cache_config
        parallel_config = vllm_config.parallel_config
        try:
            config.validate()  # vLLM's options have replaced fields since the config was read and checked.
        except StrictDataclassError as error:
            raise NotImplementedError(
                f"{error.__cause__} Correct config.json, or leave out the option that changed it (--hf-overrides, "
                "--disable-sliding-window)."
            ) from error
        rope_theta = config.rope_parameters["rope_theta"]
        other_kinds = sorted(set(config.attention_kinds) - {"iha", "mha"})
        rope_type, quantization = config.rope_parameters["rope_type"], vllm_config.model_config.quantization
        head_sizes = CPUAttentionBackend.get_supported_head_sizes()
        # A block of so many virtual tokens holds whole tokens, and as many tokens of an "mha" layer fill a page.
        step = math.lcm(KERNEL_BLOCK, config.num_pseudo_heads) if "iha" in config.attention_kinds else 1
        if not cache_config.user_specified_block_size and step > 1:
            cache_config.block_size = step * math.ceil(DEFAULT_BLOCK / step)
            cache_config.user_specified_block_size = True  # so that the platform keeps it
        refusals = [
            (
                not vllm.__version__.startswith(tuple(f"{version}." for version in VLLM)),
                f"vllm_iha is made for vLLM {' and '.join(VLLM)}, and this is {vllm.__version__}: install vLLM "
                f"{VLLM[-1]}.",
            ),
            (
                other_kinds,
                f"attention_kinds holds {', '.join(map(repr, other_kinds))}; vLLM serves 'iha' and 'mha': use "
                "generate of Transformers for this model.",
            ),
            (
                config.mlp_gate_groups is not None,
                f"mlp_gate_groups={config.mlp_gate_groups} is not served by vLLM: use generate of Transformers.",
            ),
            (
                0 in (getattr(config, "no_rope_layers", None) or ()),
                "no_rope_layers is not served by vLLM: use generate of Transformers.",
            ),
            (
                rope_type not in ROPE_TYPES,
                f"rope_type={rope_type!r}; vLLM serves {', '.join(map(repr, ROPE_TYPES))}: use generate of "
                "Transformers.",
            ),
            (
                getattr(config, "rope_theta", rope_theta) != rope_theta,
                f"rope_theta={getattr(config, 'rope_theta', None)} beside rope_parameters={config.rope_parameters} "
                "would have no effect: give it in rope_parameters, with the other parameters.",
            ),
            (
                current_platform.is_cpu() and config.head_dim not in head_sizes,
                f"head_dim={config.head_dim}; vLLM's attention on a CPU takes {', '.join(map(str, head_sizes))}: use "
                "generate of Transformers.",
            ),
            (
                parallel_config.world_size > 1 or parallel_config.decode_context_parallel_size > 1,
                "An 'iha' layer mixes all heads, so it runs on one device: leave the tensor, pipeline and context "
                "parallel sizes at 1.",
            ),
            (
                quantization is not None,
                f"quantization={quantization!r} has no form for the mixing weights: serve the unquantized checkpoint.",
            ),
            (
                vllm_config.lora_config is not None,
                "vLLM's LoRA would leave out an adapter's mixing weights: merge the adapter (merge_and_unload) and "
                "serve the merged model.",
            ),
            (
                vllm_config.speculative_config is not None,
                "Speculative decoding was not tested on 'iha' layers: leave out --speculative-config.",
            ),
            (
                vllm_config.kv_transfer_config is not None or cache_config.kv_offloading_size is not None,
                "A connector that moves the KV cache takes one key for a token, and an 'iha' layer has "
                "num_pseudo_heads of them: leave out --kv-transfer-config and --kv-offloading-size.",
            ),
            (
                cache_config.cache_dtype != "auto",
                f"kv_cache_dtype={cache_config.cache_dtype!r} was not tested on 'iha' layers: leave out "
                "--kv-cache-dtype.",
            ),
            (
                cache_config.block_size % step,
                f"block_size={cache_config.block_size} with num_pseudo_heads={config.num_pseudo_heads}; it must be a "
                f"multiple of {step}: leave out --block-size, or choose {step}.",
            ),
        ]
        for refused, message in refusals:
            if refused:
                raise NotImplementedError(message)
