# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make PEFT's adapters record on which interleaved model they were trained, and fail on any other model.

An adapter with the mixing among its `modules_to_save` would load on the plain base without an error. Its saved
configuration therefore has an explanatory sentence as its only target. PEFT finds no such module and prints the
sentence in its error. The targets and the record are in `auto_mapping`, and an interleaved model puts them back.

PEFT has no public way to do this. It calls no method of a model before changing the model, writes no field of another
library, and loads an adapter on any base that has its targets. `watch_peft` therefore wraps three of its methods. The
wrappers decide nothing: they ask the model, so it does not matter which copy of this code has made them.
"""

import copy
import warnings
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_interleaved import FIELDS, MIXING_MODULES
from .exact_start import deviations
from .mixing import Mixing
from .virtual_heads import virtual_heads_class


RECORD_KEY = "interleaving"  # in the `auto_mapping` of an adapter's configuration; on disk "targets" stand beside it
# By these fields PEFT finds what an adapter changes.
TARGETS = (
    "target_modules",
    "modules_to_save",
    "exclude_modules",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
)
# A saved configuration has this sentence in place of its targets. PEFT prints: "Target modules ... not found in the
# base model. Please check the target modules and try again."
TARGET_SENTENCE = (
    "of a model with interleaved heads, which this adapter needs (load it with load_adapter(base, adapter) of "
    "modeling_iha), were"
)
WRAPPED_MARK = "asks_interleaved_models"  # a mark on PEFT's class


def make_record(config: PreTrainedConfig) -> dict[str, Any]:
    """Return how a model is interleaved, and how deep it is."""
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    return {name: getattr(config, name, None) for name in (*FIELDS, "interleaved_layers")} | {"num_layers": depth}


def check_record(record: dict[str, Any], model: PreTrainedModel, what: str, holds_mixing: bool = True) -> None:
    """Raise a ValueError for a model that is not interleaved as the record of an adapter says."""
    own = make_record(model.config)
    different = [name for name, value in own.items() if record.get(name) != value]
    if different:
        raise ValueError(
            f"{what} was trained on another model, or one that is interleaved otherwise ({', '.join(different)}): "
            "load it on its plain base with load_adapter of modeling_iha, or interleave that base in the same way."
        )
    if record.get("moved") and not holds_mixing and not has_moved(model):
        raise ValueError(
            f"{what} was trained together with a trained mixing, which it does not contain, and the mixing of this "
            "model is untrained: load it on the model that it was trained on."
        )


def watch_peft() -> None:
    """Make PEFT, if it is installed, show adapters to an interleaved model.

    Call this before creating an interleaved model. PEFT is imported here (0.5 s), because otherwise adapters could be
    saved without a record. Wrapping twice, as two threads may, is harmless."""
    try:
        from peft import PeftModel
        from peft.config import PeftConfigMixin
        from peft.tuners.tuners_utils import BaseTuner
    except Exception:  # PEFT is not installed, or broken, which its users will see
        return
    if hasattr(BaseTuner, WRAPPED_MARK):
        return
    inject = BaseTuner.inject_adapter
    save_adapters = PeftModel.save_pretrained
    save_config = PeftConfigMixin.save_pretrained

    @wraps(inject)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        _prepare_adapter(self, model, self.peft_config[adapter_name])
        return inject(self, model, adapter_name, *args, **kwargs)

    @wraps(save_adapters)
    def save_pretrained(self, *args, **kwargs):
        for config in self.peft_config.values():
            if _is_prompt(config):  # it has changed no module, so the model has not met it
                _prepare_adapter(None, self.get_base_model(), config)
        return save_adapters(self, *args, **kwargs)

    @wraps(save_config)
    def save_pretrained_config(self, *args, **kwargs):
        config = _with_targets_hidden(self)
        if config is not self:
            kwargs["auto_mapping_dict"] = config.auto_mapping
        return save_config(config, *args, **kwargs)

    setattr(BaseTuner, "inject_adapter", inject_adapter)
    setattr(PeftModel, "save_pretrained", save_pretrained)
    setattr(PeftConfigMixin, "save_pretrained", save_pretrained_config)
    setattr(BaseTuner, WRAPPED_MARK, True)


def _is_prompt(config: Any) -> bool:
    return config.is_prompt_learning or config.is_adaption_prompt


def _prepare_adapter(tuner: Any, model: nn.Module, config: Any) -> None:
    """Pass an adapter's configuration to its model if the model is interleaved.

    Otherwise drop a record from an earlier model."""
    if hasattr(model, "meet_adapter"):
        model.meet_adapter(tuner, config)
    elif hasattr(getattr(model, "config", None), "interleaved_layers"):
        raise ValueError(f"This {type(model).__name__} is a part of an interleaved model: give PEFT the whole model.")
    elif saved_record(config) is None:
        _drop_record(config)


def _drop_record(config: Any) -> None:
    """Drop the record of an earlier model from the configuration of an adapter."""
    if RECORD_KEY in (config.auto_mapping or {}):
        config.auto_mapping = None


def _with_targets_hidden(config: Any) -> Any:
    """Return the configuration to save.

    If it has a record, this is a copy with its targets hidden. Prompt adapters have no targets, so their `task_type`
    is hidden instead: PEFT prints an unknown task type in its error."""
    if RECORD_KEY not in (config.auto_mapping or {}) or saved_record(config) is not None:
        return config
    saved = copy.copy(config)
    hidden = ("task_type",) if _is_prompt(config) else TARGETS
    targets = {}
    for name in hidden:
        if hasattr(config, name):
            value = getattr(config, name)
            targets[name] = sorted(value) if isinstance(value, set) else value
            setattr(saved, name, None)
    if _is_prompt(config):
        saved.task_type = TARGET_SENTENCE
    else:
        saved.target_modules = TARGET_SENTENCE
        saved.modules_to_save = list(MIXING_MODULES) if config.auto_mapping[RECORD_KEY]["mixing"] else None
    saved.auto_mapping = {**config.auto_mapping, "targets": targets}
    return saved


def saved_record(config: Any) -> dict[str, Any] | None:
    """Return the record of a configuration that was read from disk and is not restored yet, else `None`.

    Such a record has "targets" beside it."""
    mapping = config.auto_mapping or {}
    return mapping[RECORD_KEY] if "targets" in mapping else None


def restore_targets(config: Any) -> None:
    """Put back the targets that a saved configuration leaves out."""
    for name, value in config.auto_mapping["targets"].items():
        is_set = isinstance(value, list) and name in ("target_modules", "exclude_modules")
        setattr(config, name, set(value) if is_set else value)
    config.auto_mapping = None  # written anew


def meet_adapter(model: PreTrainedModel, tuner: Any, config: Any) -> None:
    """Prepare the configuration of an adapter for this model.

    The configuration gets the targets that it left out on disk, and records the model when it is saved again. `tuner`
    is PEFT's, or None for a prompt. Raise a ValueError for an adapter that was trained on another model, or that
    trains a part of the mixing."""
    found = saved_record(config)
    _complete_targets(config, model, tuner)
    holds_mixing = _holds_mixing(config, model)
    if found is not None:
        _check_found_record(found, model, holds_mixing)
    moved = has_moved(model)
    is_trained = tuner is not None and not config.inference_mode
    if is_trained and not holds_mixing and not moved:
        warnings.warn(
            "The adapter leaves the mixing frozen at its start, where pseudo-heads add nothing: to train it, name "
            "q_mix, k_mix, v_mix and collapse in modules_to_save."
        )
    _write_record(config, model, moved, holds_mixing)


def _complete_targets(config: Any, model: PreTrainedModel, tuner: Any) -> None:
    """Fill in the targets of an adapter: those that it left out on disk, or PEFT's usual ones for the model type."""
    if saved_record(config) is not None:
        restore_targets(config)
    if tuner is not None:
        # PEFT looks for its usual targets under the model type that is saved, "interleaved".
        tuner._prepare_adapter_config(config, {**model.config.to_dict(), "model_type": model.config.model_type})


def _holds_mixing(config: Any, model: PreTrainedModel) -> bool:
    """Return whether an adapter trains and saves the mixing. Raise a ValueError if it is only a part of it."""
    mixing = [name for name, module in model.named_modules() if isinstance(module, Mixing)]
    mixing = [name for name in mixing if ".modules_to_save." not in name]  # those are copies of other adapters
    saved_mixing = _saved_mixing(config, mixing)
    _check_all_or_nothing(config, mixing, saved_mixing)
    return bool(saved_mixing)


def _saved_mixing(config: Any, mixing: list[str]) -> list[str]:
    """Return the names of the mixing modules that an adapter trains and saves, alone or within another module.

    PEFT trains each module whose name ends with a name of `modules_to_save`."""
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    found = []
    for name in mixing:
        parts = name.split(".")
        modules = [".".join(parts[: depth + 1]) for depth in range(len(parts))]  # from the outermost to the mixing
        if any(module.endswith(saved) for module in modules):
            found.append(name)
    return found


def _check_all_or_nothing(config: Any, mixing: list[str], saved_mixing: list[str]) -> None:
    """Raise a ValueError for an adapter that trains a part of the mixing, or its parameters by themselves."""
    parameters = tuple(getattr(config, "target_parameters", None) or ())
    is_part = 0 < len(saved_mixing) < len(mixing)
    if is_part or any(f"{name}.weight".endswith(parameters) for name in mixing):
        raise ValueError(
            "An adapter trains and saves all of the mixing or nothing of it: name q_mix, k_mix, v_mix and collapse in "
            "modules_to_save, or none of them, and no parameter of theirs in target_parameters."
        )


def _check_found_record(found: dict[str, Any], model: PreTrainedModel, holds_mixing: bool) -> None:
    """Raise a ValueError for a saved adapter that does not suit the model, or whose mixing lacks its scale."""
    check_record(found, model, "The adapter", holds_mixing=holds_mixing)
    if holds_mixing and "mixing" not in found:
        raise ValueError(
            "An earlier version saved this adapter, without the scale of its mixing: load it with load_adapter of "
            "modeling_iha, and save it again."
        )


def _write_record(config: Any, model: PreTrainedModel, moved: bool, holds_mixing: bool) -> None:
    """Record the model in the configuration of an adapter, unless the adapter also suits the plain base."""
    _drop_record(config)
    if not (holds_mixing or moved or model.config.interleaved_window is not None):
        return
    base = next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers."))
    record = make_record(model.config) | {"moved": moved, "mixing": holds_mixing}
    record["mixing_scale"] = model.config.mixing_scale  # to make another model with; the weights have their own
    config.auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__, RECORD_KEY: record}


def has_moved(model: PreTrainedModel) -> bool:
    """Return whether the mixing may have left the start that changes nothing.

    Copies that an adapter trains do not count. Paired heads have no mixing, and compute something other than the plain
    model."""
    if model.config.virtual_heads == "paired":
        return True
    for attention in model.modules():
        if virtual_heads_class(attention) is None:
            continue
        mixing = {name: getattr(attention, name) for name in MIXING_MODULES}
        mixing = {name: getattr(module, "original_module", module) for name, module in mixing.items()}
        if any(module.weight.is_meta or hasattr(module.weight, "full_tensor") for module in mixing.values()):
            return True  # offloaded or sharded: the values cannot be read here, so assume that they moved
        own = {f"{name}.weight": module.value().detach() for name, module in mixing.items()}
        heads = [own[f"{name}.weight"].shape[0] for name in ("q_mix", "k_mix", "v_mix")]
        moved = deviations(own, heads, model.config.num_pseudo_heads, model.config.pseudo_collapse)
        if any(deviation.any() for deviation in moved.values()):
            return True
    return False
