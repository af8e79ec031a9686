"""The model, tokenizer and adapters that a run starts from."""

import torch
from peft import LoraConfig
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from common.checkpoint_io import load_model, load_tokenizer, note_slow_dtype
from common.command_io import UserError, one_line
from kinds import own_modules
from sft.arguments import RunArguments, chat_template


def prepare_model(
    run: RunArguments, args: TrainingArguments, config: PreTrainedConfig
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in `run.dtype` with the configuration of `run_config`, and its tokenizer with the recipe's chat
    template. Raises `UserError`."""
    if args.model_init_kwargs:
        raise UserError("model_init_kwargs is not used here: set dtype and attn_implementation themselves.")
    template = chat_template(args)
    model = load_model(run.model_name_or_path, getattr(torch, run.dtype), config)
    if args.device.type == "cpu":
        note_slow_dtype(torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else model.dtype)
    if run.attention_form is not None:
        model.base_model.attention_form = run.attention_form
    if run.attn_implementation is not None:
        try:
            model.set_attn_implementation(run.attn_implementation)
        except (ValueError, ImportError) as error:
            raise UserError(f"attn_implementation {run.attn_implementation!r}: {one_line(error)}") from error
    tokenizer = load_tokenizer(run.model_name_or_path, model.config.vocab_size)
    for key in ("eos_token", "pad_token"):
        if (token := getattr(args, key, None)) is not None and token not in tokenizer.get_vocab():
            raise UserError(
                f"{key} {token!r} is no token of {run.model_name_or_path}: give one that is, or remove the key."
            )
    if template is not None:
        tokenizer.chat_template = template
    return model, tokenizer


def lora_config(run: RunArguments, model: PreTrainedModel) -> LoraConfig | None:
    """Return the adapters that `run` asks for, or None. Modules of a kind's own (`own_modules`) are trained in full
    beside them. Raises `UserError` for a target that the model does not have."""
    if not run.use_peft:
        return None
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if unknown := set(run.lora_target_modules or ()) - names:
        raise UserError(f"lora_target_modules: the model has no module named {', '.join(sorted(unknown))}.")
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_target_modules or "all-linear",
        modules_to_save=own_modules(model) or None,
        use_dora=run.use_dora,
    )
