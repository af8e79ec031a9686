"""Convert a DiffLlama checkpoint to an IHA checkpoint of "diff" layers without changing what it computes.

A "diff" layer is the attention of Transformers' DiffLlama (Differential Transformer), and every parameter keeps its
name.
"""

import copy
import os
from collections.abc import Sequence

from transformers import DiffLlamaForCausalLM, PreTrainedConfig

from iha.arguments import add_dtype, converter_parser
from iha.errors import UserError
from modeling_iha import IHAConfig, IHAForCausalLM

from .shared import SHARED_FIELDS, build, check_fields, describe, new_config, read_source, write_checkpoint


def iha_config(source: PreTrainedConfig) -> IHAConfig:
    """Return the configuration of the converted model, or raise `UserError` when the source does not allow one."""
    if source.model_type != "diffllama":
        raise UserError(f"The source is a {source.model_type!r}; expected 'diffllama'. `iha convert` takes others.")
    check_fields(source, ("attention_bias", "lambda_std_dev"))
    return new_config(
        IHAConfig,
        **{name: copy.deepcopy(getattr(source, name)) for name in (*SHARED_FIELDS, "attention_bias", "head_dim")},
        attention_kinds="diff",
        attention_options={"diff": {"lambda_std_dev": source.lambda_std_dev}},
    )


def convert_model(source: DiffLlamaForCausalLM) -> IHAForCausalLM:
    """Return the model that computes what `source` does, in eval mode and its dtype, with its weights' memory.

    Raise `UserError` when the source is not supported.
    """
    config = iha_config(source.config)
    return build(IHAForCausalLM, config, source.state_dict(), source.dtype, source.generation_config)


def convert(source: str | os.PathLike, destination: str | os.PathLike, dtype: str = "auto") -> None:
    """Convert the DiffLlama `source`, a directory or a Hub id, into the new directory `destination`.

    `dtype` is that of the weights, by default the source's. Raise `UserError`, and leave nothing behind, if the source
    cannot be converted.
    """

    def make():
        model, tokenizer = read_source(source, iha_config, dtype)
        return convert_model(model), tokenizer, describe(source, "diffllama")

    write_checkpoint(source, destination, make)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    example = "kajuma/DiffLlama-0.3B-handcut diff-iha"
    parser = converter_parser(__doc__, example, "DiffLlama checkpoint: a directory or a Hub id")
    add_dtype(parser)
    convert(**vars(parser.parse_args(argv)))
