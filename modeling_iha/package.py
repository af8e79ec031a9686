# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Do for configurations what a checkpoint does not need, because it ships its own code.

`from_preset` reads the named presets. `save_pretrained` ships the code of a model's own mechanisms only. Interleaved
checkpoints load as models of the installed package."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig

from .configuration_iha import OPTIONS_CLASSES, IHAConfig
from .flop_matched_window import flop_matched_window
from .modeling_iha import ATTENTION_CLASSES
from .modeling_interleaved import MODEL_TYPE, interleaved_config_class, register_models, without_types


KIND_LISTS = ("modeling_iha.py", "configuration_iha.py")  # these name the files of every kind
PACKAGE = Path(__file__).resolve().parent
OUR_FIRST_LINE = b"# Copyright 2026 the modeling_iha authors."
# Other libraries' names of our fields
ALIASES = {
    "P": "num_pseudo_heads",
    "context_length": "max_position_embeddings",
    "d_model": "hidden_size",
    "dropout": "attention_dropout",
    "hidden_dim": "intermediate_size",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "rope_scaling": "rope_parameters",
}


def from_preset(cls: type[IHAConfig], name: str, **overrides) -> IHAConfig:
    """Build a named configuration of the directory `configuration_iha`, such as `"paper-2.4b-iha"` or `"tiny"`.

    `overrides` replace single fields, and `rope_theta` the base in `rope_parameters`. P is the number of heads if
    neither they nor the preset state it. A window that is not overridden is computed anew: in presets with "iha"
    layers it is `flop_matched_window` of the context length and P, and in others it keeps its share of the context.
    With another number of layers the lists of kinds and layer types are cut, or begin again. Special tokens outside of
    the vocabulary are left out.

    Raise a ValueError for an unknown field, and for a window that is not shorter than the context: its layers would
    silently be global."""
    directory = PACKAGE.parent / "configuration_iha"
    presets = sorted(path.stem for path in directory.glob("*.json"))
    if name not in presets:
        similar = ", ".join(map(repr, get_close_matches(name, presets, n=3, cutoff=0.4)))
        meant = f"; similar are {similar}" if similar else ""
        raise ValueError(f"There is no preset {name!r}{meant}. configuration_iha.PRESETS lists all.")
    check_fields(overrides, cls)
    preset, _ = cls.get_config_dict(directory / f"{name}.json")
    rope = _rope_parameters(preset, overrides)
    overrides.pop("rope_theta", None)
    fields = preset | overrides | {"rope_parameters": rope}
    kept = preset.keys() - overrides.keys()
    layers = fields["num_hidden_layers"]
    is_number = isinstance(layers, int) and layers > 0  # the configuration raises an error for anything else
    for field in kept & {"attention_kinds", "layer_types", "no_rope_layers"}:
        if is_number and isinstance(preset[field], list):
            fields[field] = list(islice(cycle(preset[field]), layers))
    if "sliding_window" in kept:
        slides = "sliding_attention" in (fields.get("layer_types") or ())
        fields["sliding_window"] = _following_window(preset, fields) if slides else None
    for token in kept & {"bos_token_id", "eos_token_id"}:
        if (preset[token] or 0) >= fields["vocab_size"]:
            fields[token] = None
    config = cls.from_dict(fields)  # which checks the fields
    if config.sliding_window is not None and config.sliding_window >= config.max_position_embeddings:
        raise ValueError(
            f"sliding_window={config.sliding_window} is not shorter than max_position_embeddings="
            f"{config.max_position_embeddings}: give a shorter window, or a longer context."
        )
    return config


def check_fields(names: Iterable[str], cls: type[IHAConfig] = IHAConfig) -> None:
    """Raise a ValueError for a name that is no field of a configuration, with the nearest field."""
    known = [*cls.__dataclass_fields__, "rope_theta", "attn_implementation"]
    for name in names:
        if name not in known:
            nearest = get_close_matches(ALIASES.get(name, name), known, n=1, cutoff=0.4)
            meant = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise ValueError(f"There is no field {name!r}{meant}")


def _rope_parameters(preset: dict, overrides: dict) -> dict:
    """Return the overriding RoPE parameters, or those of the preset. Without a base they get that of the preset."""
    own = preset.get("rope_parameters") or {"rope_type": "default"}
    given = overrides.get("rope_parameters") or own
    if "rope_theta" in overrides:
        return given | {"rope_theta": overrides["rope_theta"]}
    if "rope_theta" in own:
        return {"rope_theta": own["rope_theta"]} | given
    return given


def _following_window(preset: dict, fields: dict) -> int:
    """Return the window of a preset in a configuration with other `fields`."""
    length = fields["max_position_embeddings"]
    if "iha" in preset["attention_kinds"]:
        return flop_matched_window(length, fields.get("num_pseudo_heads") or fields["num_attention_heads"])
    return preset["sliding_window"] * length // preset["max_position_embeddings"]


def shipped_code(kinds: list[str]) -> dict[str, bytes]:
    """Return the files that a checkpoint with these attention kinds ships, by name.

    They are the model, the classes of its kinds, and what these import. Two files list all kinds, one to a line. They
    ship without the lines of other kinds."""
    own = [kind for kind in ATTENTION_CLASSES if kind in kinds]
    classes = [ATTENTION_CLASSES[kind] for kind in own] + [OPTIONS_CLASSES[kind] for kind in own]
    modules = ["modeling_iha", *(own_class.__module__.split(".")[-1] for own_class in classes if own_class)]
    code = imported_code(*(f"{module}.py" for module in modules))
    for name in KIND_LISTS:
        lines = code[name].decode().splitlines(keepends=True)
        code[name] = "".join(line for line in lines if _is_shipped(line, own, code)).encode()
    return code


def imported_code(*names: str) -> dict[str, bytes]:
    """Return files of this package and those that they import, directly or through others, by name."""
    code: dict[str, bytes] = {}
    found = list(names)
    while found:
        name = found.pop()
        if name in code:
            continue
        code[name] = (PACKAGE / name).read_bytes()
        modules = re.findall(r"^ *from \.(\w+) import ", code[name].decode(), re.MULTILINE)
        if name in KIND_LISTS:
            modules = [module for module in modules if not module.startswith(("attention_", "options_"))]
        found += [f"{module}.py" for module in modules]
    return code


def _is_shipped(line: str, kinds: list[str], code: dict[str, bytes]) -> bool:
    """Return whether a line of a list of kinds ships with the files `code` of some kinds."""
    imported = re.match(r"from \.(\w+) import ", line)
    if imported:
        return f"{imported[1]}.py" in code
    entry = re.match(r'    "(\w+)": ', line)
    return entry is None or entry[1] not in ATTENTION_CLASSES or entry[1] in kinds


def save_pretrained(config: IHAConfig, save_directory: str | os.PathLike, *args, **kwargs) -> None:
    """Save as Transformers does, with the code of the config's own attention kinds only.

    Users read that code before they trust it. Saving a model calls this after copying the code. Raise a ValueError for
    `push_to_hub=True`, which would upload the configuration before its code is written."""
    if kwargs.get("push_to_hub"):
        raise ValueError("push_to_hub=True would upload no code: call config.push_to_hub(...), or push the model.")
    LlamaConfig.save_pretrained(config, save_directory, *args, **kwargs)
    directory = Path(save_directory)
    if directory.samefile(PACKAGE):
        return
    shipped = shipped_code(list(config.attention_kinds))
    for name in shipped_code(list(ATTENTION_CLASSES)):
        if name in shipped:
            (directory / name).write_bytes(shipped[name])
        elif _is_ours(directory / name):
            (directory / name).unlink(missing_ok=True)  # Another process may save to the same place.


def _is_ours(file: Path) -> bool:
    """Return whether a file exists and is one of this package, by its first line. Somebody may have a pairing.py."""
    with suppress(FileNotFoundError), file.open("rb") as opened:
        return opened.readline().startswith(OUR_FIRST_LINE)
    return False


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
        own: Any = interleaved_config_class(CONFIG_MAPPING[base])
        return own.from_dict(without_types(config_dict), **kwargs)
