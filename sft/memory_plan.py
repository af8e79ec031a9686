"""Plan what a training run takes in memory on each device, and refuse a run that cannot fit before it starts.

`python -m sft.memory_plan --config RECIPE` prints the plan of a recipe and of other layouts. It reads the model's
configuration only. research/benchmarks/training_plan.py compares the plan with the peaks of real processes.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, replace

from iha_io.command_io import UserError, run_cli
from sft.arguments import RecipeParser, RunArguments, answer_help


USAGE = """python -m sft.memory_plan --config sft/recipes/NAME/sft.yaml [--preset NAME] [--key value ...]

Print what a recipe takes in memory on each of one or several GPUs or, with --use_cpu true, CPUs, whatever this machine
has. The model is model_name_or_path's, of which only config.json is read, or the preset.

example:
  python -m sft.memory_plan --config sft/recipes/pretrain/sft.yaml --preset paper-2.4b-iha
"""

if __name__ == "__main__":
    run_cli(lambda: answer_help(USAGE))  # before the imports below, which take seconds

import psutil
import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from trl import SFTConfig
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from configuration_iha import PRESETS
from kind_facts import companion_of
from kind_facts.model_cost import attention, ffn, norm
from modeling_iha import IHAConfig
from modeling_iha.interleaving import block_size


beats_a_mask = lambda length, window, varlen: length - window > 128  # noqa: E731
recomputes = lambda form, virtual: False  # noqa: E731
from sft.base_model import interleaves, lora_config, run_config


GB = 1e9
# Columns of the vocabulary in a tile of TRL's loss, which it calls _CHUNKED_LOGPROB_CHUNK_SIZE.
VOCABULARY_CHUNK = 32768
# Bytes for each entry of a tile that TRL's loss holds where it has no Triton kernel: seven float32 and a mask.
TILE_BYTES = 29
# What the allocator of a CPU takes at most beyond the plan, by peaks of sft/train.py (docs/LOG.md).
ALLOCATOR = 1.25
# The Trainer's name of an optimiser -> its states of a trained weight, and the bytes of each, or None for the weight's
# own type. bitsandbytes keeps float32, or 8 bits and a float32 scale for each 256 entries.
STATES: dict[str, tuple[int, float | None]] = {
    "adafactor": (0, None),  # a row and a column of each matrix
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), (2, None)),
    "paged_adamw_32bit": (2, 4),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), (2, 1 + 4 / 256)),
}


@dataclass(frozen=True)
class Layout:
    """Describe the devices of a run, one for each process."""

    devices: int = 1
    sharded: bool = False  # by FSDP2 or ZeRO-3: weights, gradients and optimiser; under DDP each device holds all
    sequence_parallel: int = 1  # devices that share a sequence (Ulysses)

    def __str__(self) -> str:
        if self.devices == 1:
            return "1 device"
        name = "FSDP2" if self.sharded else "DDP"
        ulysses = f", {self.sequence_parallel} share a sequence" if self.sequence_parallel > 1 else ""
        return f"{self.devices} devices, {name}{ulysses}"


@dataclass(frozen=True)
class Parameters:
    """Hold the bytes of a model's parameters, adapters included, and the numbers of some."""

    all: int
    trained: int
    layer: int  # the largest one
    tables: int  # embedding and head
    trained_number: int
    embedding_number: int  # of trained weights
    linear_number: int  # of weights that autocast copies
    dropped_number: int  # of a token's inputs to adapters with dropout


@dataclass(frozen=True)
class Setting:
    """Hold what the memory of a run depends on."""

    config: IHAConfig
    parameters: Parameters
    layout: Layout
    batch: int  # rows on a device at a time
    tokens: int  # of a row
    checkpointing: bool  # keeps the input of each layer only, and computes the rest once more
    offloading: bool  # moves what is kept from a GPU to the host
    attention_form: str | None  # as in `IHAModel.attention_form`
    autocast: bool  # to a type of two bytes, by mixed precision
    weight_bytes: int  # of a weight of the base model
    optimizer: str  # the Trainer's name of it
    on_cpu: bool

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of a value that a matrix product computes."""
        return 2 if self.autocast else self.weight_bytes

    @property
    def casts(self) -> bool:
        """Return whether autocast copies weights and inputs of linear maps."""
        return self.autocast and self.weight_bytes == 4

    @property
    def half_on_gpu(self) -> bool:
        """Return whether a GPU computes in half precision."""
        return not self.on_cpu and self.compute_bytes == 2

    @property
    def device_tokens(self) -> int:
        """Return the tokens on a device at a time."""
        return self.batch * self.tokens // self.layout.sequence_parallel


@dataclass(frozen=True)
class Memory:
    """Hold the bytes on one device."""

    weights: float  # with their copies in the type of computation
    gradients: float  # with DDP's buckets
    optimizer: float
    activations: float  # what autograd keeps from the forward to the backward
    working: float  # the most that the loss, or the backward of one layer, needs beside that

    @property
    def total(self) -> float:
        """Return the peak of a step that accumulates gradients; it may be `gradients` lower without accumulation."""
        return sum(astuple(self))


def count_parameters(config: PreTrainedConfig, run: RunArguments) -> Parameters:
    """Count the parameters of the model that a run trains, which is built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, run.dtype))
        if adapters := lora_config(run, model):
            get_peft_model(model, adapters)  # changes `model` in place

    def size(module: torch.nn.Module) -> int:
        return sum(parameter.nbytes for parameter in module.parameters())

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    linear = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    adapted = [module for module in model.model.layers.modules() if isinstance(module, LoraLayer)]
    return Parameters(
        all=size(model),
        trained=sum(parameter.nbytes for parameter in trained),
        layer=max(map(size, model.model.layers)),
        tables=size(model) - size(model.model.layers),
        trained_number=sum(map(torch.Tensor.numel, trained)),
        embedding_number=sum(
            weight.numel() for weight in model.get_input_embeddings().parameters() if weight.requires_grad
        ),
        linear_number=sum(module.weight.numel() for module in linear),
        dropped_number=sum(module.in_features for module in adapted) if run.lora_dropout else 0,
    )


def goes_in_blocks(setting: Setting, virtual: int, layer_type: str) -> bool:
    """Return whether a layer of `virtual` tokens a token attends by blocks of queries.

    A window on SDPA does so, except where a GPU takes `varlen_attn` (`has_varlen` in modeling_iha/interleaving.py).
    """
    config = setting.config
    has_varlen = (
        setting.half_on_gpu and not config.attention_dropout and config.head_dim % 8 == 0 and config.head_dim <= 256
    )
    if layer_type != "sliding_attention" or config._attn_implementation != "sdpa" or has_varlen:
        return False
    return beats_a_mask(setting.tokens * virtual, config.sliding_window * virtual, varlen=False)


def layer_bytes(setting: Setting, kind: str, layer_type: str) -> tuple[float, float]:
    """Return what autograd keeps of a layer, and what its backward needs beside that, on one device."""
    config, form = setting.config, "eager" if setting.config._attn_implementation == "eager" else "sdpa"
    tokens = setting.device_tokens
    compute, residual = setting.compute_bytes, setting.weight_bytes
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    virtual = config.num_pseudo_heads if kind == "iha" else 1

    def kept(form: str) -> float:
        # The cost model counts one sequence, and sequences have equal costs.
        return attention(config, kind, layer_type, setting.tokens, form).kept * tokens / setting.tokens * compute

    of_attention = kept(form)
    query, key = tokens * virtual * heads * d, tokens * virtual * groups * d
    attention_working = (2 * query + 2 * key) * compute
    if goes_in_blocks(setting, virtual, layer_type):
        # The outputs of the blocks are kept, and their concatenation. The gradients of keys and values are of blocks,
        # which overlap, of one sequence at a time.
        window = config.sliding_window * virtual
        of_attention += query * compute
        attention_working = (2 * query + 2 * key + 2 * key / setting.batch * window / block_size(window)) * compute
    elif form == "eager":
        of_attention += tokens * virtual * setting.tokens * virtual * heads * 4
        attention_working += of_attention
    elif setting.half_on_gpu:
        # The backward of FlashAttention-2 sums the gradients of the queries in float32.
        attention_working += query * 4
    if recomputes(setting.attention_form, virtual):
        attention_working += of_attention
        of_attention = kept("base")
    of_ffn, of_norm = ffn(config, tokens).kept * compute, norm(config, tokens).kept / 2 * (4 + residual)
    if setting.casts:
        # Each of several linear maps has a copy of the same input.
        copies = 2 + config.gated_mlp
        of_ffn += copies * tokens * config.hidden_size * compute
    # Adapters are in float32. Dropout keeps its noise in place of the input, and linear maps the dropped input.
    dropped = tokens * setting.parameters.dropped_number / config.num_hidden_layers
    of_adapters = dropped * (4 - setting.weight_bytes + (2 if setting.autocast else 4))

    # Gradients of the inner width, or of the (virtual) queries, keys, values and output.
    ffn_working = (3 if config.gated_mlp else 2) * tokens * config.intermediate_size * compute
    return of_attention + of_ffn + of_adapters + 2 * of_norm, max(ffn_working, attention_working - of_ffn)


def loss_bytes(setting: Setting) -> float:
    """Return what TRL's loss holds: a tile of logits, and gradients of hidden states and head in float32."""
    config, tokens = setting.config, setting.device_tokens
    rows, columns = min(tokens, TOKEN_CHUNK_SIZE), min(config.vocab_size, VOCABULARY_CHUNK)
    if setting.on_cpu:
        tile = rows * columns * (setting.compute_bytes + TILE_BYTES)
    else:
        tile = rows * VOCABULARY_CHUNK * setting.compute_bytes
    return tile + (tokens + config.vocab_size) * config.hidden_size * 4


def state_bytes(setting: Setting, trained: float) -> float:
    """Return the bytes of the optimiser's states for trained weights of `trained` bytes."""
    parameters, (states, size) = setting.parameters, STATES[setting.optimizer]
    if size is None:
        return states * trained
    # The Trainer keeps those of an embedding in float32.
    return states * (parameters.trained_number * size + parameters.embedding_number * (4 - size))


def estimate(setting: Setting) -> Memory:
    """Compute the memory of a training step on each device."""
    config, parameters, layout = setting.config, setting.parameters, setting.layout
    if layout.sharded:
        # Mixed precision keeps trained weights in float32 (accelerate). Two layers and the tables are whole at a time.
        trained = 4 * parameters.trained_number if setting.autocast else parameters.trained
        whole = (2 * parameters.layer + parameters.tables) / setting.weight_bytes * setting.compute_bytes
        weights = (parameters.all - parameters.trained + trained) / layout.devices + whole
        gradients = trained / layout.devices + whole * (parameters.trained / parameters.all)
        optimizer = state_bytes(setting, trained) / layout.devices
    else:
        weights = parameters.all + (parameters.linear_number * setting.compute_bytes if setting.casts else 0)
        gradients = parameters.trained * (2 if layout.devices > 1 else 1)
        optimizer = state_bytes(setting, parameters.trained)

    kinds = list(zip(config.attention_kinds, config.layer_types))
    layers = {kind: layer_bytes(setting, *kind) for kind in set(kinds)}
    tokens = setting.device_tokens
    if setting.checkpointing:
        kept = len(kinds) * tokens * config.hidden_size * setting.weight_bytes
        backward = max(map(sum, layers.values()))
    else:
        kept = sum(layers[kind][0] for kind in kinds)
        backward = max(working for _, working in layers.values())
    if setting.offloading and not setting.on_cpu:
        kept = 0
    # Rotary tables; last norm, and its output without the last token.
    kept += tokens * (4 * config.head_dim + 3 * config.hidden_size) * setting.weight_bytes
    return Memory(weights, gradients, optimizer, kept, max(backward, loss_bytes(setting)))


def known_config(config: PreTrainedConfig) -> IHAConfig | None:
    """Return the configuration to compute with, or None for a model whose memory is not known.

    An IHAConfig needs a cost function for each of its kinds; a Llama has that of the same model by this package.
    """
    if type(config) is LlamaConfig:
        fields = {name: value for name, value in config.to_dict().items() if hasattr(IHAConfig, name)}
        config = IHAConfig(**{**fields, "attention_kinds": "mha"})
    if not isinstance(config, IHAConfig) or not all(companion_of(kind).cost for kind in set(config.attention_kinds)):
        return None
    return config


def launched_layout() -> Layout:
    """Read the devices of this run from the environment variables that `accelerate launch` sets.

    What shards less than weights, gradients and optimiser is planned as DDP, which takes more.
    """
    devices = int(os.environ.get("WORLD_SIZE", 1))
    fsdp, deepspeed = (os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED"))
    sharded = (fsdp and os.environ.get("FSDP_RESHARD_AFTER_FORWARD") != "false") or (
        deepspeed and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    )
    return Layout(devices, sharded and devices > 1, int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", 1)))


def run_setting(config: PreTrainedConfig, run: RunArguments, args: SFTConfig) -> Setting | None:
    """Return what a run's memory depends on, or None for a model or an optimiser whose memory is not known."""
    known, optimizer = None if interleaves(config, run) else known_config(config), args.optim.value
    if known is None or optimizer not in STATES:
        return None
    known = deepcopy(known)
    known._attn_implementation = run.attn_implementation or "sdpa"
    return Setting(
        config=known,
        parameters=count_parameters(config, run),
        layout=launched_layout(),
        batch=args.per_device_train_batch_size,
        tokens=args.max_length or known.max_position_embeddings,
        checkpointing=args.gradient_checkpointing,
        offloading=args.activation_offloading,
        attention_form=run.attention_form,
        autocast=args.bf16 or args.fp16,
        weight_bytes=getattr(torch, run.dtype).itemsize,
        optimizer=optimizer,
        on_cpu=args.device.type == "cpu",
    )


def no_plan(config: PreTrainedConfig, args: SFTConfig) -> str:
    """Say for what `run_setting` knows no memory."""
    costless = [kind for kind in getattr(config, "attention_kinds", ()) if companion_of(kind).cost is None]
    missing = f" The cost of kind {costless[0]!r} is missing in kind_facts/{costless[0]}.py." if costless else ""
    return (
        f"Note: what this run takes in memory is not planned. Plans are for 'iha' and plain 'llama' models with optim "
        f"{', '.join(STATES)}; this is {config.model_type!r} with {args.optim.value}.{missing}"
    )


def available_memory(args: SFTConfig) -> float:
    """Return the bytes of this process's GPU, or its share of the RAM that is free now."""
    if args.device.type == "cuda":
        return torch.cuda.get_device_properties(args.device).total_memory
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def alternatives(setting: Setting, config: PreTrainedConfig, run: RunArguments) -> dict[str, Setting]:
    """Return the run as it is, then with one change at a time, in the order in which to try them."""
    changes: dict[str, dict] = {str(setting.layout): {}}
    if setting.batch > 1:
        changes[f"per_device_train_batch_size 1, accumulated {setting.batch} times"] = {"batch": 1}
    known = setting.config
    title = "no gradient_checkpointing" if setting.checkpointing else "gradient_checkpointing"
    changes[title] = {"checkpointing": not setting.checkpointing}
    interleaved = "iha" in known.attention_kinds and known.num_pseudo_heads > 1
    if interleaved and known._attn_implementation == "sdpa" and not setting.checkpointing:
        form = "virtual" if setting.attention_form == "base" else "base"
        changes[f"attention_form {form}"] = {"attention_form": form}
    if not run.use_peft:
        changes["use_peft (LoRA)"] = {"parameters": count_parameters(config, replace(run, use_peft=True))}
    for layout in (Layout(8), Layout(8, True), Layout(64, True), Layout(8, True, 8), Layout(64, True, 8)):
        if layout != setting.layout:
            changes[str(layout)] = {"layout": layout}
    for part in (2, 4, 8):
        if tokens := setting.tokens // part:
            changes[f"max_length {tokens}"] = {"tokens": tokens}
    return {title: replace(setting, **fields) for title, fields in changes.items()}


def table(settings: dict[str, Setting]) -> str:
    """Return the plans in gigabytes (1e9 bytes) on each device, one line to a setting."""
    columns = ("weights", "gradients", "optimizer", "activations", "working", "total")
    lines = [f"{'GB on each device':<50}{''.join(f'{name:>12}' for name in columns)}"]
    for title, setting in settings.items():
        memory = estimate(setting)
        lines.append(f"{title:<50}{''.join(f'{value / GB:>12.2f}' for value in (*astuple(memory), memory.total))}")
    return "\n".join(lines)


def check_memory(config: PreTrainedConfig, run: RunArguments, args: SFTConfig) -> None:
    """Print what the run will take on each device and what there is, and refuse a run that needs more.

    The error names the first of the `alternatives` that fits.
    """
    say = args.distributed_state.print
    setting = run_setting(config, run, args)
    if setting is None:
        say(no_plan(config, args))
        return
    memory, limit = estimate(setting), available_memory(args) if run.memory_gb is None else run.memory_gb * GB
    # On a CPU, what is free now is beside what this process holds already.
    reserve = ALLOCATOR if setting.on_cpu else 1
    needed = memory.total * reserve
    say(table({f"this run: {setting.layout}": setting}))
    say(f"Limit: {limit / GB:.2f} GB on each device (memory_gb states another).")
    if needed <= limit:
        return
    # accelerate shards on accelerators only.
    others = {
        title: other
        for title, other in alternatives(setting, config, run).items()
        if not (other.on_cpu and other.layout.sharded)
    }
    say(table(others))
    fitting = (f"it would fit with {title}" for title, it in others.items() if estimate(it).total * reserve <= limit)
    advice = next(fitting, "no change that is known here makes it fit by itself: combine several, or a smaller model")
    raise UserError(
        f"The run needs {needed / GB:.1f} GB on each device and there are {limit / GB:.1f} GB: {advice}. "
        "(memory_gb states another limit.)"
    )


class PlanParser(RecipeParser):
    """Take a recipe for a GPU on any machine: without one, TRL takes bf16 only with use_cpu."""

    def fit_to_device(self, values: Namespace) -> None:
        values.planned_on_cpu, values.use_cpu = values.use_cpu, True


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of the command line."""
    parser = PlanParser(SFTConfig, USAGE)
    parser.add_argument("--preset", choices=PRESETS, help="plan a model of this preset")
    run, args, others = parser.parse(sys.argv[1:] if argv is None else argv)
    config = None
    if others.preset is not None:
        # The window of the paper's schedule follows the length.
        length = run.max_position_embeddings
        config = IHAConfig.from_preset(others.preset, **({"max_position_embeddings": length} if length else {}))
    config = run_config(run, args, config)
    setting = run_setting(config, run, args)
    if setting is None:
        raise UserError(no_plan(config, args))
    setting = replace(setting, on_cpu=others.planned_on_cpu)
    print(f"{setting.batch} x {setting.tokens} tokens to a {'CPU' if setting.on_cpu else 'GPU'}")
    print(table(alternatives(setting, config, run)))


if __name__ == "__main__":
    run_cli(main)
