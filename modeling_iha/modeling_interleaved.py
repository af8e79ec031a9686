# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a decoder of Transformers with interleaved heads (IHA, Algorithm 1, with one RoPE position for each token).

Transformers' models call attention and make masks through two registries. Here each attention core of Transformers,
such as "sdpa", has a second name in both, such as "iha_sdpa". Under that name a mask is over virtual tokens, and an
attention module with mixing weights attends over virtual tokens: `virtual_mask` and `virtual_attention`. All else is
the base model's own: its projections, RoPE, cache, generation and parallel plans.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from inspect import signature
from threading import local
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_tracing

from .adapter_records import watch_adapters
from .configuration_interleaved import FIELDS, MIXING_MODULES, config_class
from .interleaving import (
    MIN_BLOCK,
    HeadCollapse,
    HeadMixing,
    IHAWeights,
    Overlay,
    absorbed_attention,
    attend_interleaved,
    is_absorbed,
    keep_start,
    keep_window_edge,
    maskless_attention,
    virtual_kwargs,
    window_attention,
)


# By this name Trainer's label smoothing shifts the labels, and a pipeline knows the model.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["interleaved"] = "InterleavedForCausalLM"

# The numbers by which PyTorch names hooks count up in a process, and equal models would hash unequal (datasets).
HOOK = "interleaving"


class Attended(local):
    """Tell whether attention went through `virtual_attention`, in each thread."""

    module: nn.Module | None = None  # the last one, until it is checked
    any = False  # in this forward of the decoder


class Compiled:
    """Tell whether a compiled layer attended so, in any thread: what it writes to a thread's own object is lost."""

    any = False


ATTENDED, COMPILED = Attended(), Compiled()


def register_core(core: str) -> str:
    """Register attention and masks over virtual tokens on a core of Transformers, and return their name."""
    if core not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(f"attn_implementation={core!r} makes no masks, which an interleaved model needs.")
    name = "iha_" + core.replace("/", "_")
    while getattr(ALL_ATTENTION_FUNCTIONS.get(name), "func", virtual_attention) is not virtual_attention:
        name += "_"  # the code of another checkpoint has the name
    ALL_ATTENTION_FUNCTIONS.register(name, partial(virtual_attention, core))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(virtual_mask, core))
    return name


def core_of(name: str) -> str:
    """Return the core under a name of `register_core`, in this process or another, and any other name as it is."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return function.args[0] if isinstance(function, partial) else name.removeprefix("iha_").rstrip("_")


def virtual_mask(core: str, config: PreTrainedConfig, mask_function: Callable, attention_mask=None, **kwargs) -> Any:
    """Return the mask that Transformers makes for the core, over P virtual tokens for each token.

    Pseudo-head p of token n sees what token n sees, less the pseudo-heads after p of the oldest and of its own token,
    and with these of the token before the oldest: in a window of W tokens, the last W * P virtual tokens.

    For SDPA a mask of windows, documents and padding comes as the first key of each query (`_first_keys`)."""
    make_mask = partial(ALL_MASK_ATTENTION_FUNCTIONS[core], config=config)
    num_pseudo_heads = getattr(config, "num_pseudo_heads", 1)  # the towers of other media have none
    of_tokens = partial(make_mask, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    if kwargs["q_length"] == 1 and core == "sdpa" and of_tokens() is None:
        return None
    if core == "sdpa" and num_pseudo_heads > 1:
        first_keys = _first_keys(num_pseudo_heads, mask_function, attention_mask, **kwargs)
        if first_keys is not None and first_keys.any():
            return first_keys
        if first_keys is not None and kwargs.get("allow_is_causal_skip", True):
            return None  # causal from the first token on

    def sees(batch, head, query, key):
        token, cached, later = query // num_pseudo_heads, key // num_pseudo_heads, key % num_pseudo_heads
        same = mask_function(batch, head, token, cached)
        before = mask_function(batch, head, token - 1, cached) & mask_function(batch, head, token, token - 1)
        before = (before & (cached < token)) | (same & (cached > token))  # tokens of an image may see later ones
        seen = later <= query % num_pseudo_heads
        return (seen & same) | (~seen & before)  # ONNX Runtime loads no `where` of three booleans

    if attention_mask is not None:
        attention_mask = attention_mask.repeat_interleave(num_pseudo_heads, dim=-1)
    sizes = ("q_length", "kv_length", "q_offset", "kv_offset", "local_size")
    kwargs |= {name: kwargs[name] * num_pseudo_heads for name in sizes if kwargs.get(name) is not None}
    mask = make_mask(mask_function=sees, attention_mask=attention_mask, **kwargs)
    if isinstance(mask, BlockMask):
        mask.of_tokens = of_tokens()  # for layers that are not interleaved
    return mask


def _first_keys(
    num_pseudo_heads: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor | None:
    """Return the first key of each query if it sees all keys from there to its own, or `None` for another mask.

    This is a mask [batch, 1, N * P, 1] in O(N). It is a tensor of numbers, because Transformers' models, hooks of
    accelerate and FSDP, checkpointing and compiled layers take, slice, move and trace tensors: an object would be
    refused, and what hangs on a tensor alone would be lost. It is int32, as no other mask is, and FSDP casts no int.

    The mask function tells the documents: one begins where a token does not see the one before it. Both ends of what
    each token sees, and tokens at distances of powers of two, are compared with the answer. Chunks are documents,
    padding is a document of its own, and blocks that see each other both ways are none."""
    place = torch.arange(q_length, device=device)
    if q_length == 1 or kv_length < q_length or use_vmap or is_tracing(place) or place.is_meta:
        return None
    if q_offset != 0 or kv_offset != 0:
        return None
    rows, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    window = local_size or q_length

    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_function(rows, head, query, key).expand(batch_size, -1)

    def latest(begins: torch.Tensor) -> torch.Tensor:
        return torch.where(begins, place, 0).cummax(dim=-1).values

    begins = torch.nn.functional.pad(~sees(place[1:], place[:-1]), (1, 0), value=True)
    first = torch.maximum(latest(begins), place - window + 1)
    checks = [sees(place, first).all(), (~sees(place, (first - 1).clamp(min=0)) | (first == 0)).all()]
    for distance in [0] + [2**power for power in range((q_length - 1).bit_length())]:
        later, earlier = place[distance:], place[: q_length - distance]
        checks.append((sees(later, earlier) == (first[:, distance:] <= earlier)).all())
        checks.append(~sees(earlier, later).any() if distance else checks[0])
    if attention_mask is not None:
        real = torch.nn.functional.pad(attention_mask, (0, q_length - attention_mask.shape[-1])).to(device).bool()
        before = real.cumsum(dim=-1) - real.long()
        # Padding between tokens of one document parts them, and they see each other.
        resumes = torch.nn.functional.pad(real[:, 1:] & ~real[:, :-1], (1, 0)) & ~begins
        checks.append(~(resumes & (before > before.gather(1, latest(begins)))).any())
        begins = begins | torch.nn.functional.pad(real[:, 1:] != real[:, :-1], (1, 0))
    if not torch.stack(checks).all():
        return None
    virtual = torch.arange(q_length * num_pseudo_heads, device=device)
    first = (latest(begins) * num_pseudo_heads).repeat_interleave(num_pseudo_heads, dim=-1)
    return torch.maximum(first, virtual - window * num_pseudo_heads + 1).int()[:, None, :, None]


def _has_first_keys(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32


def virtual_attention(
    core: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, N, H, head_dim] and the weights of an attention module, as its core does.

    Queries [batch, H, N, head_dim] and keys [batch, G, K, head_dim] are rotated and cached as in the base model. A
    module without mixing weights attends as in the base model."""
    num_pseudo_heads = getattr(module.config, "num_pseudo_heads", 1)
    attend_tokens, view = core_function(core, module), _stock_view(module, core, num_pseudo_heads)
    if _has_first_keys(attention_mask):  # in which the window of the base is, and no place of a static cache behind
        attend_tokens, kwargs["sliding_window"] = partial(first_key_attention, attend_tokens), None
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if not hasattr(module, "q_mix"):
        return attend_tokens(view, query, key, value, _token_mask(attention_mask, num_pseudo_heads), **kwargs)
    if torch.compiler.is_compiling():
        COMPILED.any = True
    else:
        ATTENDED.module, ATTENDED.any = module, True
    window, num_queries, num_keys = module.config.interleaved_window, query.shape[2], key.shape[2]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape[-1] > num_keys * num_pseudo_heads and window:
        attention_mask = attention_mask[..., -num_keys * num_pseudo_heads :]  # other layers may cache more tokens
    _check_mask(attention_mask, core, num_queries * num_pseudo_heads, num_keys * num_pseudo_heads)
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = view.sinks
    if window is not None:
        kwargs["sliding_window"] = min(window, kwargs.get("sliding_window") or window)
        attention_mask = _in_window(attention_mask, window * num_pseudo_heads)
    weights = IHAWeights(module.q_mix(query), module.k_mix(key), module.v_mix(value), module.collapse(query), None)
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves rotated states in float32

    if num_queries == 1 and is_absorbed(core, module.config, kwargs.get("dropout"), query, num_keys):
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        return absorbed_attention(query, key, value, weights, scaling, window, attention_mask=attention_mask), None
    attend = partial(attend_tokens, view)
    if attention_mask is None and "flash" not in core:
        if num_queries == 1:
            places = torch.ones(num_pseudo_heads, num_keys * num_pseudo_heads, dtype=torch.bool, device=query.device)
            attention_mask = places.tril((num_keys - 1) * num_pseudo_heads)[None, None]
            attention_mask = _in_window(attention_mask, window and window * num_pseudo_heads)
        else:  # causal from position 0 on, whatever a static cache holds behind
            key, value = key[:, :, :num_queries], value[:, :, :num_queries]
            attend = partial(window_attention, attend_tokens, view)
    kwargs = virtual_kwargs(kwargs, num_pseudo_heads)
    return attend_interleaved(attend, query, key, value, weights, attention_mask, **kwargs)


class Documents(NamedTuple):
    """Hold what a mask of first keys says of all its rows."""

    bounds: torch.Tensor  # see `maskless_attention`
    longest: int
    reach: int  # the most keys that a query sees


def documents_of(first_keys: torch.Tensor) -> Documents:
    """Return the documents of a mask of first keys, found once and kept beside it. A GPU waits for the answer."""
    if not hasattr(first_keys, "documents"):
        first = first_keys[:, 0, :, 0]
        seen = torch.arange(1, first.shape[1] + 1, device=first.device) - first
        bounds = torch.nn.functional.pad((seen == 1).flatten().nonzero().flatten(), (0, 1), value=seen.numel()).int()
        longest, reach = torch.stack((bounds.diff().max(), seen.max())).tolist()
        first_keys.documents = Documents(bounds, longest, reach)
    return first_keys.documents


def first_key_attention(
    core: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_keys: torch.Tensor,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output of attention under a mask of first keys, int32 [batch, 1, L, 1], and a window.

    Query v sees the keys u with first_keys[v] <= u <= v and v - sliding_window < u."""
    length = query.shape[2]
    if not torch.compiler.is_compiling() and length > MIN_BLOCK:
        documents = documents_of(first_keys)
        window = min(documents.reach, sliding_window or documents.reach)  # as long as a document, it hides nothing
        return maskless_attention(core, documents[:2], module, query, key, value, None, window, **kwargs)
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place
    mask = (distance >= 0) & (place >= first_keys)
    if sliding_window is not None:
        mask = mask & (distance < sliding_window)
    return core(module, query, key, value, mask, **kwargs)


def core_function(core: str, module: nn.Module) -> Callable:
    """Return the attention function of a core; "eager" is in the modeling file of the base model."""
    if core == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[core]


def _stock_view(module: Any, core: str, num_pseudo_heads: int) -> Any:
    """Show a module to its core: flash cores read their own name, and a sink stands beside P copies of each key."""
    overrides: dict = {}
    if "flash" in core:
        overrides["config"] = Overlay(module.config, _attn_implementation=core)
    if hasattr(module, "q_mix") and getattr(module, "sinks", None) is not None:
        overrides["sinks"] = module.sinks + math.log(num_pseudo_heads)
    return Overlay(module, **overrides) if overrides else module


def _token_mask(mask: Any, num_pseudo_heads: int) -> Any:
    """Return the mask over tokens for a layer that is not interleaved: that of the last pseudo-heads."""
    if mask is None or num_pseudo_heads == 1:
        return mask
    if not isinstance(mask, torch.Tensor):
        return mask.of_tokens
    if _has_first_keys(mask):
        tokens = mask[:, :, num_pseudo_heads - 1 :: num_pseudo_heads] // num_pseudo_heads
        if not torch.compiler.is_compiling():
            tokens.documents = Documents(*(each // num_pseudo_heads for each in documents_of(mask)))
        return tokens
    last = slice(num_pseudo_heads - 1, None, num_pseudo_heads)
    return mask[:, last] if mask.ndim == 2 else mask[..., last, last]


def _in_window(mask: Any, window: int | None) -> Any:
    """Return a mask that also hides what is `window` keys back, made once for all layers.

    A core of first keys gets the window by itself. Else the last keys are the queries' own, unless a static cache has
    more places: then a query's own key is the last that it sees."""
    if mask is None or window is None or _has_first_keys(mask) or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return mask
    if not isinstance(mask, torch.Tensor):
        raise ValueError("flex_attention takes no sliding_window of interleaved layers: use sdpa, eager or flash.")
    if (made := getattr(mask, "in_window", None)) is not None:
        return made
    (length, width), device = mask.shape[-2:], mask.device
    places = torch.arange(width, dtype=torch.int32, device=device)
    own = torch.arange(width - length, width, dtype=torch.int32, device=device)[:, None]
    if width > length:
        visible = mask if mask.dtype == torch.bool else mask == 0
        own = torch.minimum(own, torch.where(visible, places, 0).amax(dim=-1, keepdim=True))
    recent = places > own - window
    made = mask & recent if mask.dtype == torch.bool else mask.masked_fill(~recent, torch.finfo(mask.dtype).min)
    if not is_tracing(mask):
        mask.in_window = made
    return made


def _check_mask(mask, core: str, num_queries: int, num_keys: int) -> None:
    """Raise a ValueError for a dense mask that is not over the virtual tokens."""
    if not isinstance(mask, torch.Tensor) or mask.ndim == 2:
        return
    if mask.shape[-2:] != (num_queries, 1 if _has_first_keys(mask) else num_keys):
        raise ValueError(
            f"attention_mask is {list(mask.shape)} for {num_queries} x {num_keys} virtual tokens on {core!r}: pass "
            "attention_mask [batch, tokens] to an interleaved model; it takes no mask of its own for each query."
        )


class InterleavedPreTrainedModel:
    """Add mixing weights to a model of Transformers, whose class stands behind this one."""

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        check_all_heads(config)
        super().__init__(config, *args, **kwargs)
        attach_mixing(self)
        self.init_weights()  # of the mixing alone: the base model's are done

    def set_attn_implementation(self, *args, **kwargs):
        """Set the core of attention, and have it attend over virtual tokens in the decoder."""
        super().set_attn_implementation(*args, **kwargs)
        use_virtual_cores(self)  # the models within are the base's own, and took its cores

    def initialize_weights(self):
        for module in self.modules():  # first, because a base decoder within leaves these as they are
            if isinstance(module, (HeadMixing, HeadCollapse)) and not getattr(module, "_is_hf_initialized", False):
                module.init_mechanism(self.config)
                module._is_hf_initialized = True
        super().initialize_weights()

    @property
    def peft_config(self) -> dict:
        """Return the configurations of adapters by name. PEFT asks for them before it adds the first."""
        watch_adapters()
        if "peft_config" not in vars(self):
            raise AttributeError  # `nn.Module` names it
        return vars(self)["peft_config"]

    @peft_config.setter
    def peft_config(self, configs: dict):
        vars(self)["peft_config"] = configs

    @peft_config.deleter
    def peft_config(self):
        del vars(self)["peft_config"]

    def __reduce__(self) -> tuple:
        return unpickled_model, (type(self).__name__, self.config.model_type), self.__getstate__()

    def __setstate__(self, state: dict):
        super().__setstate__(state)
        use_virtual_cores(self)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        """Return the name under which the requested core attends over virtual tokens."""
        core = attn_implementation and core_of(attn_implementation)
        return register_core(super()._check_and_adjust_attn_implementation(core, *args, **kwargs))

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        keep_windows(decoder_of(self), model_kwargs.get("past_key_values"))
        if generation_config.is_assistant:
            model_kwargs["past_key_values"].activate_past_recording()  # the new layers too
        return prepared

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(
            "Continuous batching (generate_batch, transformers serve --continuous-batching) keeps one key for each "
            "token, and an interleaved model needs P: use generate, which takes batches too."
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return cls.__bases__[1]._supports_default_dynamic_cache()  # which asks by the name of the class

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # Checkpoints are renamed on load as the base model's are.

    @classmethod
    def is_backend_compatible(cls) -> bool:
        return False  # The paged caches of vLLM and SGLang hold one key for each token.


def check_all_heads(config: PreTrainedConfig) -> None:
    """Raise a ValueError for tensor parallelism, which gives each process some of the heads that are mixed."""
    if (getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1) > 1:
        raise ValueError(
            "Tensor parallelism (tp_plan, tp_size) leaves each process some heads, and interleaving mixes all: load "
            "the model without it, and share it by FSDP2 (fsdp_size) or DistributedDataParallel."
        )


def configs(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Return the configurations that modules read, each once. Their cores may differ."""
    found = [vars(module).get("config") for module in modules]
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without a head. Llama 4's `base_model` is the model itself."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def holders(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that hold all interleaved attention, from the model to the smallest."""
    backbone, found = backbone_of(model), [model]
    names = [name.split(".") for name in model.config.interleaved_layers]
    common = os.path.commonprefix(names) if len(names) > 1 else names[0]
    return found + [backbone.get_submodule(".".join(common[:depth])) for depth in range(len(common) + 1)]


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text decoder, the smallest model of Transformers that holds all interleaved attention."""
    return [module for module in holders(model) if isinstance(module, PreTrainedModel)][-1]


def attach_mixing(model: PreTrainedModel) -> None:
    """Give the attention modules that the configuration names their mixing weights, and have them used."""
    config, backbone, decoder = model.config, backbone_of(model), decoder_of(model)
    for each in virtual_configs(model):
        for field in FIELDS:
            setattr(each, field, getattr(config, field))
    for name, (num_heads, num_key_heads, num_value_heads) in config.interleaved_layers.items():
        module = backbone.get_submodule(name)
        if hasattr(module, "q_mix"):
            continue  # A generic task head has a decoder of this package within.
        module.q_mix = HeadMixing(num_heads, config.num_pseudo_heads)
        module.k_mix = HeadMixing(num_key_heads, config.num_pseudo_heads)
        module.v_mix = HeadMixing(num_value_heads, config.num_pseudo_heads)
        module.collapse = HeadCollapse(num_heads, config.num_pseudo_heads, config.pseudo_collapse)
        keep_start(module, config.mixing_scale)
        module._forward_hooks[HOOK] = _check_attention
    tied = model.get_expanded_tied_weights_keys(all_submodels=True).items()  # Zamba's blocks share all their weights
    weights = dict(model.named_parameters(remove_duplicate=False))  # Transformers ties no buffers
    model.all_tied_weights_keys |= {name: source for name, source in tied if is_mixing(name) and name in weights}
    use_virtual_cores(model)
    # Gemma 4 would leave out rows of a mask, which are of virtual tokens, for any number. It asks for cores by name.
    takes_kept = "logits_to_keep" in signature(decoder.forward).parameters
    prepare = partial(_prepare_decoder, {"logits_to_keep": None} if takes_kept else {})
    decoder._forward_pre_hooks[HOOK], decoder._forward_pre_hooks_with_kwargs[HOOK] = prepare, True
    decoder._forward_hooks[HOOK] = _check_decoder
    watch_adapters()


def remove_hooks(*modules: nn.Module) -> None:
    """Remove the hooks that `attach_mixing` gave modules."""
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
            hooks.pop(HOOK, None)


def virtual_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configurations that attention and masks over virtual tokens read, and no vision tower."""
    backbone = backbone_of(model)
    return configs([*holders(model), *(backbone.get_submodule(name) for name in model.config.interleaved_layers)])


def use_virtual_cores(model: PreTrainedModel) -> None:
    """Have the decoder attend over virtual tokens, on the cores that its configurations name."""
    for each in virtual_configs(model):
        each._attn_implementation_internal = register_core(core_of(each._attn_implementation))


def _check_attention(module: nn.Module, args: tuple, output: Any) -> None:
    """Raise a RuntimeError where attention was computed without the mixing weights that stand beside it."""
    if torch.compiler.is_compiling():
        return
    if ATTENDED.module is not module:
        raise RuntimeError(
            f"{type(module).__name__} has interleaved heads and attended without them: its forward or its attention "
            "core was replaced. Use the model without the tool that did so, or apply remove_interleaving first."
        )
    ATTENDED.module = None


def _check_decoder(decoder: PreTrainedModel, args: tuple, output: Any) -> None:
    """Raise a RuntimeError where no attention module was called, unless training leaves out layers at random."""
    if not (ATTENDED.any or COMPILED.any or torch.compiler.is_compiling() or getattr(decoder, "layerdrop", 0)):
        raise RuntimeError(
            f"{type(decoder).__name__} has interleaved heads, and none of them attended: its layers or their "
            "attention were replaced. Use the model without the tool that did so, or apply remove_interleaving first."
        )


def is_mixing(name: str) -> bool:
    """Return whether a parameter, by its name, is of the mixing."""
    return not set(MIXING_MODULES).isdisjoint(name.split("."))


def _prepare_decoder(fixed: dict, decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Keep what windows reach, in the cache that the decoder gets, or would make if the base model has windows."""
    if not torch.compiler.is_compiling():
        ATTENDED.any = False
    kwargs |= fixed
    use_cache = kwargs.get("use_cache")
    use_cache = getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache
    # RecurrentGemma resets its states where it makes a cache.
    if use_cache and not decoder._is_stateful and kwargs.get("past_key_values") is None and _window(decoder):
        kwargs["past_key_values"] = DynamicCache(config=decoder.config)
    keep_windows(decoder, kwargs.get("past_key_values"))
    return args, kwargs


def _window(decoder: PreTrainedModel) -> int | None:
    return getattr(decoder.config.get_text_config(decoder=True), "sliding_window", None)


def keep_windows(decoder: PreTrainedModel, past_key_values: Cache | None) -> None:
    """Make the layers of a cache keep what windows of virtual tokens reach: one token more than the windows have."""
    config, layers = decoder.config, getattr(past_key_values, "layers", ())  # caches of encoders have none
    if layers and (window := _window(decoder)):
        # One mask serves all sliding layers, also those that are not interleaved.
        keep_window_edge(past_key_values, [1] * len(layers), window)
    elif layers and config.interleaved_window:
        fresh = {i for i, layer in enumerate(layers) if type(layer) is DynamicLayer and not layer.is_initialized}
        for module in decoder.modules() if fresh else ():
            if hasattr(module, "q_mix") and getattr(module, "layer_idx", None) in fresh:
                layers[module.layer_idx] = DynamicSlidingWindowLayer(config.interleaved_window + 1)


@cache
def interleaved_class(name: str, config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return the class "InterleavedForCausalLM", or of another task, for a class of configurations.

    `config_class` is a subclass of the base model's own (see configuration_interleaved.py)."""
    auto_class = f"AutoModel{name.removeprefix('Interleaved').removeprefix('Model')}"
    base = getattr(transformers, auto_class)._model_mapping.get(config_class.__base__, None)
    if base is None:
        raise ValueError(f"Transformers has no {auto_class} of {config_class.__base__.model_type!r}.")
    headless = transformers.AutoModel._model_mapping.get(config_class.__base__, None)
    if headless is not None and name != "InterleavedModel":  # Generic task heads build their decoder by this mapping.
        decoder = interleaved_class("InterleavedModel", config_class)
        transformers.AutoModel.register(config_class, decoder, exist_ok=True)
    attributes = {"config_class": config_class, "_auto_class": auto_class, "__module__": __name__}
    return type(name, (InterleavedPreTrainedModel, base), attributes)


def unpickled_model(name: str, base_model_type: str) -> PreTrainedModel:
    """Return a model without modules; pickle fills it, and finds no class that is made at run time."""
    return object.__new__(interleaved_class(name, config_class(base_model_type)))


class InterleavedModel:
    """Load a decoder without a head. `auto_map` names this class and its subclasses.

    The class of the model itself depends on the base type: see `interleaved_class`."""

    @classmethod
    def from_pretrained(cls, *args, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
        return interleaved_class(cls.__name__, type(config)).from_pretrained(*args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
        return interleaved_class(cls.__name__, type(config))._from_config(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Do nothing; the Auto classes call this after they loaded remote code."""


class InterleavedForCausalLM(InterleavedModel): ...


class InterleavedForSequenceClassification(InterleavedModel): ...


class InterleavedForTokenClassification(InterleavedModel): ...


class InterleavedForQuestionAnswering(InterleavedModel): ...


class InterleavedForImageTextToText(InterleavedModel): ...


class InterleavedForMultimodalLM(InterleavedModel): ...


# Transformers puts remote code into `sys.modules` alone, and dill (datasets) finds it as an attribute of its package.
for name in ("configuration_interleaved", "modeling_interleaved"):
    setattr(sys.modules[__package__], name, sys.modules[f"{__package__}.{name}"])
