"""Print the parameters, FLOPs, cached values and training memory of a model.

The table gives each kind of layer, the whole model, and ratios to the same model with "mha" in every layer. The
figures are those of iha/model_cost.py, and the memory is that of iha/step_memory.py.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from transformers import PreTrainedConfig

from iha.arguments import check_cost, cost_arguments
from iha.checkpoints import load_config
from iha.conversion.convert_llama_to_iha import iha_config
from iha.conversion.shared import new_config, preset_config
from iha.errors import UserError, run_cli
from iha.kinds import interleaved_kind, is_interleaved, layer_number
from iha.layer_cost import Cost, virtual_tokens_per_token
from iha.model_cost import attention, ffn, head, model, with_mha
from iha.step_memory import of_training
from modeling_iha import IHAConfig
from modeling_iha.in_place import FIELDS
from modeling_iha.modeling_interleaved import base_class


def changed(config: IHAConfig, **fields) -> IHAConfig:
    """Return a config with other fields. Raise `UserError` for one that cannot be."""
    return new_config(IHAConfig, **{**config.to_dict(), **fields})


def plain(source: PreTrainedConfig) -> IHAConfig:
    """Return the config of "mha" layers that cost what a base does. Raise `UserError` for an unknown architecture."""
    return with_mha(iha_config(source, num_pseudo_heads=1))


def of_interleaved(source: PreTrainedConfig, fields: dict) -> IHAConfig:
    """Return a model of kind "iha" or "paired_heads" that costs what an interleaved decoder does.

    `fields` replace its `num_pseudo_heads` and `sliding_window`. Raise `UserError` for an architecture that the
    conversions do not know, or with windows of two lengths."""
    own = {*FIELDS, "base_model_type", "auto_map", "model_type"}
    entries = {name: value for name, value in source.to_dict().items() if name not in own}
    base_config: Any = base_class(type(source))
    base = plain(base_config.from_dict(entries))
    kinds = list(base.attention_kinds)
    types = list(base.layer_types)
    window = fields.get("sliding_window", source.interleaved_window)
    for name in source.interleaved_layers:
        layer = layer_number(name)
        kinds[layer] = interleaved_kind(source)
        if window is not None:
            types[layer] = "sliding_attention"
    others = {types[i] for i, layer_kind in enumerate(kinds) if layer_kind == "mha"}
    if window is not None and "sliding_attention" in others and window != base.sliding_window:
        raise UserError(
            f"Its windows are of {window} and of {base.sliding_window} tokens: the cost model takes one length."
        )
    return changed(
        base,
        attention_kinds=kinds,
        layer_types=types,
        sliding_window=window or base.sliding_window,
        num_pseudo_heads=fields.get("num_pseudo_heads", source.num_pseudo_heads),
        pseudo_collapse=source.pseudo_collapse,
    )


def settings_of(
    preset: str | None,
    config: str | os.PathLike | None,
    num_pseudo_heads: int | None = None,
    window: int | None = None,
) -> IHAConfig:
    """Return the config of a preset, a checkpoint or a base, with another P and another window where they are given.

    A plain base gets "iha" layers by `num_pseudo_heads`, and with a window the paper's schedule: four layers in five.
    Raise `UserError`.
    """
    given = {"num_pseudo_heads": num_pseudo_heads, "sliding_window": window}
    fields = {name: value for name, value in given.items() if value is not None}
    if preset is not None:
        settings = preset_config(preset, **fields)
    else:
        source = load_config(config)
        if isinstance(source, IHAConfig):
            settings = changed(source, **fields)
        elif is_interleaved(source):
            settings = of_interleaved(source, fields)
        elif num_pseudo_heads is None:
            settings = changed(plain(source), **fields)
        else:
            settings = iha_config(source, num_pseudo_heads, "hybrid" if window else "global", window)
    if (num_pseudo_heads or 1) > 1 and virtual_tokens_per_token(settings) == 1:
        raise UserError(f"--num-pseudo-heads {num_pseudo_heads}: no layer of this model has pseudo-heads.")
    if window is not None and "sliding_attention" not in settings.layer_types:
        raise UserError(f"--window {window}: no layer of this model has a window.")
    return settings


def row(title: str, cost: Cost, tokens: int, batch: int) -> str:
    """Return a line of the table: parameters in millions, FLOPs (two for each multiply-add), and cached values."""
    figures = (
        f"{cost.parameters / 1e6:.3f} M",
        *(f"{2 * batch * products / 1e9:.3f} G" for products in (cost.prefill, cost.training, cost.decode)),
        f"{cost.cache / tokens:.0f}",
    )
    return f"{title:<30}{''.join(f' {figure:>15}' for figure in figures)}"


def memory(settings: IHAConfig, batch: int, tokens: int) -> str:
    """Return a line on the memory of a training step, and how virtual tokens that are made again change it."""
    kept, recomputed = (changed(settings, recompute_virtual_tokens=choice) for choice in (False, True))
    whole, checkpointed = (of_training(kept, batch, tokens, checkpointing) for checkpointing in (False, True))
    peaks = f"{whole.peak / 1e9:.2f} GB, {checkpointed.peak / 1e9:.2f} with activation checkpointing"
    if virtual_tokens_per_token(settings) > 1:
        peak = of_training(recomputed, batch, tokens, False).peak
        peaks += f", {peak / 1e9:.2f} with recompute_virtual_tokens"
    parts = (f"{name} {getattr(whole, name) / 1e9:.2f}" for name in ("weights", "gradients", "optimizer"))
    return f"{peaks} ({', '.join(parts)})"


def cost(
    preset: str | None,
    config: str | os.PathLike | None,
    tokens: int,
    batch: int = 1,
    num_pseudo_heads: int | None = None,
    window: int | None = None,
) -> None:
    """Print the table of a preset, or of a model's `config`, for rows of `tokens` tokens. Raise `UserError`."""
    check_cost(preset, config, tokens, batch, num_pseudo_heads, window)
    settings = settings_of(preset, config, num_pseudo_heads, window)
    columns = ("parameters", "prefill FLOPs", "training FLOPs", "decode FLOPs", "cached / token")
    print(f"{'':<30}{''.join(f'{name:>16}' for name in columns)}")
    for kind, layer_type in dict.fromkeys(zip(settings.attention_kinds, settings.layer_types)):
        figures = attention(settings, kind, layer_type, tokens)
        print(row(f"{kind}, {layer_type}", figures, tokens, batch))
    print(row("FFN", ffn(settings, tokens), tokens, batch))
    print(row("embedding, last norm, head", head(settings, tokens), tokens, batch))
    whole = model(settings, tokens)
    print(row("whole model", whole, tokens, batch))
    others = {"mha": with_mha(settings), "global mha": with_mha(settings, "full_attention")}
    for title, other in others.items():
        ratios = (a / b for a, b in zip(astuple(whole), astuple(model(other, tokens))))
        print(f"{f'ratio to {title} everywhere':<30}{''.join(f'{ratio:>16.3f}' for ratio in ratios)}")
    print(f"cache in bfloat16: {2 * batch * whole.cache / 1e9:.3f} GB")
    print("Counting the memory of a training step, which may take minutes", file=sys.stderr, flush=True)
    print("training step, float32 weights, AdamW, bfloat16 autocast:")
    for title, each in {"this model": settings, "global mha": others["global mha"]}.items():
        print(f"  {title}: {memory(each, batch, tokens)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the arguments ask for, or raise a `UserError`."""
    cost(**cost_arguments(argv))


if __name__ == "__main__":
    run_cli(main)
