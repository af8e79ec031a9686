"""Parse and check the arguments of `iha cost` before PyTorch is imported, which takes seconds."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from iha.errors import UserError
from iha.files import check_output_file, parse_yaml
from iha.sources import find_source


def cost_arguments(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `cost`. Raise `UserError`."""
    parser = argparse.ArgumentParser(
        description="Print the parameters, FLOPs, cached values and training memory of each kind of layer and of the "
        'whole model, with ratios to the same model with "mha" in every layer, or to the plain model of a decoder of '
        "Transformers with interleaved or paired heads.",
        epilog="example: %(prog)s --preset paper-2.4b-iha --num-pseudo-heads 4 --tokens 8192",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", help="name of a preset of IHAConfig.from_preset")
    config = "decoder of Transformers, plain, interleaved or paired, or one of ours: a directory or a Hub id"
    model.add_argument("--config", help=config)
    parser.add_argument("--tokens", type=int, required=True, help="length of the sequence")
    parser.add_argument("--batch", type=int, default=1, help="number of sequences of each GPU (default: 1)")
    virtual = "P in place of the model's; a plain base gets it in every layer, or with --window in four of five"
    parser.add_argument("--num-pseudo-heads", type=int, help=virtual)
    parser.add_argument("--window", type=int, help="window in tokens in place of the model's")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share the model by FSDP2 (default: 1)")
    shared = "GPUs that share each row, S; a divisor of --gpus (default: 1, a row or more for each GPU)"
    parser.add_argument("--share-rows", type=int, default=1, metavar="S", help=shared)
    host = "also count activation checkpoints that wait in the memory of the host"
    parser.add_argument("--offload", action="store_true", help=host)
    rank = "rank of LoRA on all linear maps of the layers, trained with the mixing in place of the weights"
    parser.add_argument("--lora-r", type=int, metavar="R", help=rank)
    bits = "bits of the weights below LoRA: 32, 16, or 4 as in QLoRA (default: 32)"
    parser.add_argument("--bits", type=int, choices=(32, 16, 4), default=32, help=bits)
    parser.add_argument("--tflops", type=float, help="TFLOP/s that you expect of each GPU, for the time of a step")
    parser.add_argument("--steps", type=int, help="steps of a training, for its hours at --tflops")
    where = "fields to change in the preset; fields that depend on them follow"
    parser.add_argument("--set", nargs="+", metavar="FIELD=VALUE", help=where)
    parser.add_argument("--no-memory", action="store_true", help="count no memory, which takes longest")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = vars(parser.parse_args(argv))
    changes = arguments.pop("set")
    if changes and arguments["preset"] is None:
        raise UserError("--set changes the fields of a preset: give one with --preset.")
    arguments["fields"] = fields_of(changes or [])
    arguments["count_memory"] = not arguments.pop("no_memory")
    check_cost(**arguments)
    if arguments["config"] is not None:
        find_source(arguments["config"])
    return arguments


def check_cost(
    preset: str | None,
    config: str | os.PathLike | None,
    tokens: int,
    batch: int,
    num_pseudo_heads: int | None,
    window: int | None,
    gpus: int,
    tflops: float | None,
    steps: int | None,
    json: str | os.PathLike | None,
    share_rows: int,
    lora_r: int | None,
    bits: int,
    **others,
) -> None:
    """Reject arguments of `cost` that cannot work. Raise `UserError`."""
    numbers = {"tokens": tokens, "batch": batch, "num-pseudo-heads": num_pseudo_heads, "gpus": gpus, "steps": steps}
    numbers |= {"share-rows": share_rows, "lora-r": lora_r}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1.")
    if window is not None and window < 2:
        raise UserError(f"--window {window}: expected at least 2.")
    if gpus % share_rows or tokens % share_rows or (share_rows > 1 and batch > 1):
        raise UserError(f"--share-rows {share_rows}: expected a divisor of --gpus and of --tokens, and --batch 1.")
    if lora_r is not None and gpus > 1:
        raise UserError(f"--lora-r {lora_r}: LoRA is counted on one GPU; leave out --gpus.")
    if bits != 32 and lora_r is None:
        raise UserError(f"--bits {bits}: weights in {bits} bits are not trained; give --lora-r, such as 16.")
    if tflops is not None and not 0 < tflops < math.inf:
        raise UserError(f"--tflops {tflops}: expected a number above 0.")
    if steps is not None and tflops is None:
        raise UserError(f"--steps {steps}: give --tflops too, from which the hours follow.")
    if json is not None:
        check_output_file(json, replace=True)
    names = preset_names()
    if config in names and not os.path.exists(config):
        raise UserError(f"--config {config}: this is the name of a preset: give it as --preset {config}.")
    if config is None and preset not in names:
        raise UserError(f"--preset {preset}: expected one of {', '.join(names)}.")


def fields_of(changes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of FIELD=VALUE words, with values of JSON or else of YAML. Raise `UserError`."""
    fields = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"{change}: expected FIELD=VALUE.")
        try:
            fields[name] = json.loads(value)  # which reads 1e-5 as a number
        except ValueError:
            fields[name] = parse_yaml(value, change, Any)
    return fields


def preset_names() -> list[str]:
    """Return the names of the presets, without importing the package that holds them, which imports PyTorch."""
    package = find_spec("configuration_iha")
    return sorted(path.stem for path in Path(str(package and package.origin)).parent.glob("*.json"))
