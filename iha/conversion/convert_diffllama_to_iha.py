"""Convert a DiffLlama checkpoint to an IHA checkpoint of "diff" layers without changing what it computes.

A "diff" layer is the attention of Transformers' DiffLlama (Differential Transformer), and every parameter keeps its
name.
"""

import copy

from transformers import DiffLlamaForCausalLM, PreTrainedConfig

from iha.checkpoints import load_config
from iha.errors import UserError
from iha.sources import Source
from modeling_iha import IHAConfig, IHAForCausalLM

from .architectures import SHARED_FIELDS, check_fields
from .shared import Converted, build, new_config, read_source


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


def convert_model(source: DiffLlamaForCausalLM, config: IHAConfig) -> IHAForCausalLM:
    """Return the model that computes what `source` does, in eval mode and its dtype, with its weights' memory.

    `config` is that of `iha_config`.
    """
    return build(IHAForCausalLM, config, source.state_dict(), source.dtype, source.generation_config)


def diffllama_to_iha(source: Source, dtype: str) -> Converted:
    """Read a DiffLlama with weights in `dtype`, and convert it. Raise `UserError` if it cannot be converted."""
    print(f"1 of 2: reading {source}", flush=True)
    of_source = load_config(source)
    config = iha_config(of_source)
    model, tokenizer = read_source(source, of_source, dtype)
    return Converted(convert_model(model, config), tokenizer, source, "(diffllama)")
