# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Add to [`IHAConfig`] the methods that a checkpoint does not need.

`from_preset` reads the named presets. `save_pretrained` ships the code of a model's own mechanisms only."""

import os
import re
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.llama.configuration_llama import LlamaConfig

from .attention_kinds import ATTENTION_CLASSES
from .configuration_iha import IHAConfig


def flop_matched_window(sequence_length: int, num_pseudo_heads: int) -> int:
    """Return W = N / (2 P^2), the window in tokens of a FLOP-matched schedule (IHA, Appendix C).

    Four sliding IHA layers and a global one then cost about as much as five global MHA layers."""
    window = sequence_length // (2 * num_pseudo_heads**2)
    if window < 1:
        raise ValueError(
            f"num_pseudo_heads={num_pseudo_heads} leaves no window at {sequence_length} tokens: W = N / (2 P^2) < 1. "
            "Use fewer pseudo-heads, a longer context, or set sliding_window yourself."
        )
    return window


def from_preset(cls: type[IHAConfig], name: str, **overrides) -> IHAConfig:
    """Build a named configuration of the directory `configuration_iha`, such as `"paper-2.4b-iha"` or `"tiny"`.

    `overrides` replace single fields. Where they do not set the window of IHA's schedule, `flop_matched_window`
    computes it from P and the context length."""
    directory = Path(__file__).resolve().parent.parent / "configuration_iha"
    presets = sorted(path.stem for path in directory.glob("*.json"))
    if name not in presets:
        raise ValueError(f"There is no preset {name!r}; available are {', '.join(map(repr, presets))}.")
    fields, _ = cls.get_config_dict(directory / f"{name}.json")
    fields |= overrides
    if "sliding_window" not in overrides and "sliding_window" in fields:
        if "sliding_attention" not in fields["layer_types"]:
            del fields["sliding_window"]
        elif "iha" in fields["attention_kinds"]:
            length, num_pseudo_heads = fields["max_position_embeddings"], fields["num_pseudo_heads"]
            fields["sliding_window"] = flop_matched_window(length, num_pseudo_heads)
    fields.pop("model_type")
    return cls(**fields)


def remove_unused_code(directory: str | os.PathLike, kinds: list[str]) -> None:
    """Remove the code of all attention kinds but `kinds` from a saved checkpoint.

    It consists of their lines in attention_kinds.py and of the files that nothing imports any more."""
    directory = Path(directory)
    registry = directory / "attention_kinds.py"
    if not registry.is_file() or registry.samefile(Path(__file__).with_name(registry.name)):
        return

    def imported() -> set[str]:
        roots = [directory / name for name in ("configuration_iha.py", "modeling_iha.py")]
        return {file for root in roots if root.is_file() for file in get_relative_import_files(root)}

    before, lines = imported(), registry.read_text(encoding="utf-8").splitlines(keepends=True)
    unused = {cls.__name__ for kind, cls in ATTENTION_CLASSES.items() if kind not in kinds}
    kept = [line for line in lines if not unused & set(re.findall(r"\w+", line))]
    registry.write_text("".join(kept), encoding="utf-8")
    for file in before - imported():
        Path(file).unlink(missing_ok=True)  # Another process may save to the same place.


def save_pretrained(config: IHAConfig, save_directory: str | os.PathLike, *args, **kwargs) -> None:
    """Save as Transformers does, with the code of the config's own attention mechanisms only.

    A stranger reads that code before trusting it. Saving a model calls this after copying the code."""
    LlamaConfig.save_pretrained(config, save_directory, *args, **kwargs)
    remove_unused_code(save_directory, config.attention_kinds)
