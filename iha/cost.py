"""Print the parameters, FLOPs, cached values and training memory of a model.

The table gives each kind of layer, the whole model, and ratios to the same model with "mha" in every layer. The
figures are those of iha/model_cost.py, and the memory is that of iha/step_memory.py.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from transformers import PreTrainedConfig

from iha.arguments import check_cost, cost_arguments
from iha.checkpoints import load_config
from iha.conversion.arguments import Layers
from iha.conversion.convert_llama_to_iha import iha_config
from iha.conversion.shared import new_config, preset_config
from iha.errors import UserError, run_cli
from iha.files import write_json
from iha.kinds import interleaved_kind, is_interleaved, layer_number, virtual_tokens_per_token
from iha.layer_cost import Cost
from iha.model_cost import attention, ffn, head, model, with_mha
from iha.sources import find_source
from iha.step_memory import StepMemory, of_sharded_training, of_training
from modeling_iha import IHAConfig
from modeling_iha.in_place import FIELDS
from modeling_iha.modeling_interleaved import base_class


def changed(config: IHAConfig, **fields) -> IHAConfig:
    """Return a config with other fields. Raise `UserError` for one that cannot be."""
    return new_config(IHAConfig, **{**config.to_dict(), **fields})


def plain(source: PreTrainedConfig) -> IHAConfig:
    """Return the config of "mha" layers that cost what a base does. Raise `UserError` for an unknown architecture."""
    return with_mha(iha_config(source, Layers(1)))


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
    changes: dict[str, Any] | None = None,
) -> IHAConfig:
    """Return the config of a preset, a checkpoint or a base, with another P and another window where they are given.

    `changes` are other fields of a preset.
    A plain base gets "iha" layers by `num_pseudo_heads`, and with a window the paper's schedule: four layers in five.
    Raise `UserError`.
    """
    given = {"num_pseudo_heads": num_pseudo_heads, "sliding_window": window}
    fields = {name: value for name, value in given.items() if value is not None}
    if preset is not None:
        settings = preset_config(preset, **(changes or {}), **fields)
    else:
        source = load_config(find_source(config))
        if isinstance(source, IHAConfig):
            settings = changed(source, **fields)
        elif is_interleaved(source):
            settings = of_interleaved(source, fields)
        elif num_pseudo_heads is None:
            settings = changed(plain(source), **fields)
        else:
            settings = iha_config(source, Layers(num_pseudo_heads, "hybrid" if window else "global", window))
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


def memory(settings: IHAConfig, batch: int, tokens: int, gpus: int = 1) -> dict[str, StepMemory]:
    """Return the memory of a training step in each way to save some, and "" without any.

    With several GPUs it is that of each of them."""

    def count(recompute: bool, checkpointing: bool, tiled_loss: bool) -> StepMemory:
        config = changed(settings, recompute_virtual_tokens=recompute)
        if gpus > 1:
            return of_sharded_training(config, batch, tokens, checkpointing, tiled_loss, gpus)
        return of_training(config, batch, tokens, checkpointing, tiled_loss)

    ways = {
        "": count(False, False, False),
        "activation checkpointing": count(False, True, False),
        "activation checkpointing and TRL's loss": count(False, True, True),
    }
    if virtual_tokens_per_token(settings) > 1:
        ways["recompute_virtual_tokens"] = count(True, False, False)
    return ways


def memory_line(ways: dict[str, StepMemory]) -> str:
    """Return a line on the memory of a training step."""
    whole = ways[""]
    peaks = [f"{way.peak / 1e9:.2f}{f' with {name}' if name else ' GB'}" for name, way in ways.items()]
    parts = (f"{name} {getattr(whole, name) / 1e9:.2f}" for name in ("weights", "gradients", "optimizer"))
    return f"{', '.join(peaks)} ({', '.join(parts)})"


def seconds(cost: Cost, batch: int, tflops: float) -> dict[str, float]:
    """Return the seconds of a training step at a rate of each GPU: checkpointing makes one more forward pass."""
    return {
        "": 2 * batch * cost.training / (tflops * 1e12),
        "activation checkpointing": 2 * batch * (cost.training + cost.prefill) / (tflops * 1e12),
    }


def cost(
    preset: str | None,
    config: str | os.PathLike | None,
    tokens: int,
    batch: int = 1,
    num_pseudo_heads: int | None = None,
    window: int | None = None,
    gpus: int = 1,
    tflops: float | None = None,
    steps: int | None = None,
    fields: dict[str, Any] | None = None,
    count_memory: bool = True,
    json: str | os.PathLike | None = None,
) -> None:
    """Print the table of a preset, or of a model's `config`, for rows of `tokens` tokens.

    `fields` replace those of the preset. Raise `UserError`.
    """
    check_cost(preset, config, tokens, batch, num_pseudo_heads, window, gpus, tflops, steps, json)
    settings = settings_of(preset, config, num_pseudo_heads, window, fields)
    kinds = dict.fromkeys(zip(settings.attention_kinds, settings.layer_types))
    parts = {f"{kind}, {layer_type}": attention(settings, kind, layer_type, tokens) for kind, layer_type in kinds}
    parts["FFN"] = ffn(settings, tokens)
    parts["embedding, last norm, head"] = head(settings, tokens)
    parts["whole model"] = whole = model(settings, tokens)
    columns = ("parameters", "prefill FLOPs", "training FLOPs", "decode FLOPs", "cached / token")
    print(f"{'':<30}{''.join(f'{name:>16}' for name in columns)}")
    for title, part in parts.items():
        print(row(title, part, tokens, batch))
    global_mha = with_mha(settings, "full_attention")
    others = {"mha": model(with_mha(settings), tokens), "global mha": model(global_mha, tokens)}
    for title, other in others.items():
        ratios = (a / b for a, b in zip(astuple(whole), astuple(other)))
        print(f"{f'ratio to {title} everywhere':<30}{''.join(f'{ratio:>16.3f}' for ratio in ratios)}")
    print(f"cache in bfloat16: {2 * batch * whole.cache / 1e9:.3f} GB")
    compared = {"this model": (settings, whole), "global mha": (global_mha, others["global mha"])}
    peaks = {}
    if count_memory:
        where = f" on each of {gpus} GPUs, sharded by FSDP2 (not compared with a GPU)" if gpus > 1 else ""
        print(f"training step{where}, float32 weights, AdamW, bfloat16 autocast:")
        peaks = {title: memory(each, batch, tokens, gpus) for title, (each, _) in compared.items()}
        for title, ways in peaks.items():
            print(f"  {title}: {memory_line(ways)}")
    times = {}
    if tflops is not None:
        rows = batch * gpus
        print(f"time of a step of {rows} rows, if each GPU computes {tflops:g} TFLOP/s, as --tflops assumes:")
        for title, (_, each) in compared.items():
            times[title] = seconds(each, batch, tflops)
            told = []
            for way, time in times[title].items():
                speed = f"{time:.2f} s, {rows * tokens / time:,.0f} tokens/s"
                told.append(f"{speed}{hours(time, steps)}{f' with {way}' if way else ''}")
            print(f"  {title}: {'; '.join(told)}")
    if json is not None:
        asked = {"tokens": tokens, "batch": batch, "gpus": gpus, "tflops": tflops, "steps": steps}
        write_json(json, asked | as_json(parts | others, peaks, times, steps))


def hours(time: float, steps: int | None) -> str:
    """Return the words for the hours of a training whose step takes `time` seconds."""
    return "" if steps is None else f", {steps:,} steps in {steps * time / 3600:.3g} h"


def as_json(
    parts: dict[str, Cost], peaks: dict[str, dict[str, StepMemory]], times: dict[str, dict], steps: int | None
) -> dict:
    """Return the figures of a table: parameters, multiply-adds and cached values, bytes, seconds and hours."""
    of_a_step = {title: {way or "nothing saved": time for way, time in ways.items()} for title, ways in times.items()}
    return {
        "costs_of_a_sequence": {title: asdict(part) for title, part in parts.items()},
        "bytes_of_a_step": {
            title: {way or "nothing saved": each._asdict() for way, each in ways.items()}
            for title, ways in peaks.items()
        },
        "seconds_of_a_step": of_a_step,
        "hours": {
            title: {way: time * steps / 3600 for way, time in ways.items()}
            for title, ways in of_a_step.items()
            if steps is not None
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the arguments ask for, or raise a `UserError`."""
    cost(**cost_arguments(argv))


if __name__ == "__main__":
    run_cli(main)
