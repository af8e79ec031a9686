"""Print the parameters, FLOPs, cached values and training memory of a model.

The table gives each kind of layer, the whole model, and ratios to the same model with "mha" in every layer, or to the
plain model of a decoder of Transformers with interleaved or paired heads. The figures are those of iha/model_cost.py,
and the memory is that of iha/step_memory.py.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from iha.cost_arguments import CostArguments, cost_arguments
from iha.counted_config import counted_config
from iha.errors import run_cli
from iha.files import write_json
from iha.kinds import described, virtual_tokens_per_token
from iha.model_cost import Cost, ModelCost, Passes, cost_of_model, model_cost, passes_of_model
from iha.plain_models import compared_with
from iha.step_memory import StepMemory, Way, of_sharded_training, of_training
from iha.without_data import check_can_share_rows, without_data


# The memory and the seconds of a step, by the names of the ways to save memory. The first, "", saves none.
Peaks = dict[str, StepMemory]
Times = dict[str, float]
COLUMNS = ("parameters", "prefill FLOPs", "training FLOPs", "decode FLOPs", "cached / token")


class Compared(NamedTuple):
    """Hold a model whose costs are compared with another's."""

    title: str
    config: PreTrainedConfig
    cost: Cost


def cost(asked: CostArguments) -> None:
    """Print the costs of a model, and write them to a file if one is asked for. Raise `UserError`."""
    config = counted_config(asked)
    if asked.share_rows > 1:
        check_can_share_rows(without_data(config))
    parts = parts_of(config, model_cost(config, asked.tokens))
    this = Compared("this model", config, parts["whole model"])
    plain = [Compared(title, each, cost_of_model(each, asked.tokens)) for title, each in compared_with(config).items()]
    print_table(parts, plain, asked)

    # The models whose training steps are compared: `compared_with` has the one to compare with last, or none at all.
    steps = [this, *plain[-1:]]
    peaks: dict[str, Peaks] = {}
    if asked.count_memory:
        print(f"{heading_of_memory(asked)}:")
        for each in steps:
            peaks[each.title] = memory_of_a_step(each.config, asked)
            print(f"  {each.title}: {line_of_memory(peaks[each.title])}")
    times: dict[str, Times] = {}
    if asked.tflops is not None:
        print(f"{heading_of_time(asked)}:")
        for each in steps:
            times[each.title] = seconds_of_a_step(each, asked)
            print(f"  {each.title}: {line_of_time(times[each.title], asked)}")

    if asked.json is not None:
        costs = parts | {each.title: each.cost for each in plain}
        write_json(asked.json, figures(costs, peaks, times, asked))


# The table


def parts_of(config: PreTrainedConfig, cost: ModelCost) -> dict[str, Cost]:
    """Return the costs of a model's parts by their titles: the first layer of each kind, and FFNs that differ."""
    shown = described(config)
    attention: dict[str, Cost] = {}
    for kind, layer_type, layer in zip(shown.attention_kinds, shown.layer_types, cost.layers):
        attention.setdefault(f"{kind}, {layer_type}", layer.attention)
    rests = [layer.rest for layer in cost.layers]
    firsts = [i for i, rest in enumerate(rests) if rest not in rests[:i]]
    others = {f"FFN and norms of layer {i}": rests[i] for i in firsts}
    if len(firsts) == 1:
        others = {"FFN and norms": rests[0]}
    return attention | others | {"embedding, last norm, head": cost.rest, "whole model": cost.whole}


def print_table(parts: dict[str, Cost], plain: list[Compared], asked: CostArguments) -> None:
    """Print the costs of the parts of a model, and the ratios of the whole to plain models."""
    print(f"{'':<30}{''.join(f'{name:>16}' for name in COLUMNS)}")
    for title, part in parts.items():
        print(row(title, part, asked.tokens, asked.batch))
    whole = parts["whole model"]
    for title, _, other in plain:
        ratios = (a / b for a, b in zip(astuple(whole), astuple(other)))
        words = f"{title} everywhere" if "mha" in title else f"the {title}"
        print(f"{f'ratio to {words}':<30}{''.join(f'{ratio:>16.3f}' for ratio in ratios)}")
    print(f"cache in bfloat16: {2 * asked.batch * whole.cache / 1e9:.3f} GB")


def row(title: str, cost: Cost, tokens: int, batch: int) -> str:
    """Return a line of the table: parameters in millions, FLOPs (two for each multiply-add), and cached values."""
    cells = (
        f"{cost.parameters / 1e6:.3f} M",
        *(f"{2 * batch * products / 1e9:.3f} G" for products in (cost.prefill, cost.training, cost.decode)),
        f"{cost.cache / tokens:.0f}",
    )
    return f"{title:<30}{''.join(f' {cell:>15}' for cell in cells)}"


# The memory of a training step


def heading_of_memory(asked: CostArguments) -> str:
    """Return which training step it is whose memory is counted."""
    where = f" on each of {asked.gpus} GPUs, sharded by FSDP2 (not compared with a GPU)" if asked.gpus > 1 else ""
    where += f", {asked.share_rows} of which share each row" if asked.share_rows > 1 else ""
    trained = "float32 weights"
    if asked.lora_r is not None:
        trained = f"LoRA of rank {asked.lora_r} on weights in {asked.bits} bits"
    return f"training step{where}, {trained}, AdamW, bfloat16 autocast"


def memory_of_a_step(config: PreTrainedConfig, asked: CostArguments) -> Peaks:
    """Return the memory of a training step, with several GPUs that of each. Raise `UserError`."""
    keeps_all = Way(lora_r=asked.lora_r, bits=asked.bits, share_rows=asked.share_rows)
    checkpoints = keeps_all._replace(checkpointing=True)
    tiles = checkpoints._replace(tiled_loss=True)
    ways = {"": keeps_all, "activation checkpointing": checkpoints, "activation checkpointing and TRL's loss": tiles}
    if asked.offload:
        ways["activation checkpointing in the host's memory and TRL's loss"] = tiles._replace(offload=True)
    peaks = {name: memory(config, asked, way, recompute=False) for name, way in ways.items()}
    if virtual_tokens_per_token(config) > 1:
        peaks["recompute_virtual_tokens"] = memory(config, asked, keeps_all, recompute=True)
    return peaks


def memory(config: PreTrainedConfig, asked: CostArguments, way: Way, recompute: bool) -> StepMemory:
    """Return the memory of a training step in one way, which makes virtual tokens again or keeps them."""
    config = copy.deepcopy(config)
    config.get_text_config(decoder=True).recompute_virtual_tokens = recompute
    if asked.gpus > 1:
        return of_sharded_training(config, asked.batch, asked.tokens, way, asked.gpus)
    return of_training(config, asked.batch, asked.tokens, way)


def line_of_memory(peaks: Peaks) -> str:
    """Return the memory of a training step at its peak, and of what stays from step to step, in gigabytes."""
    texts = [f"{each.peak / 1e9:.2f}{f' with {name}' if name else ' GB'}" for name, each in peaks.items()]
    stays = (f"{name} {getattr(peaks[''], name) / 1e9:.2f}" for name in ("weights", "gradients", "optimizer"))
    return f"{', '.join(texts)} ({', '.join(stays)})"


# The time of a training step


def heading_of_time(asked: CostArguments) -> str:
    """Return which training step it is whose time follows from --tflops."""
    what = f"{rows_of_a_step(asked)} rows"
    if asked.lora_r is not None:
        what += f" of LoRA of rank {asked.lora_r}"
    return f"time of a step of {what}, if each GPU computes {asked.tflops:g} TFLOP/s, as --tflops assumes"


def rows_of_a_step(asked: CostArguments) -> int:
    """Return how many rows all GPUs take in a step."""
    return asked.batch * asked.gpus // asked.share_rows


def seconds_of_a_step(model: Compared, asked: CostArguments) -> Times:
    """Return the seconds of a training step. Adapters need no products for the gradients of weights below them."""
    passes: Passes | Cost = model.cost
    if asked.lora_r is not None:
        passes = passes_of_model(model.config, asked.tokens, asked.lora_r)
    return seconds(passes, asked.batch / asked.share_rows, asked.tflops)


def seconds(passes: Passes | Cost, rows: float, tflops: float) -> Times:
    """Return the seconds of a training step at a rate of each GPU: checkpointing makes one more forward pass.

    `rows` are those of each GPU, a part of one where GPUs share it."""
    return {
        "": 2 * rows * passes.training / (tflops * 1e12),
        "activation checkpointing": 2 * rows * (passes.training + passes.prefill) / (tflops * 1e12),
    }


def line_of_time(times: Times, asked: CostArguments) -> str:
    """Return the seconds of a step, its speed, and the hours of a training."""
    texts = []
    for name, time in times.items():
        text = f"{time:.2f} s, {rows_of_a_step(asked) * asked.tokens / time:,.0f} tokens/s"
        if asked.steps is not None:
            text += f", {asked.steps:,} steps in {hours(time, asked.steps):.3g} h"
        texts.append(f"{text} with {name}" if name else text)
    return "; ".join(texts)


def hours(time: float, steps: int) -> float:
    return steps * time / 3600


# The file


def figures(
    costs: dict[str, Cost], peaks: dict[str, Peaks], times: dict[str, Times], asked: CostArguments
) -> dict[str, Any]:
    """Return what was printed as JSON values: parameters, multiply-adds, cached values, bytes, seconds and hours."""
    names = ("tokens", "batch", "gpus", "share_rows", "lora_r", "bits", "tflops", "steps")
    return {name: getattr(asked, name) for name in names} | {
        "costs_of_a_sequence": {title: asdict(part) for title, part in costs.items()},
        "bytes_of_a_step": figures_of_steps(peaks, StepMemory._asdict),
        "seconds_of_a_step": figures_of_steps(times, float),
        "hours": {} if asked.steps is None else figures_of_steps(times, lambda time: hours(time, asked.steps)),
    }


def figures_of_steps(found: dict[str, Any], as_json: Callable) -> dict[str, dict[str, Any]]:
    """Return by model the figures of its steps, by what they do to save memory."""
    return {
        title: {way or "nothing saved": as_json(figure) for way, figure in ways.items()}
        for title, ways in found.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the arguments ask for, or raise a `UserError`."""
    cost(cost_arguments(argv))


if __name__ == "__main__":
    run_cli(main)
