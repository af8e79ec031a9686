"""Print the parameters, FLOPs, cached values and training memory of a model.

The table gives each kind of layer, the whole model, and ratios to the same model with "mha" in every layer, or to the
plain model of a decoder of Transformers with interleaved or paired heads. The figures are those of iha/model_cost.py,
and the memory is that of iha/step_memory.py.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import torch
from transformers import PreTrainedConfig

from iha import counted_attention
from iha.arguments import check_cost, cost_arguments
from iha.checkpoints import load_config
from iha.conversion.shared import new_config, preset_config
from iha.errors import UserError, run_cli
from iha.files import write_json
from iha.kinds import described, is_interleaved, layer_number, virtual_tokens_per_token
from iha.model_cost import Cost, ModelCost, exchanged_bytes, model_cost
from iha.plain_models import compared_with
from iha.sources import find_source
from iha.step_memory import StepMemory, Way, of_sharded_training, of_training
from iha.without_data import explained, row_of_tokens, text_config, without_data
from modeling_iha import IHAConfig
from modeling_iha.modeling_interleaved import backbone_of, interleaved_class, register_models
from modeling_iha.probes import recording


def interleaved(source: PreTrainedConfig, num_pseudo_heads: int, window: int | None) -> PreTrainedConfig:
    """Return the configuration of a decoder of Transformers with interleaved heads.

    They are in every layer, or with a window in four of every five, as `layers="paper"` of `interleave_heads`."""
    with explained(source):
        model = without_data(source, counted_attention.NAME)
        with recording(model) as calls, torch.no_grad():
            model(**row_of_tokens(model, 1, 2), use_cache=False)
    names = {module: name for name, module in backbone_of(model).named_modules()}
    heads = {names[module]: list(call.head_counts) for module, call in calls.items() if call.is_causal}
    if not heads:
        raise UserError(f"{source.model_type} has no attention whose heads could be interleaved.")
    names_in_order = sorted(heads, key=layer_number)
    if window is not None:
        names_in_order = [name for place, name in enumerate(names_in_order) if place % 5 != 4]
    base: Any = type(model.config)
    register_models(base)
    config: PreTrainedConfig = copy.deepcopy(model.config)
    config.__class__ = interleaved_class(base)
    text = config.get_text_config(decoder=True)
    text.interleaved_layers = {name: heads[name] for name in names_in_order}
    text.interleaved_window = window
    text.num_pseudo_heads = num_pseudo_heads
    text.pseudo_collapse = "per_head"
    text.virtual_heads = None
    text.mixing_scale = 1.0
    return config


def settings_of(
    preset: str | None,
    config: str | os.PathLike | None,
    num_pseudo_heads: int | None = None,
    window: int | None = None,
    changes: dict[str, Any] | None = None,
) -> PreTrainedConfig:
    """Return the config of a preset, a checkpoint or a base, with another P and another window where they are given.

    `changes` are other fields of a preset.
    A plain decoder is interleaved by `num_pseudo_heads`, and with a window in four layers of five. Raise `UserError`.
    """
    given = {"num_pseudo_heads": num_pseudo_heads, "sliding_window": window}
    fields = {name: value for name, value in given.items() if value is not None}
    if preset is not None:
        settings: PreTrainedConfig = preset_config(preset, **(changes or {}), **fields)
    else:
        settings = text_config(load_config(find_source(config)))
        if isinstance(settings, IHAConfig):
            settings = new_config(IHAConfig, **{**settings.to_dict(), **fields})
        elif is_interleaved(settings):
            text = settings.get_text_config(decoder=True)
            text.num_pseudo_heads = num_pseudo_heads or text.num_pseudo_heads
            text.interleaved_window = window or text.interleaved_window
        elif num_pseudo_heads is not None:
            return interleaved(settings, num_pseudo_heads, window)
        elif window is not None:
            settings.get_text_config(decoder=True).sliding_window = window
    if (num_pseudo_heads or 1) > 1 and virtual_tokens_per_token(settings) == 1:
        raise UserError(f"--num-pseudo-heads {num_pseudo_heads}: no layer of this model has pseudo-heads.")
    if window is not None and not has_windows(settings):
        raise UserError(f"--window {window}: no layer of this model has a window.")
    return settings


def has_windows(config: PreTrainedConfig) -> bool:
    return any(layer_type != "full_attention" for layer_type in described(config).layer_types)


def row(title: str, cost: Cost, tokens: int, batch: int) -> str:
    """Return a line of the table: parameters in millions, FLOPs (two for each multiply-add), and cached values."""
    figures = (
        f"{cost.parameters / 1e6:.3f} M",
        *(f"{2 * batch * products / 1e9:.3f} G" for products in (cost.prefill, cost.training, cost.decode)),
        f"{cost.cache / tokens:.0f}",
    )
    return f"{title:<30}{''.join(f' {figure:>15}' for figure in figures)}"


def parts_of(config: PreTrainedConfig, cost: ModelCost) -> dict[str, Cost]:
    """Return the costs of a model's parts by their titles: the first layer of each kind, and FFNs that differ."""
    shown = described(config)
    attention: dict[str, Cost] = {}
    others: dict[str, Cost] = {}
    for i, layer in enumerate(cost.layers):
        attention.setdefault(f"{shown.attention_kinds[i]}, {shown.layer_types[i]}", layer.attention)
        if layer.rest not in others.values():
            others[f"FFN and norms of layer {i}"] = layer.rest
    if len(others) == 1:
        others = {"FFN and norms": cost.layers[0].rest}
    return attention | others | {"embedding, last norm, head": cost.rest, "whole model": cost.whole}


def memory(
    settings: PreTrainedConfig, batch: int, tokens: int, gpus: int = 1, asked: Way | None = None
) -> dict[str, StepMemory]:
    """Return the memory of a training step in each way to save some, and "" without any.

    With several GPUs it is that of each of them. `asked` has what the user chose: adapters, shared rows, offload."""
    plain = (asked or Way())._replace(offload=False)
    saving = plain._replace(checkpointing=True, tiled_loss=True)

    def count(way: Way, recompute: bool = False) -> StepMemory:
        config = copy.deepcopy(settings)
        config.get_text_config(decoder=True).recompute_virtual_tokens = recompute
        if gpus > 1:
            return of_sharded_training(config, batch, tokens, way, gpus)
        return of_training(config, batch, tokens, way)

    ways = {
        "": count(plain),
        "activation checkpointing": count(plain._replace(checkpointing=True)),
        "activation checkpointing and TRL's loss": count(saving),
    }
    if asked is not None and asked.offload:
        ways["activation checkpointing in the host's memory and TRL's loss"] = count(saving._replace(offload=True))
    if virtual_tokens_per_token(settings) > 1:
        ways["recompute_virtual_tokens"] = count(plain, recompute=True)
    return ways


def memory_line(ways: dict[str, StepMemory]) -> str:
    """Return a line on the memory of a training step."""
    whole = ways[""]
    peaks = [f"{way.peak / 1e9:.2f}{f' with {name}' if name else ' GB'}" for name, way in ways.items()]
    parts = (f"{name} {getattr(whole, name) / 1e9:.2f}" for name in ("weights", "gradients", "optimizer"))
    return f"{', '.join(peaks)} ({', '.join(parts)})"


def seconds(cost: Cost, rows: float, tflops: float) -> dict[str, float]:
    """Return the seconds of a training step at a rate of each GPU: checkpointing makes one more forward pass.

    `rows` are those of each GPU, a part of one where GPUs share it."""
    return {
        "": 2 * rows * cost.training / (tflops * 1e12),
        "activation checkpointing": 2 * rows * (cost.training + cost.prefill) / (tflops * 1e12),
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
    share_rows: int = 1,
    offload: bool = False,
    lora_r: int | None = None,
    bits: int = 32,
) -> None:
    """Print the table of a preset, or of a model's `config`, for rows of `tokens` tokens.

    `fields` replace those of the preset. Raise `UserError`.
    """
    others = {"share_rows": share_rows, "lora_r": lora_r, "bits": bits}
    check_cost(preset, config, tokens, batch, num_pseudo_heads, window, gpus, tflops, steps, json, **others)
    settings = settings_of(preset, config, num_pseudo_heads, window, fields)
    counted = model_cost(settings, tokens)
    whole = counted.whole
    parts = parts_of(settings, counted)
    columns = ("parameters", "prefill FLOPs", "training FLOPs", "decode FLOPs", "cached / token")
    print(f"{'':<30}{''.join(f'{name:>16}' for name in columns)}")
    for title, part in parts.items():
        print(row(title, part, tokens, batch))
    plain = compared_with(settings)
    costs = {title: model_cost(other, tokens).whole for title, other in plain.items()}
    for title, other in costs.items():
        ratios = (a / b for a, b in zip(astuple(whole), astuple(other)))
        words = f"{title} everywhere" if "mha" in title else f"the {title}"
        print(f"{f'ratio to {words}':<30}{''.join(f'{ratio:>16.3f}' for ratio in ratios)}")
    print(f"cache in bfloat16: {2 * batch * whole.cache / 1e9:.3f} GB")
    compared = {"this model": (settings, whole)}
    if plain:
        last = list(plain)[-1]
        compared[last] = (plain[last], costs[last])
    peaks = {}
    if count_memory:
        where = f" on each of {gpus} GPUs, sharded by FSDP2 (not compared with a GPU)" if gpus > 1 else ""
        where += f", {share_rows} of which share each row" if share_rows > 1 else ""
        weights = "float32 weights" if lora_r is None else f"LoRA of rank {lora_r} on weights in {bits} bits"
        print(f"training step{where}, {weights}, AdamW, bfloat16 autocast:")
        asked = Way(offload=offload, lora_r=lora_r, bits=bits, share_rows=share_rows)
        peaks = {title: memory(each, batch, tokens, gpus, asked) for title, (each, _) in compared.items()}
        for title, ways in peaks.items():
            print(f"  {title}: {memory_line(ways)}")
    if share_rows > 1:
        for title, (each, _) in compared.items():
            sent = exchanged_bytes(each, tokens, share_rows) / 1e9
            step = f"{3 * sent:.2f} GB in a step with checkpointing"
            print(f"{title}: a process sends {sent:.2f} GB in a forward pass, {step}")
    times = {}
    if tflops is not None:
        rows = batch * gpus // share_rows
        print(f"time of a step of {rows} rows, if each GPU computes {tflops:g} TFLOP/s, as --tflops assumes:")
        for title, (_, each) in compared.items():
            times[title] = seconds(each, batch / share_rows, tflops)
            told = []
            for way, time in times[title].items():
                speed = f"{time:.2f} s, {rows * tokens / time:,.0f} tokens/s"
                told.append(f"{speed}{hours(time, steps)}{f' with {way}' if way else ''}")
            print(f"  {title}: {'; '.join(told)}")
    if json is not None:
        given = {"tokens": tokens, "batch": batch, "gpus": gpus, "tflops": tflops, "steps": steps}
        write_json(json, given | as_json(parts | costs, peaks, times, steps))


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
