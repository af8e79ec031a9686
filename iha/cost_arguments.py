"""Parse and check the arguments of `iha cost` before PyTorch is imported, which takes seconds."""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from iha.errors import UserError
from iha.files import check_output_file
from iha.presets import fields_of, preset_names
from iha.sources import Source, find_source


@dataclass(frozen=True)
class CostArguments:
    """Hold the arguments of `iha cost`. Raise `UserError` for some that cannot work.

    Attributes:
        tokens, batch: the length of each row, and the rows of each GPU.
        preset, fields: the name of a preset, and what replaces its fields.
        source: the checkpoint or the plain decoder to count, where no preset is named.
        num_pseudo_heads, window: P, and a window in tokens, in place of the model's.
        gpus, share_rows: how many GPUs share the model, and how many of them share each row.
        offload: whether to count activation checkpoints that wait in the memory of the host, too.
        lora_r, bits: the rank of adapters, and the bits of the weights below them.
        tflops, steps: the TFLOP/s of each GPU, and the steps of a training.
        count_memory: whether to count the memory of a step.
        json: a file for the figures.
    """

    tokens: int
    preset: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    source: Source | None = None
    batch: int = 1
    num_pseudo_heads: int | None = None
    window: int | None = None
    gpus: int = 1
    share_rows: int = 1
    offload: bool = False
    lora_r: int | None = None
    bits: int = 32
    tflops: float | None = None
    steps: int | None = None
    count_memory: bool = True
    json: str | os.PathLike | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "num_pseudo_heads", "gpus", "steps", "share_rows", "lora_r"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: expected at least 1.")
        if self.window is not None and self.window < 2:
            raise UserError(f"--window {self.window}: expected at least 2.")
        share = f"--share-rows {self.share_rows}"
        if self.gpus % self.share_rows or self.tokens % self.share_rows:
            raise UserError(f"{share}: expected a divisor of --gpus and of --tokens.")
        if self.share_rows > 1 and self.batch > 1:
            raise UserError(f"{share}: GPUs share one row at a time; leave out --batch {self.batch}.")
        if self.lora_r is not None and self.gpus > 1:
            raise UserError(f"--lora-r {self.lora_r}: LoRA is counted on one GPU; leave out --gpus.")
        if self.bits != 32 and self.lora_r is None:
            raise UserError(f"--bits {self.bits}: rounded weights are not trained; give --lora-r, such as 16.")
        if self.tflops is not None and not 0 < self.tflops < math.inf:
            raise UserError(f"--tflops {self.tflops}: expected a number above 0.")
        if self.steps is not None and self.tflops is None:
            raise UserError(f"--steps {self.steps}: give --tflops too, from which the hours follow.")
        if self.fields and self.preset is None:
            raise UserError("--set changes the fields of a preset: give one with --preset.")
        if "num_pseudo_heads" in self.fields and self.num_pseudo_heads is not None:
            raise UserError("--set num_pseudo_heads and --num-pseudo-heads both say the same field: give one.")
        if "sliding_window" in self.fields and self.window is not None:
            raise UserError("--set sliding_window and --window both say the same field: give one.")
        if self.preset is not None and self.preset not in preset_names():
            raise UserError(f"--preset {self.preset}: expected one of {', '.join(preset_names())}.")
        if self.json is not None:
            check_output_file(self.json, replace=True)


def cost_arguments(argv: Sequence[str] | None = None) -> CostArguments:
    """Return the arguments of `iha cost`. Raise `UserError`."""
    parser = argparse.ArgumentParser(
        description="Print the parameters, FLOPs, cached values and training memory of each kind of layer and of the "
        'whole model, with ratios to the same model with "mha" in every layer, or to the plain model of a decoder of '
        "Transformers with interleaved or paired heads.",
        epilog="example: %(prog)s --preset paper-2.4b-iha --num-pseudo-heads 4 --tokens 8192",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", help="name of a preset of IHAConfig.from_preset")
    config = "decoder of Transformers, plain, interleaved or paired, or one of ours: a directory or a Hub id"
    model.add_argument("--config", dest="source", metavar="CONFIG", type=source_of, help=config)
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
    parser.add_argument("--set", dest="changes", nargs="+", default=[], metavar="FIELD=VALUE", help=where)
    memory = "count no memory, which takes longest"
    parser.add_argument("--no-memory", dest="count_memory", action="store_false", help=memory)
    parser.add_argument("--json", help="also write the figures to this file")
    given = vars(parser.parse_args(argv))
    return CostArguments(fields=fields_of(given.pop("changes")), **given)


def source_of(config: str) -> Source:
    """Return where the model lies that --config names. Raise `UserError`."""
    if config in preset_names() and not os.path.exists(config):
        raise UserError(f"--config {config}: this is the name of a preset: give it as --preset {config}.")
    return find_source(config)
