# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Save a PEFT adapter of an interleaved model with its mixing, or the mixing alone, and load it on the plain base.

PEFT by itself writes the weights that it trained and nothing about the heads of their model. So `save_adapter` adds
two files: the mixing below the adapter, with its starts and scales, and a record of how the model is interleaved.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .in_place import FIELDS, hub_id, interleave_heads, left_as_it_was
from .interleaved_attention import decoder_config, has_virtual_heads
from .mixing_weights import gathered, is_sharded
from .modeling_interleaved import backbone_of, interleaved_attention, is_mixing
from .paired_decoders import pair_heads


RECORD_FILE = "interleaving.json"
MIXING_FILE = "interleaving.safetensors"  # paired heads have none
HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")


def save_adapter(model: nn.Module, directory: str | os.PathLike) -> None:
    """Save a PEFT adapter of an interleaved model such that `load_adapter` loads it on the plain base.

    Args:
        model: PEFT's model, or an interleaved model without an adapter, of which the mixing alone is saved.
        directory: where to write what PEFT's `save_pretrained` writes, `interleaving.safetensors` and
            `interleaving.json`. As in PEFT, an adapter that is not named "default" gets a directory within it.

    Under FSDP2 every process must call this, because sharded weights are gathered."""
    base = base_of_adapter(model)
    if not isinstance(base, PreTrainedModel) or not hasattr(decoder_config(base), "interleaved_layers"):
        raise ValueError(f"{type(base).__name__} has no interleaved heads: save it with save_pretrained.")
    adapters = getattr(model, "peft_config", {"default": None})
    if hasattr(model, "peft_config"):
        model.save_pretrained(directory)
    record = make_record(base)
    tensors = {name: gathered(tensor).cpu().clone() for name, tensor in mixing_of(base).items()}
    for name in adapters:
        place = Path(directory) if name == "default" else Path(directory, name)
        place.mkdir(parents=True, exist_ok=True)
        if tensors:
            write_whole(place / MIXING_FILE, lambda file: save_file(tensors, file, {"format": "pt"}))
        write_whole(place / RECORD_FILE, lambda file: file.write_text(json.dumps(record, indent=2) + "\n"))


def load_adapter(model: PreTrainedModel, source: str | os.PathLike, **kwargs) -> Any:
    """Interleave a plain base model as an adapter was trained, in place, and load its mixing and the adapter.

    Args:
        model: the plain base model, or one that is interleaved in the same way, whose mixing is replaced.
        source: the directory or Hub id of what `save_adapter` saved.
        kwargs: those of `PeftModel.from_pretrained`, such as `is_trainable=True` or `adapter_name`.

    Return PEFT's model, or for mixing alone the model itself. Raise a ValueError, and leave a plain model as it was,
    for a base with other layers or heads. As in PEFT, weights are not compared, so another base of the same shape
    raises no error."""
    source = str(source)
    hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
    record = json.loads(Path(find_record(source, hub)).read_text())
    with left_as_it_was(model):
        interleave_as(record, model, source)
        if record["virtual_heads"] != "paired":
            load_mixing(model, load_file(cached_file(source, MIXING_FILE, **hub)), source)
        if cached_file(source, "adapter_config.json", _raise_exceptions_for_missing_entries=False, **hub) is None:
            return model
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ImportError("load_adapter of an adapter needs PEFT: pip install peft.") from error
        return PeftModel.from_pretrained(model, source, **kwargs)


def find_record(source: str, hub: dict) -> str:
    """Return the path of the record of an adapter, which is a directory or on the Hub."""
    try:
        return cached_file(source, RECORD_FILE, **hub)
    except OSError as error:
        if Path(source).is_dir():
            raise ValueError(
                f"{source} has no {RECORD_FILE}: save the adapter by save_adapter, or load it with "
                "PeftModel.from_pretrained on the model that it was trained on."
            ) from error
        raise ValueError(
            f"There is no directory {source}, and the Hub gives no {RECORD_FILE} of a repository with this name: "
            "expected what save_adapter wrote."
        ) from error


def base_of_adapter(model: nn.Module) -> nn.Module:
    """Return the model in which PEFT put an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def make_record(model: PreTrainedModel) -> dict[str, Any]:
    """Return how a model is interleaved, and on which base."""
    config = decoder_config(model)
    base = {"base_model_type": model.config.model_type, "num_hidden_layers": config.num_hidden_layers}
    base["base_model_name_or_path"] = hub_id(model.name_or_path) or config.base_name_or_path
    return {name: getattr(config, name) for name in FIELDS} | base


def mixing_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of the mixing, their starts and scales, by their names in the model without a head.

    Where an adapter trains copies of the mixing, these are the originals below: PEFT saves the copies itself."""
    state = {}
    for name, module in interleaved_attention(model).items():
        attention = next(each for each in module.modules() if has_virtual_heads(each))  # a prompt adapter may wrap it
        for part, tensor in attention.state_dict().items():
            if is_mixing(part) and ".modules_to_save." not in part and ".lora_" not in part:
                original = part.replace(".original_module.", ".").replace(".base_layer.", ".")
                state[f"{name}.{original}"] = tensor
    if any(tensor.is_meta for tensor in state.values()):
        raise ValueError("The mixing is offloaded: load the model whole.")
    return state


def interleave_as(record: dict, model: PreTrainedModel, source: str) -> None:
    """Interleave a plain model as recorded. Raise a ValueError for a model that then differs from the record."""
    if not hasattr(decoder_config(model), "interleaved_layers"):
        backbone = backbone_of(model)
        try:
            layers = sorted({backbone.get_submodule(name).layer_idx for name in record["interleaved_layers"]})
        except AttributeError as error:
            raise ValueError(f"{source} was trained on another base than this model: {error}.") from None
        if record["virtual_heads"] == "paired":
            pair_heads(model, record["num_pseudo_heads"], layers, record["interleaved_window"])
        else:
            options = {"collapse": record["pseudo_collapse"], "mixing_scale": record["mixing_scale"]}
            interleave_heads(model, record["num_pseudo_heads"], layers, record["interleaved_window"], **options)
    own = make_record(model)
    names = [name for name in own if name not in ("mixing_scale", "base_model_name_or_path")]
    different = [name for name in names if record.get(name) != own[name]]
    if different:
        raise ValueError(
            f"{source} was trained on another model, or one that is interleaved otherwise ({', '.join(different)}): "
            "load it on its plain base."
        )
    decoder_config(model).mixing_scale = record["mixing_scale"]


@torch.no_grad()
def load_mixing(model: PreTrainedModel, tensors: dict[str, torch.Tensor], source: str) -> None:
    """Copy saved mixing into a model."""
    own = mixing_of(model)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != {name: tensor.shape for name, tensor in own.items()}:
        raise ValueError(f"{source} does not hold the mixing that its record names.")
    for name, tensor in own.items():
        loaded = tensors[name].to(tensor)
        if is_sharded(tensor):
            loaded = torch.distributed.tensor.distribute_tensor(loaded, tensor.device_mesh, tensor.placements)
        tensor.copy_(loaded)


def write_whole(file: Path, write: Any) -> None:
    """Write a file by another name first, so that no reader finds half of it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
