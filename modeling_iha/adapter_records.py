# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Have PEFT's adapters record on which interleaved model they were trained, and fail on any other model.

An adapter with the mixing among its `modules_to_save` would load on the plain base without a word. Its saved
configuration therefore names no target but a sentence, which PEFT finds in no model and prints. The targets and the
record are in `auto_mapping`, and an interleaved model puts them back.
"""

import copy
import sys
import warnings
from functools import cache, partial, wraps
from itertools import accumulate
from typing import Any

from transformers import PreTrainedConfig

from .configuration_interleaved import FIELDS, MIXING_MODULES
from .interleaving import Mixing


RECORD = "interleaving"  # in the `auto_mapping` of an adapter's configuration, and so is "targets"
# By these fields PEFT finds what an adapter changes.
TARGETS = (
    *("target_modules", "modules_to_save", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern"),
)
# PEFT: "Target modules ... not found in the base model. Please check the target modules and try again."
NO_TARGETS = (
    "of a model with interleaved heads, which this adapter needs (load it with load_adapter(base, adapter) of "
    "modeling_iha), were"
)


def record_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return how a model is interleaved, and how deep it is."""
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    return {name: getattr(config, name, None) for name in (*FIELDS, "interleaved_layers")} | {"num_layers": depth}


def check_record(record: dict[str, Any], config: PreTrainedConfig, what: str) -> None:
    """Raise a ValueError for a model that is not interleaved as the record of an adapter says."""
    if different := [name for name, value in record_of(config).items() if record.get(name) != value]:
        raise ValueError(
            f"{what} was trained on another model, or one that is interleaved otherwise ({', '.join(different)}): "
            "load it on its plain base with load_adapter of modeling_iha, or interleave that base in the same way."
        )


def watch_adapters() -> None:
    """Have PEFT, if it is imported, show each adapter's configuration to an interleaved model before it changes it."""
    if (tuners := sys.modules.get("peft.tuners.tuners_utils")) is not None:
        _watch(tuners.BaseTuner)


@cache
def _watch(tuner_class: Any) -> None:
    inject = tuner_class.inject_adapter

    @wraps(inject)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        config = self.peft_config[adapter_name]
        vars(config).pop("save_pretrained", None)  # of another model
        if hasattr(getattr(model, "config", None), "interleaved_layers"):
            _meet(self, model, config)
        return inject(self, model, adapter_name, *args, **kwargs)

    tuner_class.inject_adapter = inject_adapter


def found_record(config: Any) -> dict[str, Any] | None:
    """Return the record of an adapter's configuration, or None for one that needs no interleaved heads."""
    return (config.auto_mapping or {}).get(RECORD)


def restore_targets(config: Any) -> None:
    """Put back the targets that a saved configuration leaves out."""
    for name, value in config.auto_mapping["targets"].items():
        is_set = isinstance(value, list) and name in ("target_modules", "exclude_modules")
        setattr(config, name, set(value) if is_set else value)
    config.auto_mapping = None  # written anew


def _meet(tuner: Any, model: Any, config: Any) -> None:
    """Put back what a saved configuration leaves out, and have it record the model when it is saved again."""
    record = record_of(model.config)
    if (found := found_record(config)) is not None:
        check_record(found, model.config, "The adapter")
        restore_targets(config)
    # PEFT looks for its usual targets under the model type that is saved, "interleaved".
    tuner._prepare_adapter_config(config, {**model.config.to_dict(), "model_type": model.config.model_type})

    mixing = {name: module for name, module in model.named_modules() if isinstance(module, Mixing)}
    mixing = {name: module for name, module in mixing.items() if ".modules_to_save." not in name}  # of other adapters
    saved, parameters = (tuple(getattr(config, name, None) or ()) for name in ("modules_to_save", "target_parameters"))
    kept = [name for name in mixing if any(place.endswith(saved) for place in accumulate(name.split("."), _join))]
    if 0 < len(kept) < len(mixing) or any(f"{name}.weight".endswith(parameters) for name in mixing):
        raise ValueError(
            "An adapter trains and saves all of the mixing or nothing of it: name q_mix, k_mix, v_mix and collapse in "
            "modules_to_save, or none of them, and no parameter of theirs in target_parameters."
        )
    # Paired heads have no mixing, and the plain model computes something else.
    has_moved = record["virtual_heads"] == "paired" or any(map(_moved, mixing.values()))
    if found is not None and found.get("moved") and not (kept or has_moved):
        raise ValueError(
            "The adapter was trained beside a trained mixing, which it does not hold, and this model's is at its "
            "start: load it on the model that it was trained on."
        )
    if not (kept or has_moved or config.inference_mode):
        warnings.warn(
            "The adapter leaves the mixing frozen at its start, where pseudo-heads add nothing: to train it, name "
            "q_mix, k_mix, v_mix and collapse in modules_to_save."
        )
    if kept or has_moved or record["interleaved_window"] is not None:
        base = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers."))
        record["moved"] = has_moved
        found_by = {"base_model_class": base.__name__, "parent_library": base.__module__, RECORD: record}
        config.save_pretrained = partial(_save_config, config, found_by, bool(kept))


def _join(place: str, name: str) -> str:
    return f"{place}.{name}"


def _moved(module: Mixing) -> bool:
    """Return whether a mixing weight may have left the start that changes nothing."""
    has_start = hasattr(module, "weight_start")
    return not has_start or any(weight.is_meta or bool(weight.any()) for weight in module.parameters())


def _save_config(config: Any, found_by: dict, with_mixing: bool, directory: str, auto_mapping_dict=None, **kwargs):
    """Save the configuration of an adapter with its record, and with no target that a plain model has."""
    saved = copy.copy(config)
    del saved.save_pretrained
    targets = {name: getattr(config, name) for name in TARGETS if hasattr(config, name)}
    for name, value in targets.items():
        targets[name] = sorted(value) if isinstance(value, set) else value
        setattr(saved, name, None)
    saved.target_modules = NO_TARGETS
    saved.modules_to_save = list(MIXING_MODULES) if with_mixing else None
    saved.save_pretrained(directory, auto_mapping_dict={**found_by, "targets": targets}, **kwargs)
