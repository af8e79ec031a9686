"""Parse and check the arguments of the commands of `iha` before PyTorch is imported, which takes seconds.

Each `..._arguments` takes the words of a command line and returns the keyword arguments of the command's function.
Each `check_...` raises `UserError` for arguments that cannot work. The functions call them too, because Python calls
the functions without a command line.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from iha.errors import UserError, one_line
from iha.files import check_new_directory, check_output_file, expanded, parse_yaml
from iha.sources import find_source


# The attention kinds with an exact start from Llama: those whose file in iha/kinds/ has one.
KINDS = ["dcmha", "diff_v2", "gated", "iha", "knocking_heads", "talking_heads"]


def new_parser(description: str, example: str) -> argparse.ArgumentParser:
    """Return a parser without arguments. The example leaves out the name of the command."""
    return argparse.ArgumentParser(description=description, epilog=f"example: %(prog)s {example}")


# Converters


def converter_parser(description: str, example: str, source: str) -> argparse.ArgumentParser:
    """Return a parser of the positional arguments of a converter; the description is the docstring of the command."""
    parser = new_parser(description, example)
    parser.add_argument("source", help=source)
    parser.add_argument("destination", type=os.path.expanduser, help="new directory for the converted checkpoint")
    return parser


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the option of the dtype in which the source is read."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights (default: the source's)",
    )


def json_object(text: str) -> dict:
    """Return the JSON object in a word of the command line."""
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"per_head\": true}}'")


def convert_arguments(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `convert`. Raise `UserError`."""
    parser = converter_parser(
        "Convert a pretrained Llama-like checkpoint to IHA or another attention kind, and change nothing that it "
        "computes. Model types of sources: llama, ministral, mistral, qwen2, qwen3, smollm3.",
        "HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha --num-pseudo-heads 2",
        "source checkpoint: a directory, a Hub id or a GGUF file",
    )
    add = parser.add_argument
    # `check_attention` says why another kind is rejected.
    add("--kind", metavar="KIND", default="iha", help=f"attention kind: {', '.join(KINDS)} (default: iha)")
    add("--options", type=json_object, metavar="JSON", help="""options of the kind, such as '{"per_head": true}'""")
    add("--num-pseudo-heads", type=int, metavar="P", help="pseudo-heads of each head; required for iha")
    add(
        "--schedule",
        choices=("global", "hybrid"),
        default="global",
        help="global: all layers become IHA layers and keep the source's windows if it has any, and the conversion is "
        "exact; hybrid: 4 sliding IHA layers, then a plain global layer, exact for sequences of at most WINDOW tokens "
        "(default: global)",
    )
    add("--window", type=int, help="window of hybrid, in tokens (default: the paper's, context length / (2 P^2))")
    add(
        "--value-offsets",
        choices=("balanced", "none"),
        help="balanced: offsets of the values, which sum to zero, make the pseudo-heads of iha differ; none: they "
        "start equal (default: balanced)",
    )
    add_dtype(parser)
    add(
        "--mixing-scale",
        type=float,
        metavar="S",
        help="learning rate of the weights that mix heads, as a multiple of the optimizer's (default: 40)",
    )
    add("--seed", type=int, default=0, help="seed of the random values (default: 0)")
    arguments = vars(parser.parse_args(argv))
    check_conversion(**arguments)
    return arguments | {"source": find_source(arguments["source"])}


def check_conversion(
    destination: str | os.PathLike,
    num_pseudo_heads: int | None,
    kind: str,
    schedule: str,
    window: int | None,
    value_offsets: str | None,
    mixing_scale: float | None,
    seed: int,
    **others,
) -> None:
    """Reject arguments of `convert` that cannot work. Raise `UserError`."""
    check_attention(num_pseudo_heads, schedule, window, kind)
    if kind != "iha" and value_offsets is not None:
        raise UserError(f"kind {kind!r} has no pseudo-heads, whose values could differ: leave out --value-offsets.")
    if mixing_scale is not None and not 0 < mixing_scale < math.inf:
        raise UserError(f"mixing_scale={mixing_scale}: expected a number above 0.")
    if not 0 <= seed < 2**64:  # PyTorch's generators reject others, or take them for another seed
        raise UserError(f"seed={seed}: expected a whole number from 0 to {2**64 - 1}.")
    check_new_directory(destination)


def check_attention(num_pseudo_heads: int | None, schedule: str, window: int | None, kind: str) -> None:
    """Reject a kind, P, schedule and window that cannot work together for any source. Raise `UserError`."""
    if kind not in KINDS:
        raise UserError(f"kind={kind!r} has no exact start from Llama; expected one of {', '.join(KINDS)}.")
    if kind == "iha" and num_pseudo_heads is None:
        raise UserError("kind 'iha' needs a number of pseudo-heads, such as --num-pseudo-heads 2.")
    if kind != "iha" and num_pseudo_heads is not None:
        raise UserError(f"kind {kind!r} has no pseudo-heads: leave out --num-pseudo-heads.")
    if num_pseudo_heads is not None and num_pseudo_heads < 1:
        raise UserError(f"num_pseudo_heads={num_pseudo_heads}: expected at least 1.")
    if kind != "iha" and schedule != "global":
        raise UserError(
            f"kind {kind!r} with schedule={schedule!r}: only 'iha' has that schedule; leave out --schedule."
        )
    if window is not None and schedule == "global":
        raise UserError(f"window={window}: the global schedule has no window; add --schedule hybrid or drop --window.")
    if window is not None and window < 2:
        raise UserError(f"window={window}: expected at least 2 tokens.")


# The other commands


def verify_arguments(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `verify`. Raise `UserError`."""
    parser = new_parser(
        "Check on real text that a converted checkpoint computes what its source does, and that the check can fail. "
        "Both run in float32 on the same tokens, within the length for which the conversion is exact. As a control, "
        "one parameter of the converted model is broken in memory; the same thresholds must reject that model. The "
        "exit code is 1 if the models differ, or if the control does not.",
        "HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha",
    )
    add = parser.add_argument
    add("source", help="source checkpoint: a directory, a Hub id or a GGUF file")
    add("converted", help="converted checkpoint: a directory or a Hub id")
    add("--text", help="text file (default: a speech that ships with the command)")
    add("--tokens", type=int, default=500, help="tokens of the text to compare (default: 500)")
    add("--max-new-tokens", type=int, default=64, help="tokens to decode greedily (default: 64)")
    add("--json", help="also write the figures to this file")
    arguments = vars(parser.parse_args(argv))
    check_verification(**arguments)
    return arguments | {name: find_source(arguments[name]) for name in ("source", "converted")}


def check_verification(
    text: str | os.PathLike | None, tokens: int, max_new_tokens: int, json: str | os.PathLike | None, **others
) -> None:
    """Reject arguments of `verify` that cannot work. Raise `UserError`."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: expected at least 1.")
    if tokens <= max_new_tokens:
        raise UserError(f"tokens={tokens}: expected more than max_new_tokens={max_new_tokens}.")
    if json is not None:
        check_output_file(json, replace=True)
    if text is not None and not expanded(text).exists():
        raise UserError(f"{text} does not exist: expected a text file.")


def push_arguments(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `push`. Raise `UserError`."""
    parser = new_parser(
        "Publish a saved model directory on the Hugging Face Hub: only the files of the checkpoint, in one commit. "
        "Weights, code and card are checked first, and the model is loaded in a process without this package. Log in "
        "beforehand: hf auth login.",
        "smollm2-iha me/smollm2-iha --private --dry-run",
    )
    add = parser.add_argument
    add("directory", metavar="dir", type=os.path.expanduser, help="saved model directory")
    add("repo_id", help="repository on the Hub, such as me/smollm2-iha")
    add("--private", action="store_true", help="make a new repository private")
    add("--tag", help="name the uploaded revision, such as v1")
    add("--create-pr", action="store_true", help="open a pull request instead of committing")
    add("--license", help="license of the weights, such as apache-2.0, if the card does not state it")
    add(
        "--base-model",
        help="Hub id of the model it was made from, if the card does not state it; 'none' if trained from scratch",
    )
    add("--trust-code", action="store_true", help="run and publish code that is not this package's")
    add("--dry-run", action="store_true", help="run all checks, print what would be uploaded, stay off the network")
    arguments = vars(parser.parse_args(argv))
    check_push(**arguments)
    return arguments


def check_push(directory: str | os.PathLike, repo_id: str, tag: str | None, create_pr: bool, **others) -> None:
    """Reject arguments of `push` that cannot work. Raise `UserError`."""
    check_repo_id(repo_id)
    if "/" not in repo_id:  # the card names what its code loads
        raise UserError(f"{repo_id!r} lacks the name of its owner: expected one such as me/{repo_id}.")
    if not Path(directory).is_dir():
        raise UserError(f"{directory} is not a directory: expected a saved model.")
    if not Path(directory, "config.json").is_file():
        raise UserError(f"{directory} holds no config.json: expected a saved model directory.")
    if tag is not None and (not re.fullmatch(r"\w[\w.+/-]*(?<![./])", tag) or ".." in tag or tag.endswith(".lock")):
        raise UserError(f"--tag {tag!r} cannot be the name of a tag: expected one such as v1.0.")
    if tag is not None and create_pr:
        raise UserError("A tag names a revision of the repository: give --tag once the pull request is merged.")


def check_repo_id(repo_id: str) -> None:
    """Reject a name that no repository of the Hub can have. Raise `UserError`."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(
            f"{repo_id!r} is not a valid repository name, such as me/smollm2-iha: {one_line(error)}"
        ) from None


def pull_arguments(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `pull`. Raise `UserError`."""
    parser = new_parser(
        "Fetch a checkpoint from the Hugging Face Hub into a new directory, and check it as if it were to be "
        "published. Every file is compared with the Hub's checksum, and the model is loaded in a process without this "
        "package.",
        "me/smollm2-iha smollm2-iha --revision v1",
    )
    add = parser.add_argument
    add("repo_id", help="repository on the Hub, such as me/smollm2-iha")
    add("directory", metavar="dir", type=os.path.expanduser, help="new directory")
    add("--revision", default="main", help="commit, tag or branch, main by default")
    add("--trust-code", action="store_true", help="run code that is not this package's")
    arguments = vars(parser.parse_args(argv))
    check_pull(**arguments)
    return arguments


def check_pull(repo_id: str, directory: str | os.PathLike, **others) -> None:
    """Reject arguments of `pull` that cannot work. Raise `UserError`."""
    check_repo_id(repo_id)
    check_new_directory(directory)


def cost_arguments(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `cost`. Raise `UserError`."""
    parser = new_parser(
        "Print the parameters, FLOPs, cached values and training memory of each kind of layer and of the whole model, "
        'with ratios to the same model with "mha" in every layer.',
        "--preset paper-2.4b-iha --num-pseudo-heads 4 --tokens 8192",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", help="name of a preset of IHAConfig.from_preset")
    config = "model, interleaved model or Llama-like base: a directory with a config.json, or a Hub id"
    model.add_argument("--config", help=config)
    parser.add_argument("--tokens", type=int, required=True, help="length of the sequence")
    parser.add_argument("--batch", type=int, default=1, help="number of sequences of each GPU (default: 1)")
    virtual = "P in place of the model's; a plain base gets it in every layer, or with --window in four of five"
    parser.add_argument("--num-pseudo-heads", type=int, help=virtual)
    parser.add_argument("--window", type=int, help="window in tokens in place of the model's")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share the model by FSDP2 (default: 1)")
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
        arguments["config"] = find_source(arguments["config"])
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
    **others,
) -> None:
    """Reject arguments of `cost` that cannot work. Raise `UserError`."""
    numbers = {"tokens": tokens, "batch": batch, "num-pseudo-heads": num_pseudo_heads, "gpus": gpus, "steps": steps}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1.")
    if window is not None and window < 2:
        raise UserError(f"--window {window}: expected at least 2.")
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
