# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Interleave the heads of a decoder of Transformers in place, without changing what it computes, and undo it.

probes.py shows what a decoder's attention does, and compares the model before and after. exact_start.py makes a mixing
that changes nothing, and explains why. modeling_interleaved.py attaches the virtual heads, as for a loaded checkpoint.
"""

import copy
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .exact_start import deviations, exact_start
from .flop_matched_window import flop_matched_window, paper_layers
from .interleaved_attention import decoder_config
from .mixing_weights import state_with_values
from .modeling_interleaved import (
    attach_virtual_heads,
    backbone_of,
    check_no_tensor_parallelism,
    detach_virtual_heads,
    interleaved_attention,
    is_mixing,
    models_by_auto_class,
)
from .probes import AttentionCall, check_same, examine


FIELDS = (
    "num_pseudo_heads",
    "pseudo_collapse",
    "virtual_heads",
    "interleaved_layers",
    "interleaved_window",
    "mixing_scale",
)
FACTS_OF_BASE = ("passes_windows", "passes_cu_seq_lens", "base_name_or_path")  # fields too


def interleave_heads(
    model: PreTrainedModel,
    num_pseudo_heads: int,
    layers: Iterable[int] | str | None = None,
    sliding_window: int | str | None = None,
    collapse: str = "per_head",
    seed: int | None = 0,
    mixing_scale: float = 40.0,
) -> PreTrainedModel:
    """Interleave the heads of a decoder in place (IHA, Algorithm 1).

    Up to rounding the model's outputs do not change. With a `sliding_window` this holds for inputs that are not longer
    than the window. Trainer, TRL, PEFT and `generate` still take the model. `save_pretrained` writes a checkpoint that
    loads with `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` where this package is not
    installed. As in the base model, packed rows (`position_ids` that restart) are kept apart only in calls without
    `attention_mask` and without a cache: leave out the mask and pass `use_cache=False`, as TRL does.

    `model.name_or_path` becomes empty, because what it names is another model. So give a trainer the tokenizer
    (`processing_class`), and after saving load the model from where you saved it.

    Args:
        model: any decoder of Transformers whose attention goes through its attention registry, also within a model
            of images or sound (`AutoModelForImageTextToText`). Give the whole model, before DistributedDataParallel
            or FSDP wraps it.
        num_pseudo_heads: P, at least 2. Attention costs P^2 times as much in a layer without a window.
        layers: the indices of the layers to interleave, "paper" for four of every five (IHA, Appendix C), or `None`
            for all causal self-attention layers.
        sliding_window: a window for the interleaved layers in tokens, "paper" for N / (2 P^2) with the N of
            `max_position_embeddings` (IHA, Appendix C), or `None` for the base model's own.
        collapse: "per_head" (Algorithm 1) or "all_heads" (Definition 3).
        seed: the seed of the value offsets, which make the pseudo-heads of a head differ; `None` for no offsets.
        mixing_scale: the mixing learns at this many times the optimizer's rate, because its entries are of order 1
            and would hardly move at a backbone's rate. The weights hold changes from the exact start (see `Mixing`).

    Return the model. Raise a ValueError, and leave the model as it was, where the result would not be exact."""
    _check_model(model)
    if not isinstance(num_pseudo_heads, int) or num_pseudo_heads < 2:
        raise ValueError(f"num_pseudo_heads is {num_pseudo_heads!r}: expected an integer of at least 2.")
    if collapse not in ("per_head", "all_heads"):
        raise ValueError(f'collapse is {collapse!r}: expected "per_head" or "all_heads".')
    if not isinstance(mixing_scale, int | float) or not 0 < mixing_scale < math.inf:
        raise ValueError(f"mixing_scale is {mixing_scale!r}: expected a number above 0.")
    if sliding_window == "paper":
        sliding_window = flop_matched_window(_context_length(model), num_pseudo_heads)
    check_window(model, sliding_window)
    with left_as_it_was(model):
        _make_own_config(model)
        base = examine(model)
        # Until the comparison with the base there is no window, because the base has none.
        chosen = declare_virtual_heads(model, base.calls, layers, num_pseudo_heads, None, collapse, mixing_scale)
        config = decoder_config(model)
        config.passes_windows = base.passes_windows
        config.passes_cu_seq_lens = base.passes_cu_seq_lens
        _attach(model)
        _start_exactly(model, chosen, seed)
        check_same(model, base.states, f"{model.config.model_type} does not compute the same with interleaved heads")
    config.interleaved_window = sliding_window
    _hide_name(model)
    return model


def declare_virtual_heads(
    model: PreTrainedModel,
    calls: dict[nn.Module, AttentionCall],
    layers: Iterable[int] | str | None,
    num_pseudo_heads: int,
    window: int | None,
    collapse: str = "per_head",
    mixing_scale: float = 1.0,
) -> dict[nn.Module, AttentionCall]:
    """Set the fields of a model's configuration of which `attach_virtual_heads` makes heads that are mixed.

    `calls` are those of its attention modules. Return the ones of the chosen `layers`."""
    chosen = _choose(calls, layers, model)
    config = decoder_config(model)
    config.interleaved_layers = _head_counts(model, chosen)
    config.num_pseudo_heads = num_pseudo_heads
    config.pseudo_collapse = collapse
    config.virtual_heads = None
    config.interleaved_window = window
    config.mixing_scale = mixing_scale
    return chosen


def remove_interleaving(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the model in place to what it was before `interleave_heads`, and return it.

    Raise a ValueError if the mixing was trained, if `interleave_heads` was given a `sliding_window`, or if the heads
    are paired: the plain model would compute something else."""
    check_unwrapped(model)
    config = decoder_config(model)
    if not hasattr(config, "interleaved_layers"):
        raise ValueError("This model has no interleaved heads: there is nothing to remove.")
    if config.virtual_heads == "paired":
        raise ValueError("The heads are paired, and the plain model would compute something else: load it again.")
    if config.interleaved_window is not None:
        raise ValueError(
            "The interleaved layers have a window of their own, which the plain model lacks: load that model again."
        )
    change = largest_change(model)
    if change > 0:
        raise ValueError(
            f"The mixing was trained: its entries are up to {change:.2g} from the start that changes nothing. The "
            "plain model would compute something else: load it again."
        )
    detach(model)
    return model


def largest_change(model: PreTrainedModel) -> float:
    """Return the largest difference of the mixing from a start that changes nothing."""
    config = decoder_config(model)
    changes = [0.0]
    for name, module in interleaved_attention(model).items():
        head_counts = config.interleaved_layers[name]
        moved = deviations(state_with_values(module), head_counts, config.num_pseudo_heads, config.pseudo_collapse)
        changes += [tensor.abs().max().nan_to_num(torch.inf).item() for tensor in moved.values()]
    return max(changes)


# Attaching and undoing


@contextmanager
def left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Undo what the body did to a plain model, if the body raises an error."""
    was_plain = not hasattr(decoder_config(model), "num_pseudo_heads")
    configs = _config_attributes(model)
    try:
        yield
    except Exception:
        if was_plain:
            detach(model)
            for module, name, config in configs:
                setattr(module, name, config)
        raise


@torch.inference_mode(False)  # a weight that is made in inference mode gets no gradient
def _attach(model: PreTrainedModel) -> None:
    """Attach the virtual heads, and forget what Transformers knows of the model by the name of its base's class."""
    if get_checkpoint_conversion_mapping(type(model).__name__) is not None:
        # Transformers renamed weights on load by this name (GPT-NeoX), and would undo this on save. A load of the
        # interleaved model finds no such rule, so its weights are saved under the names that they have. No public
        # name forgets the renaming.
        vars(model).pop("_weight_conversions", None)
    with torch.device("cpu"):  # whatever the default device is: the mixing goes where its attention module is
        attach_virtual_heads(model)
    # A model's `__init__` registers by `str(class)` what `output_hidden_states` returns, and this model was built as
    # another class. No public call does so later. From 5.24 on the registry takes models as its keys; the method
    # of `dict` works in every version.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)


@torch.inference_mode(False)
def _start_exactly(model: PreTrainedModel, chosen: dict[nn.Module, AttentionCall], seed: int | None) -> None:
    """Set the mixing to a start that changes nothing, on the devices and in the dtypes of the attention modules."""
    config = decoder_config(model)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for module, call in chosen.items():
        start = exact_start(call.head_counts, config.num_pseudo_heads, config.pseudo_collapse, generator)
        for name, value in start.items():
            mixing = module.get_submodule(name.removesuffix(".weight")).to(call.query.device, call.query.dtype)
            mixing.init_weight("weight", value)
            # `init_weights` then leaves it, as it leaves all weights of the base. There is no public mark for this.
            mixing._is_hf_initialized = True
    # `tie_weights` ties parameters and not buffers, so a tied weight takes a copy of its source's start.
    buffers = dict(model.named_buffers())
    for name, source in model.all_tied_weights_keys.items():
        if is_mixing(name):
            buffers[f"{name}_start"].copy_(buffers[f"{source}_start"])
    model.tie_weights(recompute_mapping=False)


def _hide_name(model: PreTrainedModel) -> None:
    """Empty what a model was loaded from, which is another model now.

    The configuration keeps a Hub id. A path of this machine would be published with it, so the model alone keeps
    that."""
    model.base_name_or_path = model.name_or_path
    decoder_config(model).base_name_or_path = hub_id(model.name_or_path)
    _set_name(model, "")


def _set_name(model: PreTrainedModel, name: str) -> None:
    """Set what a model was loaded from, which other libraries read from the model or from its configuration."""
    model.name_or_path = name
    model.config.name_or_path = name


def hub_id(name: str) -> str:
    """Return a name if it can be an id of the Hub, and an empty string for a path."""
    can_be = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None
    return name if can_be and not Path(name).exists() else ""


def detach(model: PreTrainedModel) -> None:
    """Undo what `interleave_heads` did to a model, as far as it got."""
    config = decoder_config(model)
    if not hasattr(config, "interleaved_layers"):
        return
    if hasattr(config, "base_name_or_path"):
        _set_name(model, vars(model).pop("base_name_or_path", config.base_name_or_path))
    detach_virtual_heads(model)
    for field in (*FIELDS, *FACTS_OF_BASE):
        vars(config).pop(field, None)
    # `save_pretrained` and a load add our entries to `auto_map`, and a load adds the type of the base.
    vars(model.config).pop("auto_map", None)
    vars(model.config).pop("base_model_type", None)


def _make_own_config(model: PreTrainedModel) -> None:
    """Give a model with a head a configuration of its own, one object for all modules.

    Models that were built from one object share it, and an EncoderDecoderModel gives its decoder a second one. A model
    without a head may be a part of a larger model, which has to read the same object: it keeps the shared one."""
    if models_by_auto_class(type(model.config)).get("AutoModel") is type(model):
        return
    copies: dict = {}  # the memo of `deepcopy`: from the id of each configuration to its copy
    own = copy.deepcopy(model.config, copies)
    for module, name, config in _config_attributes(model):
        if id(config) in copies:
            setattr(module, name, copies[id(config)])
        elif type(config) is type(own) and config.to_dict() == own.to_dict():
            setattr(module, name, own)


def _config_attributes(model: PreTrainedModel) -> list[tuple[nn.Module, str, PreTrainedConfig]]:
    """Return each module, name and value of an attribute that is a configuration."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]


# Arguments


def check_window(model: PreTrainedModel, sliding_window: Any) -> None:
    """Raise a ValueError for a window that is not an integer of at least 2 within the context, nor `None`."""
    if sliding_window is None:
        return
    if not isinstance(sliding_window, int) or sliding_window < 2:
        raise ValueError(
            f'sliding_window is {sliding_window!r}: expected at least 2 tokens, None or, in interleave_heads, "paper".'
        )
    length = getattr(decoder_config(model), "max_position_embeddings", None)
    if length is not None and sliding_window > length:
        raise ValueError(
            f"sliding_window is {sliding_window}, longer than the context of {length} tokens "
            "(max_position_embeddings): give a shorter one, or None."
        )


def _context_length(model: PreTrainedModel) -> int:
    length = getattr(decoder_config(model), "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"{model.config.model_type} has no max_position_embeddings: give the window in tokens.")
    return length


def _check_model(model: PreTrainedModel) -> None:
    """Raise a ValueError for what cannot be interleaved, as far as its class and configuration tell."""
    check_unwrapped(model)
    config = model.config
    check_no_tensor_parallelism(config)
    if hasattr(decoder_config(model), "num_pseudo_heads"):
        raise ValueError(
            "The heads of this model are interleaved already: use it as it is, or call remove_interleaving first."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{config.model_type} has an encoder, and interleaving is defined for causal self-attention alone: pass a "
            "decoder, such as AutoModelForCausalLM loads."
        )
    if type(model) not in models_by_auto_class(type(config)).values():
        raise ValueError(
            f"{type(model).__name__} is not a class that Transformers' Auto classes load as a decoder: a saved "
            "checkpoint could not be loaded."
        )
    if any(weight.is_meta for weight in model.parameters()) and not hasattr(model, "hf_device_map"):
        raise ValueError("The model is on the meta device and has no weights: load it first.")


def check_unwrapped(model: PreTrainedModel) -> None:
    """Raise a ValueError for a model that another library wraps, wholly or in parts.

    FSDP would not share a mixing that is made within its modules, and each process would train its own."""
    wrappers: list = [model]
    if isinstance(model, PreTrainedModel):
        libraries = ("torch.distributed.", "peft.")
        wrappers = [each for each in model.modules() if type(each).__module__.startswith(libraries)]
    if wrappers:
        raise ValueError(
            f"{type(wrappers[0]).__name__} is not a model of Transformers or wraps a part of one: call "
            "interleave_heads before PEFT, FSDP or DistributedDataParallel wraps the model, and remove_interleaving "
            "on the unwrapped model."
        )


def _choose(calls: dict, layers: Iterable[int] | str | None, model: PreTrainedModel) -> dict:
    """Return the recorded modules of the chosen layers."""
    indices = sorted({module.layer_idx for module in calls})
    if layers is None:
        chosen = indices
    elif layers == "paper":
        chosen = paper_layers(indices)
    else:
        chosen = list(layers) if isinstance(layers, Iterable) else []
    has_flags = any(isinstance(each, bool) for each in chosen)  # True would be layer 1
    if not chosen or has_flags or not set(chosen) <= set(indices):
        raise ValueError(
            f'layers is {layers!r}: expected "paper", None, or some of the attention layers {indices} of '
            f"{model.config.model_type}."
        )
    return {module: call for module, call in calls.items() if module.layer_idx in chosen}


def _head_counts(model: PreTrainedModel, chosen: dict[nn.Module, AttentionCall]) -> dict[str, list[int]]:
    """Return the numbers of heads of the chosen modules, by their names in the model without a head."""
    names = {module: name for name, module in backbone_of(model).named_modules()}
    return {names[module]: list(call.head_counts) for module, call in chosen.items()}
