"""Load what a run starts from: configuration, model, tokenizer and adapters.

The configuration is checked before weights are read.
"""

import copy
import hashlib
import json
import math
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.generic import is_flash_attention_requested
from trl import SFTConfig, get_peft_config, get_quantization_config

from iha.checkpoints import (
    end_tokens,
    fingerprint,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    note_slow_dtype,
    positions_of,
    vocabulary_of,
)
from iha.errors import UserError, one_line, refusing
from iha.kinds import interleaved_kind, is_interleaved, is_ours, own_modules, virtual_tokens_per_token
from iha.sources import Source, find_source
from iha.without_data import without_data
from modeling_iha import IHAConfig, interleave_heads, set_mixing_scale
from modeling_iha.mixing_weights import trained_mixing, weight_names
from modeling_iha.modeling_iha import IHARotaryEmbedding
from modeling_iha.modeling_interleaved import implementation_of_user
from modeling_iha.probes import keeps_documents_apart
from sft.arguments import RunArguments
from sft.data import rendering
from sft.make_model import config_of, random_model, start_tokenizer


# Cores that keep packed documents apart, besides the flash cores.
ISOLATING_CORES = ("eager", "sdpa", "flex_attention")
# Keys of a recipe that say how `num_pseudo_heads` interleaves a plain base model.
INTERLEAVING_KEYS = ("interleaved_layers", "interleaved_window", "collapse")


class Start(NamedTuple):
    """Hold what a run starts from."""

    name: str  # for errors
    config: PreTrainedConfig  # without the changes of the recipe
    source: Source | None = None  # of the checkpoint; None for random weights
    tokenizer: PreTrainedTokenizerBase | None = None  # for random weights; a checkpoint has its own
    is_to_interleave: bool = False  # whether the run interleaves its heads: those of a plain model of Transformers


def find_start(run: RunArguments) -> Start:
    """Return the checkpoint or preset that a run starts from, without reading weights. Raise `UserError`."""
    if run.preset:
        tokenizer = start_tokenizer(run.tokenizer)
        return Start(run.preset, config_of(run.preset, tokenizer, run.preset_fields or []), tokenizer=tokenizer)
    source = find_source(run.model_name_or_path)
    if run.is_quantized and source.gguf_file is not None:
        raise UserError(
            f"load_in_4bit, load_in_8bit: {source} is a GGUF file, which has a rounding of its own: take the "
            "checkpoint from which it was made."
        )
    config = load_config(source)
    unsaved = f"{source}: Transformers would not save its generation_config.json after the training; correct the file"
    with refusing(unsaved, ValueError):
        (load_generation_config(source) or GenerationConfig()).validate(strict=True)
    is_to_interleave = run.num_pseudo_heads is not None and not is_ours(config)
    return Start(str(source), config, source, is_to_interleave=is_to_interleave)


def identify_start(start: Start, seed: int) -> dict[str, str]:
    """Return the name of the checkpoint or random weights that a run starts from, and what tells them from others."""
    if start.source is not None:
        return {"name": start.name, "fingerprint": fingerprint(start.source)}
    fields = {name: value for name, value in start.config.to_dict().items() if name != "transformers_version"}
    content = json.dumps([fields, start.tokenizer.get_vocab(), seed], sort_keys=True, default=str)
    return {"name": f"preset {start.name}", "sha256": hashlib.sha256(content.encode()).hexdigest()}


def run_config(start: Start, run: RunArguments, args: SFTConfig) -> PreTrainedConfig:
    """Return the configuration of the run's base model with the changes of the recipe, without weights.

    The trained checkpoint keeps it. Raise `UserError` for a recipe that does not fit the model.
    """
    config = copy.deepcopy(start.config)
    text_config = config.get_text_config(decoder=True)  # the same one, unless the model also reads images or sound
    changes: dict[str, Any] = {}
    if run.sliding_window == "scale":
        changes |= _scaled_windows(start, run)
    elif run.sliding_window is not None:
        if not _may_have_sliding_layers(start.config):
            raise UserError(
                f"sliding_window: {start.name} has no sliding layers, so it has no effect; remove the key."
            )
        changes["sliding_window"] = run.sliding_window
    if run.max_position_embeddings is not None:
        changes["max_position_embeddings"] = run.max_position_embeddings
    if run.rope_theta is not None:
        parameters = getattr(text_config, "rope_parameters", None) or {}
        if "rope_theta" not in parameters:
            raise UserError(f"rope_theta: {start.name} has no single RoPE base; remove the key.")
        changes["rope_parameters"] = {**parameters, "rope_theta": run.rope_theta}
    for name, value in changes.items():
        if not hasattr(text_config, name):
            raise UserError(f"{name}: a {config.model_type!r} model has no such field; remove the key.")
        setattr(text_config, name, value)
    try:
        config.validate()
    except Exception as error:  # huggingface_hub wraps a validator's exception in a class of its own
        raise UserError(f"The recipe does not fit {start.name}: {one_line(error.__cause__ or error)}") from error
    _check_length(config, args)
    return config


def _check_length(config: PreTrainedConfig, args: SFTConfig) -> None:
    """Raise `UserError` for rows that are longer than the model's context, or that RoPE cannot tell."""
    positions = positions_of(config)
    length = args.max_length or positions
    if positions is not None and length > positions:
        raise UserError(
            f"max_length={length} is beyond the model's {positions} positions: set max_position_embeddings to "
            f"{length} and rope_theta to a base for that length, or lower max_length."
        )
    if isinstance(config, IHAConfig):
        _check_reach(config, length)


def _scaled_windows(start: Start, run: RunArguments) -> dict[str, int]:
    """Return the model's windows by their fields, in tokens, as much longer as its context. Raise `UserError`."""
    positions = positions_of(start.config)
    if run.max_position_embeddings is None or positions is None:
        raise UserError("sliding_window: scale lets windows grow with max_position_embeddings: set that key too.")
    longer = run.max_position_embeddings / positions
    text_config = start.config.get_text_config(decoder=True)
    fields = ["interleaved_window"]
    if _may_have_sliding_layers(start.config):
        fields.append("sliding_window")
    windows = {name: getattr(text_config, name, None) for name in fields}
    return {name: max(2, int(tokens * longer)) for name, tokens in windows.items() if tokens is not None}


def _may_have_sliding_layers(config: PreTrainedConfig) -> bool:
    """Return whether a model may have sliding layers. The `validate` of an IHA model decides later if it has some."""
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    return isinstance(config, IHAConfig) or layer_types is None or "sliding_attention" in layer_types


def leave_out(name: str, why: str, run: RunArguments) -> None:
    """Leave out a key of a recipe's file that its start cannot use, and print a note.

    Raise `UserError` for one on the command line.
    """
    value = getattr(run, name)
    if value is None:
        return
    if name in run.on_command_line:
        raise UserError(f"{name}: {why}; remove the key.")
    PartialState().print(f"Note: {name}={value} is left out: {why}.")
    setattr(run, name, None)


def settle_pseudo_heads(start: Start, run: RunArguments) -> None:
    """Leave out how the recipe interleaves, for a start that stays as it is. Raise `UserError`."""
    if start.is_to_interleave:
        return
    given = [name for name in INTERLEAVING_KEYS if getattr(run, name) is not None]
    is_control = run.num_pseudo_heads is None and "num_pseudo_heads" in run.on_command_line
    if given and not is_control:
        raise UserError(
            f"{', '.join(given)}: for runs that interleave a plain base model by num_pseudo_heads. {start.name} keeps "
            "what it was made with: remove what is named here."
        )
    for name in given:
        leave_out(name, "num_pseudo_heads is null", run)
    asked, found = run.num_pseudo_heads, virtual_tokens_per_token(start.config)
    if asked in (None, found):
        return
    if "num_pseudo_heads" in run.on_command_line:
        advice = "give the plain base model, whose heads the run then interleaves, or correct the recipe"
        if start.source is None:
            advice = f"give --preset_fields num_pseudo_heads={asked} instead"
        raise UserError(f"The recipe states num_pseudo_heads={asked} and {start.name} has {found}: {advice}.")
    PartialState().print(f"Note: num_pseudo_heads={asked} is for plain base models: {start.name} keeps its {found}.")
    run.num_pseudo_heads = None


def settle_training_options(start: Start, run: RunArguments) -> None:
    """Leave out keys about the mixing and virtual tokens, for a model that has none. Raise `UserError`."""
    if run.mixing_scale is not None and not _mixes_heads(start):
        leave_out("mixing_scale", f"{start.name} has no weights that mix heads", run)
    if not start.is_to_interleave and virtual_tokens_per_token(start.config) == 1:
        leave_out("recompute_virtual_tokens", f"{start.name} has no virtual tokens", run)


def _mixes_heads(start: Start) -> bool:
    """Return whether the run's model has weights that mix heads, without reading weights."""
    if isinstance(start.config, IHAConfig):
        return bool(trained_mixing(without_data(start.config)))
    if is_interleaved(start.config):
        return interleaved_kind(start.config) == "iha"
    return start.is_to_interleave


def rope_reach(config: IHAConfig) -> float:
    """Return the longest wavelength of the RoPE table of full attention, in positions.

    No rotation can tell the order of two positions that are further apart.
    """
    return 2 * math.pi / IHARotaryEmbedding(config).inv_freq.min().item()


def _check_reach(config: IHAConfig, length: int) -> None:
    virtual = virtual_tokens_per_token(config) if config.pseudo_positions == "interleaved" else 1
    reach = rope_reach(config)
    theta = config.rope_of("full_attention")["rope_theta"]
    dim = config.head_dim
    if length * virtual > reach and dim > 2:
        # The slowest of the dim / 2 rotations has the frequency theta^(2 / dim - 1).
        needed = theta * (length * virtual / reach) ** (dim / (dim - 2))
        spread = f" x {virtual} pseudo-heads" if virtual > 1 else ""
        raise UserError(
            f"{length} tokens{spread} reach position {length * virtual}, beyond the longest wavelength of RoPE with "
            f"rope_theta={theta:g}, {reach:.0f}: set rope_theta to at least {math.ceil(needed)}, or lower max_length."
        )


def load_base_model(start: Start, config: PreTrainedConfig, run: RunArguments, args: SFTConfig) -> PreTrainedModel:
    """Load the run's base model in `run.dtype` with the `config` that `run_config` returned, or draw its weights.

    Interleave its heads if the recipe asks for it. Raise `UserError`.
    """
    dtype = getattr(torch, run.dtype)
    if run.attn_implementation is not None:
        # The model then rejects a core that is not installed before its weights are read.
        config._attn_implementation = run.attn_implementation
    if start.source is None:
        return random_model(config, args.seed).to(dtype)
    model = load_model(start.source, dtype, config, get_quantization_config(run))
    if start.is_to_interleave:
        _interleave(model, run)
    if run.is_quantized:
        _prepare_quantized(model)
    return model


def _prepare_quantized(model: PreTrainedModel) -> None:
    """Have the mixing learn in float32, and the layers of 4 bits keep their weights as they are."""
    for module in model.modules():
        if weight_names(module):
            module.float()
        # On some CPUs bitsandbytes repacks the weights in an evaluation, and adapters below then learn nothing more.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _interleave(model: PreTrainedModel, run: RunArguments) -> None:
    """Interleave the heads of a plain base model as the recipe says, and print how. Raise `UserError`."""
    options = {
        "layers": run.interleaved_layers,
        "sliding_window": run.interleaved_window,
        "collapse": run.collapse,
        "mixing_scale": run.mixing_scale,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with refusing("num_pseudo_heads, interleaved_layers, interleaved_window", ValueError):
        interleave_heads(model, run.num_pseudo_heads, **given)
    decoder = model.config.get_text_config(decoder=True)
    PartialState().print(
        f"Interleaved {len(decoder.interleaved_layers)} of {decoder.num_hidden_layers} layers, P = "
        f"{run.num_pseudo_heads}, window {decoder.interleaved_window or 'none'}."
    )


def check_packing(model: PreTrainedModel, args: SFTConfig) -> None:
    """Reject an attention core or a model that is not known to keep packed documents apart. Raise `UserError`."""
    if not (args.packing or args.padding_free):
        return
    core = implementation_of_user(model.config._attn_implementation)
    if core not in ISOLATING_CORES and not is_flash_attention_requested(requested_attention_implementation=core):
        raise UserError(
            f"packing with attn_implementation={core!r} is not known to keep documents apart: use one of "
            f"{', '.join(ISOLATING_CORES)} or a flash core, or set packing to false."
        )
    if core not in ("eager", "sdpa") or model.device.type == "meta":
        return  # other cores may need a GPU, on which the model is not yet, and other processes may have the weights
    with refusing("packing", ValueError, TypeError):
        are_apart = keeps_documents_apart(model)
    if not are_apart:
        raise UserError(
            f"packing: documents that are packed would attend to one another in this {model.config.model_type!r} "
            "model, which does not tell them by position_ids: set packing and padding_free to false."
        )


def prepare_tokenizer(start: Start, config: PreTrainedConfig, run: RunArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run, with the recipe's chat template. Raise `UserError`."""
    tokenizer = start.tokenizer
    if start.source is not None:
        tokenizer = load_tokenizer(start.source, vocabulary_of(config))
    if run.chat_template is not None:
        tokenizer.chat_template = run.chat_template
    return tokenizer


def prepare_model(start: Start, config: PreTrainedConfig, run: RunArguments, args: SFTConfig) -> PreTrainedModel:
    """Load the model that a run trains. Raise `UserError`."""
    model = load_base_model(start, config, run, args)
    _apply_training_options(model, run)
    if trained_mixing(model):
        scale = model.config.get_text_config(decoder=True).mixing_scale
        rate = scale * args.learning_rate
        PartialState().print(f"The mixing learns at {scale:g} times learning_rate, {rate:g}.")
    if args.device.type == "cpu":
        half = torch.bfloat16 if args.bf16 else torch.float16
        note_slow_dtype(half if args.bf16 or args.fp16 else model.dtype)
    _warn_of_rounded_steps(model, run)
    if start.source is None:
        vocabulary = f"{len(start.tokenizer):,} tokens of {run.tokenizer}" if run.tokenizer else "single bytes"
        PartialState().print(
            f"Random weights: {run.preset}, {model.num_parameters():,} parameters, seed {args.seed}, {vocabulary}."
        )
    check_packing(model, args)
    return model


def _apply_training_options(model: PreTrainedModel, run: RunArguments) -> None:
    """Set at which rate the mixing learns, and whether virtual tokens are made again. Raise `UserError`."""
    decoder = model.config.get_text_config(decoder=True)
    if run.mixing_scale not in (None, getattr(decoder, "mixing_scale", None)):
        with refusing("mixing_scale", ValueError):
            set_mixing_scale(model, run.mixing_scale)
    if run.recompute_virtual_tokens is not None:
        decoder.recompute_virtual_tokens = run.recompute_virtual_tokens


def _warn_of_rounded_steps(model: PreTrainedModel, run: RunArguments) -> None:
    """Print a warning where weights in half precision are trained, which round small steps away."""
    if model.dtype.itemsize == 4 or run.is_quantized:  # whose adapters are not merged
        return
    least = torch.finfo(model.dtype).eps / 4  # half of the distance of two numbers below 1
    what = f"in {run.dtype} weights a step"
    if run.use_peft:
        what = f"the final model has the adapters merged into {run.dtype} weights, where a change"
    PartialState().print(
        f"Warning: {what} below {least:.1g} times a weight is rounded away: set dtype to float32, and bf16 to true "
        "for a GPU."
    )


def stop_at_end_of_turn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have `model` stop at the token with which its chat template ends the assistant's last turn, or print a note."""
    answer = "This is an answer."
    turns = [{"role": "user", "content": "text"}, {"role": "assistant", "content": answer}]
    with rendering("a question and its answer"):
        _, found, after_answer = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)
    # Many tokenizers have added tokens for runs of blanks and newlines, which answers contain.
    added = {token for text, token in tokenizer.get_added_vocab().items() if text.strip()}
    ends = [token for token in tokenizer(after_answer, add_special_tokens=False)["input_ids"] if token in added]
    if not found or not ends:
        PartialState().print(
            "Note: the chat template ends a turn with no special token, so the final model may go on after it."
        )
        return
    known = end_tokens(model.generation_config)
    if ends[0] not in known:
        model.generation_config.eos_token_id = [*known, ends[0]]


def lora_config(run: RunArguments, model: PreTrainedModel) -> LoraConfig | None:
    """Return the adapters that `run` asks for, or None.

    The modules that only this kind of attention has (`own_modules`) are trained in full next to the adapters. Raise
    `UserError` for a module that the model does not have.
    """
    config = get_peft_config(run)
    if config is None:
        return None
    modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = config.target_modules or {"all-linear"}
    targets = {targets} if isinstance(targets, str) else set(targets)
    for key, names in (("lora_target_modules", targets), ("lora_modules_to_save", config.modules_to_save or ())):
        unknown = {*names} - modules - {"all-linear"}  # PEFT ignores them silently
        if unknown:
            raise UserError(f"{key}: the model has no module named {', '.join(sorted(unknown))}.")
    config.target_modules = "all-linear" if targets == {"all-linear"} else targets
    config.modules_to_save = [*own_modules(model), *(config.modules_to_save or ())] or None
    return config
