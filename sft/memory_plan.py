"""What a training run takes in memory, on each device, computed before it starts; a run that cannot fit is refused.

`python -m sft.memory_plan --config RECIPE` prints the plan of a recipe and of other layouts. It reads the model's
configuration only. benchmarks/training_plan.py measures how far the plan is from the peaks of real processes.
"""

import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from itertools import combinations

from common.command_io import UserError, run_cli
from sft.run_arguments import RunArguments, answer_help


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
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from trl import SFTConfig
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE

from configuration_iha import PRESETS
from kinds import companion_of
from kinds.model_cost import attention, ffn, norm
from modeling_iha import IHAConfig
from modeling_iha.attention_forms import recomputes
from modeling_iha.window_blocks import beats_a_mask, block_size
from sft.arguments import RecipeParser
from sft.context import run_config
from sft.model import lora_config


GB = 1e9
# Columns of the vocabulary in a tile of TRL's loss, which it calls _CHUNKED_LOGPROB_CHUNK_SIZE.
VOCABULARY_CHUNK = 32768
# Bytes for each entry of a tile that TRL's loss holds where it has no Triton kernel: seven float32 and a mask.
TILE_BYTES = 29
# What a process on a CPU takes beyond its tensors, at most (peaks of sft/train.py, docs/LOG.md): the allocator's share
# of the plan, and what libraries load after the plan.
ALLOCATOR, LOADED_LATER = 1.25, 0.15 * GB
# Bytes of optimiser state for each byte of a trained weight, where it is not AdamW's two moments of the weight's type.
STATE_BYTES = {"sgd": 0, "adafactor": 0, "lion_32bit": 1, "adamw_8bit": 0.5, "adamw_bnb_8bit": 0.5}


@dataclass(frozen=True)
class Layout:
    """The devices of a run.

    Attributes:
        devices: processes, one device each.
        sharded: whether weights, gradients and optimiser are shared out among them (FSDP2, ZeRO-3), or each holds all
            (DDP).
        sequence_parallel: devices that share a sequence (Ulysses).
    """

    devices: int = 1
    sharded: bool = False
    sequence_parallel: int = 1

    def __str__(self) -> str:
        if self.devices == 1:
            return "1 device"
        name = "FSDP2" if self.sharded else "DDP"
        ulysses = f", {self.sequence_parallel} share a sequence" if self.sequence_parallel > 1 else ""
        return f"{self.devices} devices, {name}{ulysses}"


@dataclass(frozen=True)
class Parameters:
    """Of a model's parameters: bytes of all, of those that are trained, of the largest layer, and of the embedding and
    head; and `linear`, the number of those in linear layers, which autocast copies."""

    all: int
    trained: int
    layer: int
    tables: int
    linear: int


@dataclass(frozen=True)
class Setting:
    """What the memory of a run depends on.

    Attributes:
        config: of the model, with its attention core.
        parameters: of the model, adapters included.
        layout: its devices.
        batch, tokens: rows on a device at a time, and tokens to a row.
        checkpointing: whether only the input of each layer is kept, and the rest computed once more.
        offloading: whether what is kept is moved from a GPU to the host.
        attention_form: as in `IHAModel.attention_form`.
        autocast: whether the type of computation, of two bytes, is not that of the weights.
        weight_bytes: of a weight of the base model.
        optimizer: the Trainer's name of it.
        on_cpu: whether the devices are CPUs.
    """

    config: IHAConfig
    parameters: Parameters
    layout: Layout
    batch: int
    tokens: int
    checkpointing: bool
    offloading: bool
    attention_form: str | None
    autocast: bool
    weight_bytes: int
    optimizer: str
    on_cpu: bool

    @property
    def compute_bytes(self) -> int:
        """Of a value that a matrix product computes."""
        return 2 if self.autocast else self.weight_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: with their copies in the type of computation.
        gradients: with DDP's buckets.
        optimizer: its states.
        activations: what autograd keeps from the forward to the backward.
        working: what is held beside that at a time, for the loss or for the backward of one layer.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """The peak of a step that accumulates gradients; without accumulation the peak is up to `gradients` lower."""
        return sum(astuple(self))


def count_parameters(config: PreTrainedConfig, run: RunArguments) -> Parameters:
    """Of the model that a run trains, with its adapters; the model is built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, run.dtype))
        if adapters := lora_config(run, model):
            get_peft_model(model, adapters)  # changes `model` in place

    def size(module: torch.nn.Module) -> int:
        return sum(parameter.nbytes for parameter in module.parameters())

    linear = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    return Parameters(
        all=size(model),
        trained=sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
        layer=max(map(size, model.model.layers)),
        tables=size(model) - size(model.model.layers),
        linear=sum(module.weight.numel() for module in linear),
    )


def goes_in_blocks(setting: Setting, virtual: int, layer_type: str) -> bool:
    """Return whether a layer of `virtual` tokens a token attends by blocks of queries, which copy keys and values: a
    window on SDPA, but on a GPU in half precision."""
    config, half_on_gpu = setting.config, not setting.on_cpu and setting.compute_bytes == 2
    if layer_type != "sliding_attention" or config._attn_implementation != "sdpa" or half_on_gpu:
        return False
    return beats_a_mask(setting.tokens * virtual, config.sliding_window * virtual, varlen=False)


def layer_bytes(setting: Setting, kind: str, layer_type: str) -> tuple[float, float]:
    """Return what autograd keeps of a layer, and what its backward needs beside that, on one device."""
    config, form = setting.config, "eager" if setting.config._attn_implementation == "eager" else "sdpa"
    tokens = setting.batch * setting.tokens // setting.layout.sequence_parallel
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
        # Keys and values of the blocks, which overlap; of a single row they are kept as views, unless they are
        # repeated for each head of a group.
        window = config.sliding_window * virtual
        blocked = 2 * query * (1 + (window - 1) / block_size(window))
        of_attention += (blocked - 2 * key) * compute * (setting.batch > 1 or groups < heads)
        attention_working = (2 * query + blocked) * compute
    elif form == "eager":
        of_attention += tokens * virtual * setting.tokens * virtual * heads * 4
        attention_working += of_attention
    if recomputes(setting.attention_form, virtual):
        attention_working += of_attention
        of_attention = kept("base")
    of_ffn, of_norm = ffn(config, tokens).kept * compute, norm(config, tokens).kept / 2 * (4 + residual)
    if setting.autocast:
        # Each of several linear maps has a copy of the same input.
        copies = 2 + config.gated_mlp
        of_ffn += copies * tokens * config.hidden_size * compute

    # Gradients of the inner width, or of the (virtual) queries, keys, values and output.
    ffn_working = (3 if config.gated_mlp else 2) * tokens * config.intermediate_size * compute
    return of_attention + of_ffn + 2 * of_norm, max(ffn_working, attention_working - of_ffn)


def loss_bytes(setting: Setting) -> float:
    """What TRL's loss holds: a tile of logits, and the gradients of the hidden states and of the head in float32."""
    config, tokens = setting.config, setting.batch * setting.tokens // setting.layout.sequence_parallel
    rows, columns = min(tokens, TOKEN_CHUNK_SIZE), min(config.vocab_size, VOCABULARY_CHUNK)
    if setting.on_cpu:
        tile = rows * columns * (setting.compute_bytes + TILE_BYTES)
    else:
        tile = rows * VOCABULARY_CHUNK * setting.compute_bytes
    return tile + (tokens + config.vocab_size) * config.hidden_size * 4


def estimate(setting: Setting) -> Memory:
    """The memory of a training step on each device (see the attributes of `Memory`)."""
    config, parameters, layout = setting.config, setting.parameters, setting.layout
    states = STATE_BYTES.get(setting.optimizer, 2)
    if layout.sharded:
        # Trained weights are kept in float32 under mixed precision. Two layers and the tables are whole at a time.
        widened = 4 / setting.weight_bytes if setting.autocast else 1
        whole = (2 * parameters.layer + parameters.tables) / setting.weight_bytes * setting.compute_bytes
        weights = parameters.all * widened / layout.devices + whole
        gradients = parameters.trained * widened / layout.devices + whole * (parameters.trained / parameters.all)
        optimizer = parameters.trained * widened * states / layout.devices
    else:
        weights = parameters.all + (parameters.linear * setting.compute_bytes if setting.autocast else 0)
        gradients = parameters.trained * (2 if layout.devices > 1 else 1)
        optimizer = parameters.trained * states

    kinds = list(zip(config.attention_kinds, config.layer_types))
    layers = {kind: layer_bytes(setting, *kind) for kind in set(kinds)}
    tokens = setting.batch * setting.tokens // layout.sequence_parallel
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
    """The configuration that the plan computes with: an IHAConfig whose mechanisms all have a cost function; for a
    Llama, that of the same model by this package; or None."""
    if type(config) is LlamaConfig:
        fields = {name: value for name, value in config.to_dict().items() if hasattr(IHAConfig, name)}
        config = IHAConfig(**{**fields, "attention_kinds": "mha"})
    if not isinstance(config, IHAConfig) or not all(companion_of(kind).cost for kind in set(config.attention_kinds)):
        return None
    return config


def launched_layout() -> Layout:
    """The devices that `accelerate launch` has given this run, from the environment variables that it sets."""
    devices = int(os.environ.get("WORLD_SIZE", 1))
    sharded = any(os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED"))
    return Layout(devices, sharded and devices > 1, int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", 1)))


def run_setting(config: PreTrainedConfig, run: RunArguments, args: SFTConfig) -> Setting | None:
    """What a run's memory depends on; None for a model whose memory is not known."""
    known = known_config(config)
    if known is None:
        return None
    known = deepcopy(known)
    known._attn_implementation = run.attn_implementation or "sdpa"
    weight_bytes = getattr(torch, run.dtype).itemsize
    return Setting(
        config=known,
        parameters=count_parameters(config, run),
        layout=launched_layout(),
        batch=args.per_device_train_batch_size,
        tokens=args.max_length or known.max_position_embeddings,
        checkpointing=args.gradient_checkpointing,
        offloading=args.activation_offloading,
        attention_form=run.attention_form,
        autocast=(args.bf16 or args.fp16) and weight_bytes == 4,
        weight_bytes=weight_bytes,
        optimizer=str(getattr(args.optim, "value", args.optim)),
        on_cpu=args.device.type == "cpu",
    )


def available_memory(args: SFTConfig) -> float:
    """Bytes that a process of this run can have: of its GPU, or its share of the memory that is free now."""
    if args.device.type == "cuda":
        return torch.cuda.get_device_properties(args.device).total_memory
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def smallest_change(setting: Setting, config: PreTrainedConfig, run: RunArguments, limit: float) -> str | None:
    """What to change for a run to fit into `limit` bytes, or None. Changes are ordered from those that leave what is
    learned as it is to a shorter length; combinations by the farthest of their changes, then by their number."""
    options: list[tuple[str, dict]] = []
    if setting.batch > 1:
        words = f"per_device_train_batch_size 1 with {setting.batch} times the gradient_accumulation_steps"
        options.append((words, {"batch": 1}))
    if not setting.checkpointing:
        options.append(("gradient_checkpointing", {"checkpointing": True}))
    if not run.use_peft:
        options.append(("use_peft (LoRA)", {"parameters": count_parameters(config, replace(run, use_peft=True))}))
    for devices in (2, 4, 8, 16, 32, 64, 128):
        if devices > setting.layout.devices or not setting.layout.sharded:
            options.append((f"FSDP2 on {devices} devices", {"layout": Layout(devices, sharded=True)}))
    for devices in (8, 16, 32, 64, 128):
        if not setting.on_cpu and devices > setting.layout.devices:
            words = f"FSDP2 on {devices} devices with sequence parallelism over 8"
            options.append((words, {"layout": Layout(devices, True, 8)}))
    for part in (2, 4, 8, 16, 32, 64):
        if setting.tokens // part:
            options.append((f"max_length {setting.tokens // part}", {"tokens": setting.tokens // part}))
    sets = (chosen for count in (1, 2, 3) for chosen in combinations(range(len(options)), count))
    for chosen in sorted(sets, key=lambda chosen: (chosen[-1], len(chosen))):
        fields = {name: value for index in chosen for name, value in options[index][1].items()}
        if len(fields) == len(chosen) and estimate(replace(setting, **fields)).total <= limit:
            return " and ".join(options[index][0] for index in chosen)
    return None


def table(rows: dict[str, Memory]) -> str:
    """Gigabytes (1e9 bytes) on each device, one line to a row."""
    columns = ("weights", "gradients", "optimizer", "activations", "working", "total")
    lines = [f"{'GB on each device':<50}{''.join(f'{name:>12}' for name in columns)}"]
    for title, memory in rows.items():
        lines.append(f"{title:<50}{''.join(f'{value / GB:>12.2f}' for value in (*astuple(memory), memory.total))}")
    return "\n".join(lines)


def process_line(memory: Memory, held: int) -> str:
    """Return what a process on a CPU takes in all, of which it holds `held` bytes before the model is loaded."""
    total = memory.total * ALLOCATOR + held + LOADED_LATER
    return (
        f"The process takes up to {total / GB:.2f} GB: {(held + LOADED_LATER) / GB:.2f} GB for the libraries, the plan, and "
        f"{ALLOCATOR - 1:.0%} of it for the allocator."
    )


def check_memory(config: PreTrainedConfig, run: RunArguments, args: SFTConfig) -> None:
    """Prints what the run will take on each device. Raises `UserError` when that is more than there is, naming the
    smallest change after which it fits."""
    setting = run_setting(config, run, args)
    if setting is None:
        args.distributed_state.print(f"No memory plan: a {config.model_type!r} model, or a mechanism without a cost.")
        return
    memory, limit = estimate(setting), available_memory(args) if run.memory_gb is None else run.memory_gb * GB
    args.distributed_state.print(table({f"this run: {setting.layout}": memory}))
    needed = memory.total
    if setting.on_cpu:
        # What is free now is beside what this process holds already.
        args.distributed_state.print(process_line(memory, psutil.Process().memory_info().rss))
        needed *= ALLOCATOR
    if needed > limit:
        change = smallest_change(setting, config, run, limit * memory.total / needed)
        advice = (
            f"it would fit with {change}"
            if change
            else "no change that is known here makes it fit: take a smaller model"
        )
        raise UserError(
            f"The run needs {needed / GB:.1f} GB on each device and there are {limit / GB:.1f} GB: {advice}. "
            "(memory_gb states another limit.)"
        )


def layouts(setting: Setting) -> dict[str, Memory]:
    """The plan of a run, and of the same run on other devices and in other forms."""
    forms = {"": setting}
    other = not setting.checkpointing
    forms[f"{'with' if other else 'without'} checkpointing"] = replace(setting, checkpointing=other)
    if "iha" in setting.config.attention_kinds and not setting.checkpointing:
        form = "virtual" if setting.attention_form == "base" else "base"
        forms[f"attention_form {form}"] = replace(setting, attention_form=form)
    rows = {" ".join(filter(None, (f"{setting.layout}", name))): estimate(form) for name, form in forms.items()}
    for layout in (Layout(8), Layout(8, True), Layout(64, True), Layout(8, True, 8), Layout(64, True, 8)):
        if layout != setting.layout:
            rows[str(layout)] = estimate(replace(setting, layout=layout))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of the command line. Raises `UserError`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    config = name = None
    if "--preset" in argv:
        place = argv.index("--preset")
        name = argv[place + 1] if place + 1 < len(argv) else ""
        if name not in PRESETS:
            raise UserError(f"--preset {name}: expected one of {', '.join(PRESETS)}.")
        del argv[place : place + 2]
    # A recipe may be planned on another machine than it runs on: without a GPU, TRL takes bf16 only with use_cpu.
    on_cpu = "--use_cpu" in argv and argv[argv.index("--use_cpu") + 1 :][:1] == ["true"]
    run, args = RecipeParser(SFTConfig, USAGE).parse([*argv, "--use_cpu", "true"])
    if name is not None:
        # The window of the paper's schedule follows the length.
        length = (
            {} if run.max_position_embeddings is None else {"max_position_embeddings": run.max_position_embeddings}
        )
        config = IHAConfig.from_preset(name, **length)
    config = run_config(run, args, config)
    setting = run_setting(config, run, args)
    if setting is None:
        raise UserError(f"No memory plan for a {config.model_type!r} model: expected 'iha' or 'llama'.")
    setting = replace(setting, on_cpu=on_cpu)
    print(f"{setting.batch} x {setting.tokens} tokens to a {'CPU' if on_cpu else 'GPU'}")
    rows = layouts(setting)
    print(table(rows))
    if on_cpu:
        print(process_line(next(iter(rows.values())), psutil.Process().memory_info().rss))


if __name__ == "__main__":
    run_cli(main)
