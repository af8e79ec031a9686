# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Add to [`IHAConfig`] the methods that a checkpoint does not need.

`from_preset` reads the named presets. `save_pretrained` ships the code of a model's own mechanisms only."""

import os
from pathlib import Path

from transformers.models.llama.configuration_llama import LlamaConfig

from .configuration_iha import IHAConfig


# The files of each attention kind. A checkpoint ships those of its own kinds, and all files that no kind names.
SCORES = ("option_fields.py", "score_matrix.py")
PAIRS = ("options_pairs.py", "tuple_attention.py", *SCORES)
KIND_FILES = {
    "mha": (),
    "iha": ("attention_iha.py", "mixed_heads.py"),
    "paired_heads": ("attention_paired_heads.py", "options_paired_heads.py", "pairing.py"),
    "talking_heads": ("attention_talking_heads.py", "score_matrix.py"),
    "diff": ("attention_diff.py", "options_diff.py", "option_fields.py"),
    "diff_v2": ("attention_diff_v2.py",),
    "gated": ("attention_gated.py", "options_gated.py", "option_fields.py"),
    "knocking_heads": ("attention_knocking_heads.py", "options_knocking_heads.py", "option_fields.py"),
    "multi_token": ("attention_multi_token.py", "options_multi_token.py", *SCORES),
    "hyper_feature": ("attention_hyper_feature.py", "options_hyper_feature.py", *SCORES),
    "hyper": ("attention_hyper.py", "options_hyper.py", *PAIRS),
    "simplicial": ("attention_simplicial.py", *PAIRS),
    "dcmha": ("attention_dcmha.py", "options_dcmha.py", *SCORES),
}
KIND_TABLES = ("attention_kinds.py", "kind_options.py")
PACKAGE_ONLY = {
    *("__init__.py", "package.py", "mixing.py", "exact_start.py"),
    *("adapters.py", "adapter_records.py"),
    *("interleave.py", "paired_decoders.py", "configuration_interleaved.py", "modeling_interleaved.py"),
}
# The files that an interleaved decoder's checkpoint ships (`interleave_heads`, `pair_heads`).
INTERLEAVED_FILES = (
    "adapter_records.py",
    "cache_names.py",
    "chunks.py",
    "configuration_interleaved.py",
    "exact_start.py",
    "first_keys.py",
    "interleaving.py",
    "head_mixing.py",
    "mixed_heads.py",
    "new_token.py",
    "windows.py",
    "overlay.py",
    "cache_edge.py",
    "mixing_scale.py",
    "virtual_core.py",
    "virtual_masks.py",
    "paged_requests.py",
    "tested_versions.py",
    "pairing.py",
    "modeling_interleaved.py",
)
PACKAGE = Path(__file__).resolve().parent


def flop_matched_window(sequence_length: int, num_pseudo_heads: int) -> int:
    """Return W = N / (2 P^2), the window in tokens of a FLOP-matched schedule (IHA, Appendix C).

    Four sliding IHA layers and a global one then attend to about as many pairs as five causal MHA layers."""
    window = sequence_length // (2 * num_pseudo_heads**2)
    if window < 2:
        raise ValueError(
            f"num_pseudo_heads={num_pseudo_heads} leaves no window at {sequence_length} tokens: W = N / (2 P^2) < 2. "
            "Use fewer pseudo-heads, a longer context, or set sliding_window yourself."
        )
    return window


def from_preset(cls: type[IHAConfig], name: str, **overrides) -> IHAConfig:
    """Build a named configuration of the directory `configuration_iha`, such as `"paper-2.4b-iha"` or `"tiny"`.

    `overrides` replace single fields, and what depends on them follows unless it is given too. P is the number of
    heads where the preset states no other. The window of IHA's schedule is `flop_matched_window` of the context length
    and P; any other keeps its share of the context length. Special tokens outside of the vocabulary are left out.

    Raise a ValueError for a window that is not shorter than the context, whose layers would be global in silence."""
    directory = PACKAGE.parent / "configuration_iha"
    presets = sorted(path.stem for path in directory.glob("*.json"))
    if name not in presets:
        raise ValueError(f"There is no preset {name!r}; available are {', '.join(map(repr, presets))}.")
    preset, _ = cls.get_config_dict(directory / f"{name}.json")
    rope_theta = {"rope_theta": overrides.pop("rope_theta")} if "rope_theta" in overrides else {}
    fields = preset | overrides
    length, slides = fields["max_position_embeddings"], "sliding_attention" in fields.get("layer_types", ())
    if "sliding_window" in preset.keys() - overrides.keys():
        fields["sliding_window"] = _following_window(preset, fields) if slides else None
    if slides and (fields.get("sliding_window") or 0) >= length:
        raise ValueError(
            f"sliding_window={fields['sliding_window']} is not shorter than max_position_embeddings={length}: give a "
            "shorter window, or a longer context."
        )
    for token in {"bos_token_id", "eos_token_id"} & preset.keys() - overrides.keys():
        if (preset[token] or 0) >= fields["vocab_size"]:
            fields[token] = None
    return cls.from_dict(fields, **rope_theta)


def _following_window(preset: dict, fields: dict) -> int:
    """Return the window of a preset in a configuration with other `fields`."""
    length = fields["max_position_embeddings"]
    if "iha" in preset["attention_kinds"]:
        return flop_matched_window(length, fields.get("num_pseudo_heads") or fields["num_attention_heads"])
    return preset["sliding_window"] * length // preset["max_position_embeddings"]


def shipped_code(kinds: list[str]) -> dict[str, bytes]:
    """Return the files that a checkpoint with these attention kinds ships, by name.

    Two files list the kinds, one to a line. The lines of other kinds are left out."""
    own = {file for kind, files in KIND_FILES.items() if kind in kinds for file in files}
    others = {file for files in KIND_FILES.values() for file in files} - own
    code = {path.name: path.read_bytes() for path in PACKAGE.glob("*.py") if path.name not in others | PACKAGE_ONLY}
    unused = [f"from .{file.removesuffix('.py')} import " for file in others]
    unused += [f'    "{kind}": ' for kind in KIND_FILES if kind not in kinds]
    for name in KIND_TABLES:
        lines = code[name].decode().splitlines(keepends=True)
        code[name] = "".join(line for line in lines if not line.startswith(tuple(unused))).encode()
    return code


def save_pretrained(config: IHAConfig, save_directory: str | os.PathLike, *args, **kwargs) -> None:
    """Save as Transformers does, with the code of the config's own attention kinds only.

    A stranger reads that code before trusting it. Saving a model calls this after copying the code."""
    LlamaConfig.save_pretrained(config, save_directory, *args, **kwargs)
    directory, shipped = Path(save_directory), shipped_code(list(config.attention_kinds))
    if directory.samefile(PACKAGE):
        return
    for name in {path.name for path in PACKAGE.glob("*.py")} - PACKAGE_ONLY:
        if name in shipped:
            (directory / name).write_bytes(shipped[name])
        else:
            (directory / name).unlink(missing_ok=True)  # Another process may save to the same place.
