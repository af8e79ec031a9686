# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Interleave the heads of a decoder of Transformers in place, without changing what it computes, and undo it.

exact_start.py makes a mixing that changes nothing, and explains why. A probe compares the model before and after.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .exact_start import deviations, exact_start
from .flop_matched_window import flop_matched_window
from .interleaved_attention import core_of, decoder_config
from .mixing_weights import state_with_values
from .modeling_interleaved import (
    HOOK,
    MIXING_MODULES,
    MODEL_TYPE,
    attach_virtual_heads,
    backbone_of,
    base_class,
    check_layers,
    check_no_tensor_parallelism,
    decoder_of,
    interleaved_attention,
    interleaved_class,
    is_mixing,
    register_models,
    tasks,
    use_virtual_core,
    without_types,
)
from .probes import (
    TOLERANCE,
    AttentionCall,
    one_line,
    passes_lengths,
    passes_windows,
    probe,
    recording,
    relative_difference,
    try_probe,
)


FIELDS = (
    "num_pseudo_heads",
    "pseudo_collapse",
    "virtual_heads",
    "interleaved_layers",
    "interleaved_window",
    "mixing_scale",
)
FACTS_OF_BASE = ("passes_windows", "passes_cu_seq_lens", "base_name_or_path")  # fields too


class LocalInterleavedConfig(PreTrainedConfig):
    """Read a saved configuration as one of the installed package.

    The Auto classes then load the model classes from the package too, and not from the checkpoint's code."""

    model_type = MODEL_TYPE

    def __new__(cls, **fields):
        # `AutoConfig.for_model` passes the fields as keywords, for the decoder of an encoder-decoder.
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> PreTrainedConfig:
        base = config_dict.get("base_model_type")
        if base not in CONFIG_MAPPING:
            raise ValueError(
                f"base_model_type is {base!r}: expected a model type of Transformers {transformers.__version__}. A "
                "newer version may have it."
            )
        register_models(CONFIG_MAPPING[base])
        return interleaved_class(CONFIG_MAPPING[base]).from_dict(without_types(config_dict), **kwargs)


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
    # The configuration is changed below. A model with a head gets a copy of it, because other models may share the
    # object. A model without a head may be part of a larger model, which must read the same object, so there it is
    # changed in place.
    own_configs = config_attributes(model)
    if tasks(type(model.config)).get("AutoModel") is not type(model):
        _copy_config(model)
    try:
        calls, expected = _record_attention(model)
        chosen = _choose(calls, layers, model, sliding_window)
        decoder_config(model).passes_windows = passes_windows(model, expected)
        decoder_config(model).passes_cu_seq_lens = passes_lengths(model)
        _attach_and_compare(model, chosen, expected, num_pseudo_heads, collapse, seed, mixing_scale)
    except Exception:
        restore_configs(own_configs)
        raise
    set_interleaved_window(model, sliding_window)
    decoder_config(model).base_name_or_path = model.name_or_path
    set_name(model, "")
    return model


def set_name(model: PreTrainedModel, name: str) -> None:
    """Set what a model was loaded from, which other libraries read from the model or from its configuration."""
    model.name_or_path = name
    model.config.name_or_path = name


def remove_interleaving(model: PreTrainedModel) -> PreTrainedModel:
    """Restore the model in place to what it was before `interleave_heads`, and return it.

    Raise a ValueError if the mixing was trained, if `interleave_heads` was given a `sliding_window`, or if the heads
    are paired: the plain model would compute something else."""
    check_unwrapped(model)
    config = decoder_config(model)
    if not hasattr(config, "interleaved_layers"):
        raise ValueError("This model has no interleaved heads: there is nothing to remove.")
    check_layers(model)
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
    if type(model) not in tasks(type(config)).values():
        raise ValueError(
            f"{type(model).__name__} is not a class that Transformers' Auto classes load as a decoder: a saved "
            "checkpoint could not be loaded."
        )
    if any(weight.is_meta for weight in model.parameters()) and not hasattr(model, "hf_device_map"):
        raise ValueError("The model is on the meta device and has no weights: load it first.")


def check_unwrapped(model: PreTrainedModel) -> None:
    """Raise a ValueError for a model that another library wraps, wholly or in parts.

    FSDP would not share a mixing that is made within its modules, and each process would train its own."""
    if isinstance(model, str):
        raise ValueError(f"{model!r} is a name: load the model first, as by AutoModelForCausalLM.from_pretrained.")
    modules = [model, *model.modules()] if isinstance(model, nn.Module) else [model]
    wrappers = [each for each in modules if type(each).__module__.startswith(("torch.distributed.", "peft."))]
    if not isinstance(model, PreTrainedModel):
        wrappers = [model]
    if wrappers:
        raise ValueError(
            f"{type(wrappers[0]).__name__} is not a model of Transformers or wraps a part of one: call "
            "interleave_heads before PEFT, FSDP or DistributedDataParallel wraps the model, and remove_interleaving "
            "on the unwrapped model."
        )


# Configurations


def _copy_config(model: PreTrainedModel) -> None:
    """Give the model a configuration of its own, one object for all modules.

    Models that were built from one object share it, and an EncoderDecoderModel gives its decoder a second one."""
    copies: dict = {}  # the memo of `deepcopy`: from the id of each configuration to its copy
    own = copy.deepcopy(model.config, copies)
    for module, name, config in config_attributes(model):
        if id(config) in copies:
            setattr(module, name, copies[id(config)])
        elif type(config) is type(own) and config.to_dict() == own.to_dict():
            setattr(module, name, own)


def config_attributes(model: PreTrainedModel) -> list[tuple[nn.Module, str, PreTrainedConfig]]:
    """Return each module, name and value of an attribute that is a configuration."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]


def restore_configs(attributes: list[tuple[nn.Module, str, PreTrainedConfig]]) -> None:
    """Set attributes back to the values that `config_attributes` found."""
    for module, name, config in attributes:
        setattr(module, name, config)


def set_interleaved_window(model: PreTrainedModel, window: int | None) -> None:
    """Give the interleaved layers a window in tokens, after the comparison with the base, which has no such window."""
    decoder_config(model).interleaved_window = window
    use_virtual_core(model)


# Which modules attend


def _record_attention(model: PreTrainedModel) -> tuple[dict[nn.Module, AttentionCall], list[torch.Tensor]]:
    """Return the calls of the attention modules that call the registry, and the hidden states of the probe.

    Raise a ValueError for a model whose calls show that it cannot be interleaved, or that does not run the probe."""
    with recording(model) as calls:
        states, error = try_probe(model)
    # Check the calls before the error: if a model cannot be interleaved, they show the reason, and its own error does
    # not.
    _check_calls(model, calls)
    if error is None:
        # Some models branch on the name of their core, and took another branch for the name that records. Run the
        # probe once more under the real name: these are the states to compare with.
        states, error = try_probe(model)
    model_type = model.config.model_type
    if error is not None:
        raise ValueError(f"{model_type} does not run with a padding mask and a cache: {one_line(error)}") from error
    if not all(each.isfinite().all() for each in states):
        raise ValueError(
            f"{model_type} itself returns NaN or infinity for a padded batch: try another dtype or "
            "attn_implementation."
        )
    return calls, states


def _check_calls(model: PreTrainedModel, calls: dict[nn.Module, AttentionCall]) -> None:
    """Raise a ValueError for a model whose attention cannot be interleaved, by the recorded calls."""
    model_type = model.config.model_type
    if not calls:
        raise ValueError(
            f"{model_type} does not call attention through the registry of Transformers, so its heads cannot be "
            "interleaved."
        )
    if "reference_sliding_attention" in (getattr(decoder_config(model), "layer_types", None) or ()):
        raise ValueError(
            f"{model_type} cannot be interleaved: its own cache layers keep the prompt in addition to a window."
        )
    for module, call in calls.items():
        name = f"{model_type} cannot be interleaved: {type(module).__name__}"
        if not call.is_causal:
            raise ValueError(f"{name} is not marked as causal self-attention.")
        if not hasattr(module, "layer_idx"):
            raise ValueError(f"{name} has no layer_idx.")
        if getattr(module, "indexer", None) is not None or getattr(module, "compressor", None) is not None:
            raise ValueError(f"{name} chooses or compresses the keys of each query, in a mask over tokens of its own.")


def _choose(calls: dict, layers: Iterable[int] | str | None, model: PreTrainedModel, window: int | None) -> dict:
    """Return the recorded modules of the chosen layers."""
    indices = sorted({module.layer_idx for module in calls})
    if layers == "paper":
        layers = [index for place, index in enumerate(indices) if place % 5 != 4]
    chosen: list = indices if layers is None else list(layers) if isinstance(layers, Iterable) else []
    if not chosen or any(isinstance(index, bool) or index not in indices for index in chosen):
        raise ValueError(
            f'layers is {layers!r}: expected "paper", None, or some of the attention layers {indices} of '
            f"{model.config.model_type}."
        )
    return {module: call for module, call in calls.items() if module.layer_idx in chosen}


def _attach_and_compare(
    model: PreTrainedModel,
    chosen: dict,
    expected: list[torch.Tensor],
    num_pseudo_heads: int,
    collapse: str,
    seed: int | None,
    mixing_scale: float,
) -> None:
    """Attach the mixing to the chosen modules.

    Raise a ValueError, and detach it again, if the hidden states of the probe are not the `expected` ones."""
    cause = None
    try:
        _make_interleaved(model, chosen, num_pseudo_heads, collapse, seed, mixing_scale)
        difference = relative_difference(expected, probe(model))
        problem = None if difference <= TOLERANCE[expected[0].dtype] else f"hidden states differ by {difference:.1e}"
    except torch.OutOfMemoryError:  # not a property of the model type
        detach(model)
        raise
    except Exception as error:  # whatever the base model's code does with a mask or a state that it does not expect
        cause = error
        problem = one_line(error)
    if problem is not None:
        detach(model)
        raise ValueError(
            f"{model.config.model_type} does not compute the same with interleaved heads ({problem}), and is left as "
            "it was: docs/MODEL_TYPES.md lists the types that do."
        ) from cause


@torch.inference_mode(False)  # a weight that is made in inference mode gets no gradient
def _make_interleaved(
    model: PreTrainedModel,
    chosen: dict,
    num_pseudo_heads: int,
    collapse: str,
    seed: int | None,
    mixing_scale: float,
) -> None:
    """Turn the model into one of an interleaved class, with an exact start."""
    names = {module: name for name, module in backbone_of(model).named_modules() if module in chosen}
    config = decoder_config(model)
    config.interleaved_layers = {names[module]: list(call.head_counts) for module, call in chosen.items()}
    config.num_pseudo_heads = num_pseudo_heads
    config.pseudo_collapse = collapse
    config.virtual_heads = None
    config.interleaved_window = None
    config.mixing_scale = mixing_scale
    if get_checkpoint_conversion_mapping(type(model).__name__) is not None:
        # Transformers renamed weights on load by the name of the base's class (GPT-NeoX), and would undo this on save.
        # A load of the interleaved model finds no such rule, so its weights are saved under the names that they have.
        # No public name forgets the renaming.
        vars(model).pop("_weight_conversions", None)
    base = type(model.config)
    register_models(base)  # for `from_config` of the Auto classes
    model.config.__class__ = interleaved_class(base)
    model.__class__ = interleaved_class(type(model), base)
    # A model's `__init__` registers by `str(class)` what `output_hidden_states` returns, and this model was built as
    # another class. No public call does so later. From 5.24 on the registry takes models as its keys; the method
    # of `dict` works in every version.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)
    with torch.device("cpu"):  # whatever the default device is: the mixing goes where its attention module is
        attach_virtual_heads(model)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for module, call in chosen.items():
        for name, start in exact_start(call.head_counts, num_pseudo_heads, collapse, generator).items():
            mixing = module.get_submodule(name.removesuffix(".weight")).to(call.query.device, call.query.dtype)
            mixing.init_weight("weight", start)
            # `init_weights` then leaves it, as it leaves all weights of the base. There is no public mark for this.
            mixing._is_hf_initialized = True
    # `tie_weights` ties parameters and not buffers, so a tied weight takes a copy of its source's start.
    buffers = dict(model.named_buffers())
    for name, source in model.all_tied_weights_keys.items():
        if is_mixing(name):
            buffers[f"{name}_start"].copy_(buffers[f"{source}_start"])
    model.tie_weights(recompute_mapping=False)


def detach_virtual_heads(model: PreTrainedModel) -> None:
    """Remove what `attach_virtual_heads` added, but for the fields of the configuration."""
    config = decoder_config(model)
    decoder = decoder_of(model)
    # `register_forward_pre_hook` returns a handle, which a copy of the model would lack: the hook goes by its key.
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        getattr(decoder, name).pop(HOOK, None)
    vars(decoder).pop("save_pretrained", None)
    for module in interleaved_attention(model).values():
        for name in (*MIXING_MODULES, "paired_heads"):
            if hasattr(module, name):
                delattr(module, name)
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if not is_mixing(name)}
    # The public `set_attn_implementation` also changes the configurations of vision towers.
    config._attn_implementation_internal = core_of(config._attn_implementation)


def detach(model: PreTrainedModel) -> None:
    """Undo `_make_interleaved`, as far as it got."""
    config = decoder_config(model)
    if hasattr(config, "interleaved_layers"):
        detach_virtual_heads(model)
    if hasattr(config, "base_name_or_path"):
        set_name(model, config.base_name_or_path)
    for field in (*FIELDS, *FACTS_OF_BASE):
        vars(config).pop(field, None)
    # `save_pretrained` and a load add our entries to `auto_map`, and a load adds the type of the base.
    vars(model.config).pop("auto_map", None)
    vars(model.config).pop("base_model_type", None)
    model.__class__ = base_class(type(model))
    model.config.__class__ = base_class(type(model.config))
