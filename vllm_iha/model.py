# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Serve decoders with interleaved heads: vLLM's Transformers modeling backend, with attention over virtual tokens."""

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, cached_property, partial
from math import gcd
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import composed_weight_loader
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    TransformersMoEForCausalLM,
    TransformersMultiModalForCausalLM,
)
from vllm.model_executor.models.transformers.base import VLLM_ATTN_IMPL, Base
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.models.whisper_causal import WhisperCausalAttentionWithBlockPooling
from vllm.v1.attention.backend import AttentionBackend, MultipleOf, subclass_attention_backend_with_overrides
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import KVCacheSpec

from .checks import KERNEL_BLOCK


# Attention


@cache
def virtual_backend(pooling: type[AttentionBackend], num_pseudo_heads: int) -> type[AttentionBackend]:
    """Return a backend with block pooling that takes grouped queries and blocks of whole virtual tokens."""

    class Builder(pooling.get_builder_cls()):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            # Block pooling was made for Whisper, whose layers have as many query heads as key heads.
            self.num_heads_q = get_num_attention_heads_from_layers(vllm_config, layer_names)

    tokens = MultipleOf(KERNEL_BLOCK // gcd(KERNEL_BLOCK, num_pseudo_heads))
    overrides = {
        "get_builder_cls": lambda: Builder,
        "get_supported_kernel_block_sizes": lambda kv_cache_spec=None: [tokens],
    }
    return subclass_attention_backend_with_overrides("Virtual", pooling, overrides)


class VirtualAttention(WhisperCausalAttentionWithBlockPooling):
    """Attend over the virtual sequence, whose P keys and values of each token lie in the paged cache.

    Whisper's block pooling gives the kernel slots, lengths and window in virtual tokens. The cache manager counts
    tokens and keeps W + 1 of them for a window of W.

    Args:
        module: the attention module that this attends for, with the modules of the mixing or with `paired_heads`.
        rotation: (cos, sin) of T_p, each [P, head_dim], or `None` for shared positions.
    """

    def __init__(
        self,
        module: nn.Module,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        num_heads: int,
        num_kv_heads: int,
        cache_config,
        per_layer_sliding_window: int | None = None,
        **kwargs,
    ):
        config = module.config
        num_pseudo_heads = config.num_pseudo_heads
        is_mixed = hasattr(module, "q_mix")
        if is_mixed:
            check_head_counts(module, num_heads, num_kv_heads)
        else:
            num_heads //= num_pseudo_heads
            num_kv_heads //= num_pseudo_heads
        # If all layers have the window, vLLM passes it in `cache_config` and not for each layer.
        own = per_layer_sliding_window or cache_config.sliding_window
        window = min(filter(None, (own, getattr(config, "interleaved_window", None))), default=None)
        super().__init__(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            cache_config=cache_config,
            per_layer_sliding_window=window and window * num_pseudo_heads,
            block_pool_size=num_pseudo_heads,
            **kwargs,
        )
        self.attn_backend = virtual_backend(self.attn_backend, num_pseudo_heads)
        self.is_mixed = is_mixed
        self.rotation = rotation
        self.module = (module,)  # in a tuple, because this is a submodule of it

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Give a block as many bytes as a block of another layer has: all pages have one size.

        Mixed heads keep P times the bytes of a plain layer, and paired heads as many."""
        spec = super().get_kv_cache_spec(vllm_config)
        return replace(spec, block_size=spec.block_size // self.block_pool_size) if self.is_mixed else spec

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Attend over the virtual tokens of queries, keys and values [N, heads * head_dim]."""
        states = [each.unflatten(-1, (-1, self.head_size)).transpose(0, 1)[None] for each in (query, key, value)]
        heads = self.make_heads(states[0])
        query, key, value = heads.make_virtual_tokens(*states)  # [1, heads, N * P, head_dim]
        if not self.is_mixed and self.rotation is not None:
            query, key = self.rotate(query), self.rotate(key)
        query, key, value = (each[0].transpose(0, 1).flatten(1) for each in (query, key, value))
        output = super().forward(query, key, value, *args, **kwargs)
        return heads.collapse_output(output.view(1, -1, self.num_heads, self.head_size))[0].flatten(1)

    def make_heads(self, states: torch.Tensor) -> Any:
        """Return `MixedHeads` with the present weights, or `PairedHeads`."""
        (module,) = self.module
        if not self.is_mixed:
            return module.paired_heads
        return file_of(module.q_mix).MixedHeads.of_module(module, states, self.rotation)

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys of paired heads within their token."""
        cos, sin = self.rotation
        states = states.unflatten(2, (-1, self.block_pool_size))
        return (states * cos + rotate_half(states) * sin).flatten(2, 3)


def file_of(module: nn.Module) -> Any:
    """Return the file that defines the class of a module: one of modeling_iha, or of a checkpoint's own copy."""
    return sys.modules[type(module).__module__]


def check_head_counts(module: nn.Module, num_heads: int, num_kv_heads: int) -> None:
    """Raise a NotImplementedError for a layer with other heads than vLLM takes it to have.

    The kernel would write out of bounds."""
    heads = [mixing.weight.shape[0] for mixing in (module.q_mix, module.k_mix, module.v_mix)]
    if heads != [num_heads, num_kv_heads, num_kv_heads]:
        raise NotImplementedError(
            f"vLLM gives a layer {num_heads} query and {num_kv_heads} key/value heads, and this one mixes {heads}: "
            "use generate of Transformers for this model."
        )


# Models


class VirtualTransformers(Base):
    """Run a model by its own modules, and attend over virtual tokens where a layer makes them."""

    rotation = None  # of `VirtualAttention`

    @cached_property
    def not_loaded(self) -> set[str]:
        """Return the names of the starts and scales of mixing weights that have not been loaded yet."""
        return {name for name, _ in self.named_buffers() if name.endswith((".weight_start", ".weight_scale"))}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights. Raise a NotImplementedError as long as mixing weights lack their starts or scales."""
        loaded = super().load_weights(weights)
        self.not_loaded.difference_update(loaded)
        if self.not_loaded:
            raise NotImplementedError(
                f"The checkpoint holds changes of the mixing and no starts ({min(self.not_loaded)}): save a model by "
                "save_pretrained or its state_dict, not its parameters alone."
            )
        return loaded

    def init_parameters(self, module: nn.Module, dtype: torch.dtype | None = None):
        """Allocate the starts and scales of mixing weights too, which are buffers that are saved (`Mixing`)."""
        super().init_parameters(module, dtype)
        options = {"dtype": dtype or self.model_config.dtype, "device": self.device_config.device}
        for each in module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                if buffer.is_meta:
                    setattr(each, name, torch.empty_like(buffer, **options))

    def _get_attn_cls(self):
        stock = super()._get_attn_cls()

        def attention(**kwargs) -> nn.Module:
            module = self.get_submodule(self.attention_fusers[extract_layer_index(kwargs["prefix"])][0])
            if not hasattr(module, "q_mix") and not hasattr(module, "paired_heads"):
                return stock(**kwargs)
            if (sinks := kwargs.get("sinks")) is not None:  # raised by log P: each key occurs P times in the softmax
                log_p = math.log(module.config.num_pseudo_heads)
                sinks.weight_loader = composed_weight_loader(sinks.weight_loader, lambda loaded: loaded + log_p)
            return VirtualAttention(module, self.rotation, **kwargs)

        return attention


class Interleaved(VirtualTransformers):
    """Serve a model of `interleave_heads` or `pair_heads` by the modules of its base."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # vLLM's backend for the modules of Transformers reads `logit_scale` alone.
        self.logits_processor.scale *= logit_scale(self.text_config)

    def _create_hf_to_vllm_mapper(self):
        # The mapper finds the names of weights, and what experts do, by the class: it sees that of the base.
        code = file_of(self.model)
        code.return_classes(self.model)
        super()._create_hf_to_vllm_mapper()
        code.take_classes(self.model)

    def recursive_replace(self):
        file_of(self.model).remove_hook(self.model)  # It prepares calls for our attention, and vLLM's comes here.
        self.model.config.get_text_config()._attn_implementation = VLLM_ATTN_IMPL
        super().recursive_replace()


def logit_scale(config: PreTrainedConfig) -> float:
    """Return by what a base multiplies its logits, besides `logit_scale`: Granite divides, HyperCLOVA X multiplies."""
    scaling = getattr(config, "logits_scaling", 1.0)
    return scaling if config.model_type.startswith("hyperclovax") else 1 / scaling


class InterleavedForCausalLM(Interleaved, TransformersForCausalLM):
    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = ""):
        return super().__new__(InterleavedMoEForCausalLM if vllm_config.model_config.is_moe else cls)


class InterleavedMoEForCausalLM(InterleavedForCausalLM, TransformersMoEForCausalLM): ...


class InterleavedForImageTextToText(Interleaved, TransformersMultiModalForCausalLM): ...


class IHAForCausalLM(VirtualTransformers, TransformersForCausalLM):
    """Serve layers of kinds "iha", "paired_heads" and "mha" by the code of Llama and Qwen3, which vLLM fuses."""

    def recursive_replace(self):
        config = self.config
        for layer in self.model.layers:
            module = layer.self_attn
            if config.attention_kinds[module.layer_idx] == "paired_heads":
                module.paired_heads = file_of(module).PairedHeads(config.num_pseudo_heads)
            table = "token" if module.rope_table == "token" else "interleaved"
            module.register_forward_pre_hook(partial(choose_table, table), with_kwargs=True)
            module.__class__ = served_class(type(module), Qwen3Attention if config.use_qk_norm else LlamaAttention)
            module.num_pseudo_heads = 1  # for vLLM, which needs no masks
            if config.gated_mlp:
                layer.mlp.__class__ = LlamaMLP
        # Here paired heads too are rotated to n * P by the module, and by T_p in `VirtualAttention`.
        rotary = self.model.rotary_emb
        rotary.mixed = rotary.mixed or rotary.paired
        tables = rotary.tables(torch.empty(0), torch.zeros(1, 1, dtype=torch.long))
        self.rotation = tables.get("pseudo_head")
        super().recursive_replace()


@cache
def served_class(own: type[nn.Module], stock: type[nn.Module]) -> type[nn.Module]:
    """Return a class of attention modules that runs the code of a stock one.

    Its equations are the same, except that it chooses among RoPE tables."""
    return type(own.__name__, (own,), {"forward": stock.forward, "core": VLLM_ATTN_IMPL})


def choose_table(name: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Give an attention module its own table among those of `IHARotaryEmbedding`."""
    return args, {**kwargs, "position_embeddings": kwargs["position_embeddings"][name]}
