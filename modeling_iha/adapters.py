# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Load an adapter, or the mixing alone, on the plain base that it was trained on with interleaved heads."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import cached_file, find_adapter_config_file

from .adapter_records import RECORD_KEY, check_record, has_moved, make_record
from .in_place import detach, interleave_heads
from .mixing_scale import note_scale
from .mixing_weights import gathered, is_sharded
from .modeling_interleaved import LOADED_MIXING, backbone_of, is_mixing, use_virtual_cores
from .paired_decoders import pair_heads


MIXING_FILE = "interleaving.safetensors"  # the record is in its metadata, so that no writer leaves half of it
HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")


def load_adapter(model: PreTrainedModel, source: str | os.PathLike, **kwargs) -> Any:
    """Interleave a plain base model as an adapter was trained, in place, and load the adapter.

    Args:
        model: the plain base model, or one that is interleaved in the same way.
        source: the directory or Hub id of an adapter that PEFT or Trainer saved, or of what `save_mixing` saved.
        kwargs: those of `PeftModel.from_pretrained`, such as `is_trainable=True` or `adapter_name`.

    Return PEFT's model, or for mixing alone the model itself. Raise a ValueError for a base with other layers or
    heads, for an adapter that needs no interleaved heads, and on a plain base for one that was trained on a mixing and
    does not hold it. As in PEFT, weights are not compared, so another base of the same shape raises no error."""
    source = str(source)
    hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
    file = find_adapter_config_file(source, **hub)
    if file is None:
        return _load_mixing(model, source, hub)
    try:
        from peft import PeftConfig, PeftModel
        from peft.utils import SAFETENSORS_WEIGHTS_NAME
    except ImportError as error:
        raise ImportError("load_adapter of an adapter needs PEFT: pip install peft.") from error

    # PEFT cannot parse a prompt configuration while its `task_type` is hidden, so read the raw fields.
    fields = PeftConfig.from_json_file(file)
    mapping = fields.get("auto_mapping") or {}
    if RECORD_KEY not in mapping:
        raise ValueError(f"{source} needs no interleaved heads: load it with PeftModel.from_pretrained.")
    config = PeftConfig.from_peft_type(**{**fields, **mapping["targets"], "auto_mapping": None})
    record = mapping[RECORD_KEY]
    # Older records lack "mixing"; then `modules_to_save` tells whether the adapter holds it.
    holds_mixing = record.get("mixing", bool(fields.get("modules_to_save")))
    needs_mixing = not holds_mixing and record.get("virtual_heads") != "paired"
    if not hasattr(model.config, "interleaved_layers") and needs_mixing:
        raise ValueError(f"{source} holds no mixing: load it on the interleaved model that it was trained on.")
    with _interleaved(model, record, source, holds_mixing):
        if not holds_mixing or "mixing" in record:
            return PeftModel.from_pretrained(model, source, config=config, **kwargs)
        # An earlier version saved it. PEFT loads no adapter that lacks a tensor.
        tensors = load_file(cached_file(source, SAFETENSORS_WEIGHTS_NAME, **hub))
        _add_scale(tensors, record["mixing_scale"])
        with TemporaryDirectory() as place:
            save_file(tensors, Path(place) / SAFETENSORS_WEIGHTS_NAME, {"format": "pt"})
            others = {name: value for name, value in kwargs.items() if name not in HUB_OPTIONS}
            return PeftModel.from_pretrained(model, place, config=config, **others)


def save_mixing(model: PreTrainedModel, directory: str | os.PathLike) -> None:
    """Save the mixing of an interleaved model alone, in a file of kilobytes that `load_adapter` loads on the base."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model.config, "interleaved_layers"):
        raise ValueError(f"{type(model).__name__} has no interleaved heads of its own. An adapter saves its mixing.")
    if model.config.virtual_heads == "paired":
        raise ValueError("Paired heads have no mixing: save the model, or an adapter.")
    note_scale(model, [model.config])
    tensors = {name: gathered(tensor).cpu().clone() for name, tensor in _mixing(model).items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{MIXING_FILE}.{os.getpid()}"
    try:
        record = make_record(model.config) | {"mixing_scale": model.config.mixing_scale}
        save_file(tensors, partial, {"format": "pt", RECORD_KEY: json.dumps(record)})
        partial.replace(directory / MIXING_FILE)
    finally:
        partial.unlink(missing_ok=True)


def _load_mixing(model: PreTrainedModel, source: str, hub: dict) -> PreTrainedModel:
    file = cached_file(source, MIXING_FILE, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        raise ValueError(f"{source} holds neither an adapter (adapter_config.json) nor mixing ({MIXING_FILE}).")
    with safe_open(file, "pt") as opened:
        record_json = (opened.metadata() or {}).get(RECORD_KEY)
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    if record_json is None:
        raise ValueError(f"{file} does not record how its model was interleaved: save it by save_mixing.")
    record = json.loads(record_json)
    with _interleaved(model, record, source), torch.no_grad():
        own = _mixing(model)
        _add_scale(tensors, record["mixing_scale"])
        found = {name: tensor.shape for name, tensor in tensors.items()}
        expected = {name: tensor.shape for name, tensor in own.items()}
        if found != expected:
            raise ValueError(f"{source} does not hold the mixing that its record names.")
        for name, tensor in own.items():
            loaded = tensors[name].to(tensor)
            if is_sharded(tensor):
                loaded = torch.distributed.tensor.distribute_tensor(loaded, tensor.device_mesh, tensor.placements)
            tensor.copy_(loaded)
        note_scale(model, [model.config])
        if has_moved(model):
            setattr(model, LOADED_MIXING, True)
            use_virtual_cores(model)
    return model


def _add_scale(tensors: dict[str, torch.Tensor], scale: float) -> None:
    """Add the scale that older files lack.

    At scale 1 also add the missing starts, which are zero."""
    for name in list(tensors):
        if not is_mixing(name) or not name.endswith(".weight"):
            continue
        tensors.setdefault(f"{name}_scale", tensors[name].new_tensor(scale))
        if scale == 1:
            tensors.setdefault(f"{name}_start", torch.zeros_like(tensors[name]))


def _mixing(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of the mixing, their starts and scales, by their names in the model without a head."""
    state = {name: tensor for name, tensor in backbone_of(model).state_dict().items() if is_mixing(name)}
    if any(tensor.is_meta or "modules_to_save" in name for name, tensor in state.items()):
        raise ValueError("The mixing is offloaded or within an adapter: load the model whole, or save the adapter.")
    return state


@contextmanager
def _interleaved(model: PreTrainedModel, record: dict, source: str, holds_mixing: bool = True) -> Iterator[None]:
    """Interleave a plain model as recorded, or check that an interleaved model matches.

    Undo the interleaving if the body of the `with` statement fails."""
    record = {"virtual_heads": None} | record  # earlier versions only mixed heads
    lacking = sorted({"mixing_scale", *make_record(model.config)} - record.keys())
    if lacking:
        raise ValueError(
            f"The record of {source} lacks {', '.join(lacking)}: it is damaged, or not one of save_mixing."
        )
    is_plain = not hasattr(model.config, "interleaved_layers")
    if is_plain:
        try:
            layers = {backbone_of(model).get_submodule(name).layer_idx for name in record["interleaved_layers"]}
        except AttributeError as error:
            raise ValueError(f"{source} was trained on another base than this model: {error}.") from None
        options = {"layers": sorted(layers), "sliding_window": record["interleaved_window"]}
        if record.get("virtual_heads") == "paired":
            pair_heads(model, record["num_pseudo_heads"], **options)
        else:
            options |= {"collapse": record["pseudo_collapse"], "mixing_scale": record["mixing_scale"]}
            interleave_heads(model, record["num_pseudo_heads"], **options)
    try:
        check_record(record, model, source, holds_mixing)
        yield
    except Exception:
        if is_plain:
            detach(model)
        raise
