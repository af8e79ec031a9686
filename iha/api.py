"""Define the commands as functions: `from iha.api import convert, verify, push, pull`.

The annotations of a function are the arguments, help and checks of its command (`iha/cli.py`). The module that does
the work is imported when the arguments are known to be right, because it imports PyTorch, which takes seconds.
"""

import json as json_library
import os
from contextlib import suppress
from typing import Annotated, Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import BeforeValidator, Field
from typer import Argument, BadParameter, Option

from iha.cards import origin_to_add
from iha.conversion.layers import KINDS, Layers
from iha.errors import UserError, one_line
from iha.files import check_new_directory, check_output_file, checked, expanded
from iha.sources import find_source


__all__ = ["convert", "verify", "push", "pull"]  # the others are commands of a checkout


def json_object(text: str) -> dict:
    """Return the JSON object in a word of the command line."""
    with suppress(ValueError):
        found = json_library.loads(text)
        if isinstance(found, dict):
            return found
    raise BadParameter(f"{text!r} is not a JSON object, such as '{{\"queries\": true}}'")


# A path, or the id of a repository on the Hub. Python may also give a `Path`.
Name = Annotated[str, BeforeValidator(lambda name: os.fspath(name) if isinstance(name, os.PathLike) else name)]
SourceName = Annotated[Name, Argument(help="source checkpoint: a directory, a Hub id or a GGUF file")]
Destination = Annotated[Name, Argument(help="new directory for the converted checkpoint")]
Repository = Annotated[str, Argument(help="repository on the Hub, such as me/smollm2-iha")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], Option(help="dtype of the weights, by default the source's")
]
TrustCode = Annotated[bool, Option("--trust-code", help="run code that is not this package's")]


@checked
def convert(
    source: SourceName,
    destination: Destination,
    num_pseudo_heads: Annotated[
        int | None, Field(ge=1), Option(metavar="P", help="pseudo-heads of each head; required for iha")
    ] = None,
    kind: Annotated[str, Option(metavar="KIND", help=f"attention kind: {', '.join(KINDS)}")] = "iha",
    options: Annotated[
        dict | None,
        Option(parser=json_object, metavar="JSON", help="""options of the kind, such as '{"queries": true}'"""),
    ] = None,
    schedule: Annotated[
        Literal["global", "hybrid"],
        Option(
            help="global: all layers become IHA layers and keep the source's windows if it has any, and the "
            "conversion is exact; hybrid: 4 sliding IHA layers, then a plain global layer, exact for sequences of at "
            "most WINDOW tokens"
        ),
    ] = "global",
    window: Annotated[
        int | None,
        Field(ge=2),
        Option(help="window of hybrid, in tokens (default: the paper's, context length / (2 P^2))"),
    ] = None,
    value_offsets: Annotated[
        Literal["balanced", "none"] | None,
        Option(
            help="balanced: offsets of the values, which sum to zero, make the pseudo-heads of iha differ; none: they "
            "start equal (default: balanced)"
        ),
    ] = None,
    dtype: Dtype = "auto",
    mixing_scale: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False),
        Option(
            metavar="S",
            help="learning rate of the weights that mix heads, as a multiple of the optimizer's (default: 40)",
        ),
    ] = None,
    # PyTorch's generators take other seeds for another one, or reject them.
    seed: Annotated[int, Field(ge=0, lt=2**64), Option(help="seed of the random values")] = 0,
    output_gate: Annotated[
        Literal["elementwise", "per_head"] | None,
        Option(help="a gate of the layer's input on the output of heads, which starts at 1/2; the kind may be mha"),
    ] = None,
) -> None:
    """Convert a pretrained Llama-like checkpoint to IHA or another attention kind without changing what it computes.

    Model types of sources: llama, ministral, mistral, qwen2, qwen3, smollm3.

    example: iha convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha --num-pseudo-heads 2
    """
    layers = Layers(num_pseudo_heads, schedule, window, kind, options, output_gate)
    if kind != "iha" and value_offsets is not None:
        raise UserError(f"kind {kind!r} has no pseudo-heads, whose values could differ: leave out --value-offsets.")
    check_new_directory(destination)
    found = find_source(source)
    from iha.conversion.convert_llama_to_iha import llama_to_iha

    llama_to_iha(found, layers, dtype, value_offsets or "balanced", seed, mixing_scale).write(destination)


@checked
def convert_dcformer(source: SourceName, destination: Destination) -> None:
    """Convert a released DCFormer checkpoint to an IHA checkpoint without changing what it computes.

    The source is Caiyun-AI/DCFormer-2.8B or another checkpoint of its format, a directory or a Hub id. The official
    code has windows of two lengths: in its decoding and its JAX training a token sees `window_size` tokens, itself
    included, and in its PyTorch training one more. In the converted model it sees `window_size` tokens.

    example: python -m conversion_scripts.convert_dcformer_to_iha Caiyun-AI/DCFormer-2.8B dcformer-2.8b-iha
    """
    check_new_directory(destination)
    found = find_source(source)
    from iha.conversion.convert_dcformer_to_iha import dcformer_to_iha

    dcformer_to_iha(found).write(destination)


@checked
def convert_diffllama(source: SourceName, destination: Destination, dtype: Dtype = "auto") -> None:
    """Convert a DiffLlama checkpoint to an IHA checkpoint of "diff" layers without changing what it computes.

    example: python -m conversion_scripts.convert_diffllama_to_iha kajuma/DiffLlama-0.3B-handcut diff-iha
    """
    check_new_directory(destination)
    found = find_source(source)
    from iha.conversion.convert_diffllama_to_iha import diffllama_to_iha

    diffllama_to_iha(found, dtype).write(destination)


@checked
def convert_back(source: SourceName, destination: Destination, dtype: Dtype = "auto") -> None:
    """Convert an IHA checkpoint to a stock architecture that computes the same.

    Layers of kind "diff", trained or not, become a DiffLlama. Others have to compute multi-head attention: their kind
    is "mha", or "iha" with parameters that are still at the exact start of a conversion, or that fold into the
    projections. The command rejects anything else and names the first parameter that has moved.

    example: python -m conversion_scripts.convert_iha_to_llama smollm2-iha smollm2-again
    """
    check_new_directory(destination)
    found = find_source(source)
    from iha.conversion.convert_iha_to_llama import iha_to_stock

    iha_to_stock(found, dtype).write(destination)


@checked
def verify(
    source: SourceName,
    converted: Annotated[Name, Argument(help="converted checkpoint: a directory or a Hub id")],
    text: Annotated[
        Name | None, Option(metavar="FILE", help="text file (default: a speech that ships with the command)")
    ] = None,
    tokens: Annotated[int, Option(help="tokens of the text to compare")] = 500,
    max_new_tokens: Annotated[int, Field(ge=1), Option(help="tokens to decode greedily")] = 64,
    json: Annotated[Name | None, Option(metavar="FILE", help="also write the figures to this file")] = None,
) -> dict[str, Any]:
    """Check on real text that a converted checkpoint computes what its source does, and that the check can fail.

    Both run in float32 on the same tokens, within the length for which the conversion is exact. As a control, one
    parameter of the converted model is broken in memory; the same thresholds must reject that model. The exit code is
    1 if the models differ, or if the control does not. The function returns how far both are from the source.

    example: iha verify HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha
    """
    if tokens <= max_new_tokens:
        raise UserError(f"tokens={tokens}: expected more than max_new_tokens={max_new_tokens}.")
    if json is not None:
        check_output_file(json, replace=True)
    if text is not None and not expanded(text).exists():
        raise UserError(f"{text} does not exist: expected a text file.")
    found = find_source(source), find_source(converted)
    from iha.conversion.verify_conversion import compare_checkpoints

    return compare_checkpoints(*found, text, tokens, max_new_tokens, json)


@checked
def push(
    directory: Annotated[Name, Argument(help="saved model directory")],
    repo_id: Repository,
    private: Annotated[bool, Option("--private", help="make a new repository private")] = False,
    # The Hub rejects the name of a tag that git does not take, but only after the upload.
    tag: Annotated[
        str | None, Field(pattern=r"^\w[\w.+/-]*$"), Option(help="name the uploaded revision, such as v1")
    ] = None,
    create_pr: Annotated[bool, Option("--create-pr", help="open a pull request instead of committing")] = False,
    license: Annotated[
        str | None, Option(help="license of the weights, such as apache-2.0, if the card does not state it")
    ] = None,
    base_model: Annotated[
        str | None,
        Option(
            help="Hub id of the model it was made from, if the card does not state it; 'none' if trained from scratch"
        ),
    ] = None,
    trust_code: TrustCode = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="run all checks that need no network, and print what would be uploaded")
    ] = False,
) -> str | None:
    """Publish a saved model directory on the Hugging Face Hub: only the files of the checkpoint, in one commit.

    Weights, code and card are checked first, and the model is loaded in a process without this package. Log in
    beforehand: hf auth login. The function returns the web address of the commit or pull request.

    example: iha push smollm2-iha me/smollm2-iha --private --dry-run
    """
    check_repo_id(repo_id)
    if "/" not in repo_id:  # the card names what its code loads
        raise UserError(f"{repo_id!r} lacks the name of its owner: expected one such as me/{repo_id}.")
    # `publish` says what to do with an adapter.
    if not any((expanded(directory) / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{directory} is not a saved model: expected a directory with a config.json.")
    if tag is not None and create_pr:
        raise UserError("A tag names a revision of the repository: give --tag once the pull request is merged.")
    origin = origin_to_add(expanded(directory), license, base_model)
    found = find_source(directory)
    from iha.hub.push_to_hub import publish

    return publish(found, repo_id, origin, private, tag, create_pr, trust_code, dry_run)


@checked
def pull(
    repo_id: Repository,
    directory: Annotated[Name, Argument(help="new directory")],
    revision: Annotated[str, Option(help="commit, tag or branch")] = "main",
    trust_code: TrustCode = False,
) -> str:
    """Fetch a checkpoint from the Hugging Face Hub into a new directory, and check it as if it were to be published.

    Every file is compared with the Hub's checksum, and the model is loaded in a process without this package. The
    function returns the commit.

    example: iha pull me/smollm2-iha smollm2-iha --revision v1
    """
    check_repo_id(repo_id)
    check_new_directory(directory)
    from iha.hub.pull_from_hub import fetch

    return fetch(repo_id, directory, revision, trust_code)


def check_repo_id(repo_id: str) -> None:
    """Reject a name that no repository of the Hub can have. Raise `UserError`."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(
            f"{repo_id!r} is not a valid repository name, such as me/smollm2-iha: {one_line(error)}"
        ) from None
