# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Serve decoders with interleaved heads: vLLM's Transformers modeling backend, with attention over virtual tokens."""

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial, reduce
from math import gcd

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from vllm.config import VllmConfig
from vllm.model_executor.models.transformers import (
    TransformersForCausalLM,
    TransformersMoEForCausalLM,
    TransformersMultiModalForCausalLM,
)
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.models.whisper_causal import WhisperCausalAttentionWithBlockPooling
from vllm.v1.attention.backend import AttentionBackend, MultipleOf, subclass_attention_backend_with_overrides
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import KVCacheSpec

from .checks import KERNEL_BLOCK


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
        module: the attention module with `virtual_heads`.
        rotation: (cos, sin) of T_p, each [P, head_dim], or `None` for shared positions (`MixedHeads` of modeling_iha).
    """

    cache_factor = 1  # bytes of a token in the cache, relative to the plain layer

    def __init__(self, module: nn.Module, rotation, cache_config, per_layer_sliding_window=None, **kwargs):
        config = module.config
        # If all layers have the window, vLLM passes it in `cache_config` and not for each layer.
        own = per_layer_sliding_window or cache_config.sliding_window
        window = min(filter(None, (own, getattr(config, "interleaved_window", None))), default=None)
        super().__init__(
            cache_config=cache_config,
            per_layer_sliding_window=window and window * config.num_pseudo_heads,
            block_pool_size=config.num_pseudo_heads,
            **kwargs,
        )
        self.attn_backend = virtual_backend(self.attn_backend, self.block_pool_size)
        self.rotation = rotation

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Give a block as many bytes as a block of another layer has: all pages have one size."""
        spec = super().get_kv_cache_spec(vllm_config)
        return replace(spec, block_size=spec.block_size // self.cache_factor)

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys [N, P, heads, head_dim] within their token, unless its virtual tokens share it."""
        if self.rotation is None:
            return states
        cos, sin = (table.unsqueeze(1) for table in self.rotation)
        return states * cos + rotate_half(states) * sin


class MixedAttention(VirtualAttention):
    """Attend with heads that are mixed into P pseudo-heads each (IHA, Algorithm 1)."""

    def __init__(self, module: nn.Module, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        heads = [mixing.weight.shape[0] for mixing in (module.q_mix, module.k_mix, module.v_mix)]
        if heads != [self.num_heads, self.num_kv_heads, self.num_kv_heads]:  # the kernel would write out of bounds
            raise NotImplementedError(
                f"vLLM gives a layer {self.num_heads} query and {self.num_kv_heads} key/value heads, and this one "
                f"mixes {heads}: use generate of Transformers for this model."
            )
        self.cache_factor = self.block_pool_size
        # They are in a tuple, because as submodules the model would have them twice.
        self.mixing = (module.q_mix, module.k_mix, module.v_mix, module.collapse)

    @property
    def is_laid_out(self) -> bool:
        """Return whether the values of the mixing have been laid out for `forward`."""
        return hasattr(self, "alpha")

    @torch.no_grad()
    def process_weights_after_loading(self, act_dtype: torch.dtype):
        """Lay out the values of the mixing weights once, as the products of `forward` take them."""
        super().process_weights_after_loading(act_dtype)
        q_mix, k_mix, v_mix, collapse = (module.value().to(act_dtype) for module in self.mixing)
        # alpha [M, M, P] as [P * M, M], from heads to virtual tokens
        alpha = [mix.permute(2, 1, 0).flatten(0, 1).contiguous() for mix in (q_mix, k_mix, v_mix)]
        shares = collapse.unflatten(1, (-1, self.block_pool_size)).contiguous()  # [H, 1 or H, P]
        if self.is_laid_out:  # `reload_weights` calls this again, and CUDA graphs keep the addresses
            for old, new in zip((*self.alpha, self.shares), (*alpha, shares)):
                old.copy_(new)
        else:
            self.alpha = alpha
            self.shares = shares
        if self.has_sink:  # each key occurs P times in the softmax, so the sink is raised by log P
            if not hasattr(self, "sinks"):
                self.sinks = self.impl.sinks
            self.impl.sinks = self.sinks + math.log(self.block_pool_size)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Attend over the virtual tokens of queries, keys and values [N, heads * head_dim]."""
        q_mix, k_mix, v_mix = self.alpha
        query = self.rotate(expand(query, q_mix))
        key = self.rotate(expand(key, k_mix))
        value = expand(value, v_mix)
        query, key, value = (states.flatten(0, 1).flatten(1) for states in (query, key, value))
        output = super().forward(query, key, value, *args, **kwargs)
        output = output.view(-1, self.block_pool_size, self.num_heads, self.head_size_v)
        if self.shares.shape[1] == 1:  # per head
            parts = [states * share for states, share in zip(output.unbind(1), self.shares.unbind(2))]
            return reduce(torch.add, parts).flatten(1)
        return torch.einsum("hgp,npgd->nhd", self.shares, output).flatten(1)


def expand(states: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Return virtual tokens [N, P, M, head_dim] of heads [N, M * head_dim] by alpha [P * M, M]."""
    heads = alpha.shape[1]
    return torch.matmul(alpha, states.unflatten(-1, (heads, -1))).unflatten(1, (-1, heads))


class PairedAttention(VirtualAttention):
    """Attend with groups of P heads that share their virtual sequence; its cache is as large as the plain model's."""

    def __init__(self, module: nn.Module, *args, num_heads: int, num_kv_heads: int, **kwargs):
        size = module.config.num_pseudo_heads
        super().__init__(module, *args, num_heads=num_heads // size, num_kv_heads=num_kv_heads // size, **kwargs)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Attend over virtual tokens, which are views of the queries, keys and values [N, heads * head_dim]."""
        num_tokens = len(query)
        size = self.block_pool_size
        query = self.rotate(query.view(num_tokens, size, self.num_heads, self.head_size))
        key = self.rotate(key.view(num_tokens, size, self.num_kv_heads, self.head_size))
        value = value.view(num_tokens, size, self.num_kv_heads, self.head_size_v)
        query, key, value = (states.flatten(0, 1).flatten(1) for states in (query, key, value))
        return super().forward(query, key, value, *args, **kwargs).view(num_tokens, -1)


OLD_CODE = (
    "The code of this model is older than the plugin, which would serve it without interleaved heads: load it with "
    "today's modeling_iha in Transformers and save it again."
)


def virtual_attention_class(module: nn.Module) -> type[VirtualAttention] | None:
    """Return the class that attends for an attention module with virtual heads, or `None` for any other module.

    Raise an error for a module that mixes heads by code older than `virtual_heads`."""
    # A checkpoint brings its own copy of the classes that `virtual_heads` names, so the mixing tells the two apart.
    has_mixing = hasattr(module, "q_mix")
    if getattr(module, "virtual_heads", None) is not None:
        return MixedAttention if has_mixing else PairedAttention
    if has_mixing:
        raise NotImplementedError(OLD_CODE)
    return None


class VirtualTransformers(Base):
    """Run a model by its own modules, and attend over virtual tokens where a layer makes them."""

    rotation = None  # of `VirtualAttention`

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights. Raise an error for mixing weights without starts, and where the layers would not see them.

        The layers lay out the values of the mixing after a load, which vLLM asks for when a model is built, whatever
        its weights are then, and in `reload_weights`, whose parameters are on the meta device here. TRL's GRPO calls
        `load_weights` alone, after which the layers would keep the old values."""
        laid_out = [layer for layer in self.modules() if getattr(layer, "is_laid_out", False)]
        is_reload = any(parameter.is_meta for parameter in self.parameters())
        if laid_out and (not is_reload or any(layer.has_sink for layer in laid_out)):
            raise NotImplementedError(
                "New weights would leave the old mixing of interleaved heads in place: start vLLM again, or let "
                "Transformers generate during training (use_transformers_continuous_batching in TRL)."
            )
        loaded = super().load_weights(weights)
        starts = [name for name, _ in self.named_buffers() if name.endswith("_start")]
        if getattr(self.config, "mixing_scale", 1) != 1 and (missing := sorted(set(starts) - loaded)):
            raise NotImplementedError(
                f"The checkpoint holds changes of the mixing and no starts ({missing[0]}): save a model by "
                "save_pretrained or its state_dict, not its parameters alone."
            )
        return loaded

    def _patch_config(self):
        super()._patch_config()
        # The model is built with a core of its own package, and `recursive_replace` sets "vllm" later.
        self.text_config._attn_implementation = "eager"

    def recursive_replace(self):
        for config in (self.text_config, self.model.config.get_text_config()):
            config._attn_implementation = "vllm"
        super().recursive_replace()

    def init_parameters(self, module: nn.Module, dtype: torch.dtype | None = None):
        """Allocate the starts and scales of mixing weights too, which are buffers that are saved (`Mixing`).

        Checkpoints of earlier versions hold no scales, and where the scale is 1 no starts."""
        super().init_parameters(module, dtype)
        for each in module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                if buffer.is_meta:
                    dtype = dtype or self.model_config.dtype
                    value = self.config.mixing_scale if name.endswith("_scale") else 0
                    device = self.device_config.device
                    setattr(each, name, torch.full_like(buffer, value, dtype=dtype, device=device))

    def _get_attn_cls(self):
        stock = super()._get_attn_cls()

        def attention(**kwargs) -> nn.Module:
            module = self.get_submodule(self.attention_fusers[extract_layer_index(kwargs["prefix"])][0])
            virtual = virtual_attention_class(module)
            return stock(**kwargs) if virtual is None else virtual(module, self.rotation, **kwargs)

        return attention


class Interleaved(VirtualTransformers):
    """Serve a model of `interleave_heads` or `pair_heads` by the modules of its base."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        own = vllm_config.model_config.hf_config.architectures
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.config.architectures = own
        # vLLM's backend for the modules of Transformers reads `logit_scale` alone.
        self.logits_processor.scale *= logit_scale(self.text_config)

    def _create_hf_to_vllm_mapper(self):
        # The mapper finds the names of weights, and what experts do, by the class: it sees that of the base.
        self.config.architectures = [self.names_of_bases[self.config.model_type]]
        own = type(self.model)
        self.model.__class__ = next(each for each in own.__mro__ if each.__module__.startswith("transformers."))
        super()._create_hf_to_vllm_mapper()
        self.model.__class__ = own

    def recursive_replace(self):
        # The package's hooks would raise an error, because other cores than its own attend.
        sys.modules[type(self.model).__module__].remove_hooks(*self.model.modules())
        super().recursive_replace()


def logit_scale(config: PreTrainedConfig) -> float:
    """Return by what a base multiplies its logits, beside `logit_scale`: Granite divides, HyperCLOVA X multiplies."""
    scaling = getattr(config, "logits_scaling", 1.0)
    return scaling if config.model_type.startswith("hyperclovax") else 1 / scaling


class InterleavedForCausalLM(Interleaved, TransformersForCausalLM):
    names_of_bases = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = ""):
        return super().__new__(InterleavedMoEForCausalLM if vllm_config.model_config.is_moe else cls)


class InterleavedMoEForCausalLM(InterleavedForCausalLM, TransformersMoEForCausalLM): ...


class InterleavedForImageTextToText(Interleaved, TransformersMultiModalForCausalLM):
    names_of_bases = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


class IHAForCausalLM(VirtualTransformers, TransformersForCausalLM):
    """Serve layers of kinds "iha", "paired_heads" and "mha" by the modules of Llama and Qwen3, which vLLM fuses."""

    def recursive_replace(self):
        config = self.config
        model = self.model
        for layer in model.layers:
            module = layer.self_attn
            virtual = getattr(module, "virtual_heads", None)
            if virtual is None and config.attention_kinds[module.layer_idx] != "mha":
                raise NotImplementedError(OLD_CODE)
            window = module.sliding_window
            # Their equations are those of these classes, except that they choose among RoPE tables.
            table = "interleaved" if virtual and config.pseudo_positions == "interleaved" else "token"
            module.register_forward_pre_hook(partial(choose_table, table), with_kwargs=True)
            module.__class__ = Qwen3Attention if config.use_qk_norm else LlamaAttention
            # Attributes of the class that it lost.
            module.virtual_heads = virtual
            module.sliding_window = window
            if config.gated_mlp:
                layer.mlp.__class__ = LlamaMLP
        model.create_masks = lambda *args, **kwargs: dict.fromkeys(config.layer_types)  # vLLM's attention needs none
        # Here paired heads too are rotated to n * P by the module, and by T_p in `VirtualAttention`.
        model.rotary_emb.mixed = model.rotary_emb.mixed or model.rotary_emb.paired
        tables = model.rotary_emb.tables(torch.empty(0), torch.zeros(1, 1, dtype=torch.long))
        self.rotation = tables.get("pseudo_head")
        super().recursive_replace()


def choose_table(name: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Give an attention module its own table among those of `IHARotaryEmbedding`."""
    return args, {**kwargs, "position_embeddings": kwargs["position_embeddings"][name]}
