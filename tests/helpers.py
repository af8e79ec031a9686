"""Build small models and inputs for all tests, and compare relative to the largest entry.

No weight is at its neutral value, so no part can drop out unnoticed.
"""

import json
import os
import subprocess
import sys
from copy import deepcopy
from functools import partial

import pytest
import torch
from references import reference_attention
from references.iha import causal_lm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.activations import ACT2FN

from iha.errors import ROOT, run_cli
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, pair_heads, virtual_tokens
from modeling_iha.configuration_iha import OPTIONS_CLASSES
from modeling_iha.mixing_weights import mixing_parameters
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from modeling_iha.transformers_versions import CACHE
from modeling_iha.virtual_tokens import takes_new_token


PLACES = ("*.md", "docs/*.md", "*/README.md", "sft/recipes/README.md", "research/**/README.md")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place))


# Tolerances


FP32 = 1e-4

# Transformers keeps RoPE's angles, RMSNorm, and the softmax of the eager core in float32 for a float64 model too.
FP64 = 5e-6

# What the model does in float64 alone leaves this.
FP64_EXACT = 1e-12

# bfloat16 moves a value by up to 2^-9 of it at each rounding. An output passes about eight in a row (projection, two
# by RoPE, mixing, the pseudo-head's rotation, attention, collapse, output projection), each counted twice for the
# differences of like size that it is summed with; a gradient passes them on the way back again, and the softmax's
# backward is a difference of nearly equal terms. The reference has the rounded weights and input. Seen: 0.015 and
# 0.08.
BF16_OUTPUT = 16 * 2**-9
BF16_GRADIENT = 64 * 2**-9

HALVES = [torch.bfloat16, torch.float16]


# Configs and models


# Every pairing of attention kind and layer type; takes a `sliding_window`.
HYBRID = {
    "attention_kinds": ["iha", "mha", "iha", "mha"],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 4,
}

# One layer of each attention kind.
EVERY_KIND = {"attention_kinds": list(ATTENTION_CLASSES), "num_hidden_layers": len(ATTENTION_CLASSES)}

SIZES = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
LLAMA = {**SIZES, "attention_bias": True, "mlp_bias": True}

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]

CORES = ["eager", "sdpa", "flash_attention_2", "flex_attention"]
_WINDOW_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


GEOMETRIES = {
    "global": {},
    "one_pseudo_head": {"num_pseudo_heads": 1},
    "no_gqa": {"num_key_value_heads": 4, "pseudo_collapse": "all_heads"},
    "window": {"layer_types": "sliding_attention", "sliding_window": 3},
    "window_mha": {"layer_types": "sliding_attention", "sliding_window": 3, "attention_kinds": "mha"},
    "hybrid": {**HYBRID, "sliding_window": 4},
    "hybrid_window_of_2": {**HYBRID, "sliding_window": 2},
    **{
        kind: {
            "attention_kinds": kind,
            "attention_options": {kind: getattr(options, "example", {})},
            **_WINDOW_AND_GLOBAL,
            **({"num_pseudo_heads": 2} if kind == "paired_heads" else {}),  # a divisor of the key/value heads
        }
        for kind, options in OPTIONS_CLASSES.items()
        if kind not in ("mha", "iha")
    },
    "hyper_linear": {
        "attention_kinds": "hyper",
        "attention_options": {"hyper": {"order": 4, "sharing": False, "linear": True}},
    },
}
# Of "iha" layers, what the mechanism suite lacks: P, a collapse over all heads, two kinds in one model.
IHA_GEOMETRIES = ["one_pseudo_head", "no_gqa", "hybrid", "hybrid_window_of_2"]
# Of the other kinds than "iha".
OTHER_KINDS = [name for name, fields in GEOMETRIES.items() if isinstance(fields.get("attention_kinds"), str)]

# Plain decoders, whose heads are interleaved, and fields of model types besides the sizes.
DECODERS = ("llama", "gemma3_text", "olmo2", "qwen3_moe")
DECODER_SIZES = {
    **SIZES,
    **{"num_hidden_layers": 3, "head_dim": 8, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1},
}
DECODER_FIELDS = {
    "bert": {"is_decoder": True, "add_cross_attention": True},
    "gemma2": {"sliding_window": 64, "attn_logit_softcapping": 2.0},  # as long as no window acts
    "gemma3_text": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4_text": {
        **{"sliding_window": 6, "hidden_size_per_layer_input": 8, "global_head_dim": 8, "num_kv_shared_layers": 1},
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gpt2": {"is_decoder": True, "add_cross_attention": True},
    "llama4_text": {"attention_chunk_size": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mistral": {"sliding_window": 6},
    "opt": {"layerdrop": 1.0, "ffn_dim": 48},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


# A RoPE for each layer type. YaRN scales its rotations too.
LOCAL_ROPE = {
    "attention_kinds": ["iha", "mha", "paired_heads", "mha"],
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100.0},
        "sliding_attention": {
            "rope_type": "yarn",
            "rope_theta": 10.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


# What a checkpoint of "iha" and "mha" layers ships.
IHA_CODE = {
    "configuration_iha.py",
    "modeling_iha.py",
    "virtual_tokens.py",
    "sdpa_in_blocks.py",
    "attention_mha.py",
    "attention_iha.py",
    "interleaving.py",
    "triton_kernels.py",
    "mixing.py",
    "transformers_versions.py",
}


def small_config(**overrides) -> IHAConfig:
    """Return a config of two "iha" layers, 4 heads of 8 in 2 groups and P = 2, with `overrides`."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    fields = {**SIZES, "num_pseudo_heads": 2, "max_position_embeddings": 256, "rope_parameters": rope}
    return IHAConfig(**{**fields, "pad_token_id": 0, "eos_token_id": None, **overrides})


def kind_config(kind, options=None, window=None, **overrides) -> IHAConfig:
    """Return a `small_config` of one layer of the kind with its options, within a window if one is given."""
    windows = {"layer_types": "full_attention" if window is None else "sliding_attention", "sliding_window": window}
    fields = {"attention_kinds": kind, "attention_options": {kind: options or {}}, "num_hidden_layers": 1}
    return small_config(**{**fields, **windows, **overrides})


def random_model(config, model_class=IHAForCausalLM, dtype=torch.float32, seed=0):
    """Return a model in eval mode whose every parameter is random.

    Norms are around 1; mixing, collapse and biases are far from neutral.

    Args:
        config: of any model class with Llama's parameter names.
        model_class: the class to build.
        dtype: of the parameters; they are drawn in float64, so two dtypes give roundings of the same model.
        seed: of the parameters, drawn in the order of their names: equal state dicts are equally filled.
    """
    # A model keeps the config it is given and writes its attention core into it: each gets its own.
    model = model_class._from_config(deepcopy(config), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name:
                noise = 1 + 0.2 * noise
            elif "_mix" in name:
                noise = noise / parameter.shape[0] ** 0.5  # [sources, heads, pseudo-heads]
            elif "embed" not in name:
                noise = noise / parameter.shape[-1] ** 0.5
            parameter.copy_(noise)
    return model.eval()


def geometry_model(geometry, core=None, dtype=torch.float32, seed=0, **overrides):
    """Return a random model of `GEOMETRIES` with P = 3, or the P that the geometry has, on a core of `set_core`."""
    config = small_config(**{"num_pseudo_heads": 3, **GEOMETRIES[geometry], **overrides})
    model = random_model(config, dtype=dtype, seed=seed)
    if core is not None:
        set_core(model, core)
    return model


def decoder(name, core="sdpa", **fields):
    """Return a plain decoder of Transformers of three layers, or of its first ones."""
    torch.manual_seed(0)
    fields = {**DECODER_SIZES, **DECODER_FIELDS.get(name, {}), **fields}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**fields), attn_implementation=core).eval()


def in_window(window):
    """Return the fields of a config whose layers all have a window of so many tokens, or none."""
    return {"layer_types": "sliding_attention", "sliding_window": window} if window else {}


# Every way to virtual heads: functions of a window in tokens, and of fields of the configuration or of the base.
WAYS = {
    "iha": lambda window=None, **fields: random_model(small_config(**in_window(window), **fields)),
    "paired_heads": lambda window=None, **fields: WAYS["iha"](window, attention_kinds="paired_heads", **fields),
    "interleaved": lambda window=None, **fields: interleaved("llama", window, **fields),
    "some interleaved": lambda window=None, **fields: interleaved("llama", window, [0, 2], **fields),
    "paired": lambda window=None, **fields: pair_heads(decoder("llama", **fields), 2, sliding_window=window),
}
# Fields of what any kind may add to its heads.
BOTH = {"output_gate": "elementwise", "exclusive_attention": True}


def interleaved(name, window=None, layers=None, num_pseudo_heads=2, **fields):
    """Return a decoder of Transformers whose heads are interleaved, with a trained mixing."""
    return train_mixing(interleave_heads(decoder(name, **fields), num_pseudo_heads, layers, window))


def train_mixing(model, size=0.3):
    """Move what mixes heads by about `size`, as training does."""
    generator = torch.Generator().manual_seed(3)
    scale = model.config.get_text_config(decoder=True).mixing_scale
    for weight in mixing_parameters(model):
        weight.data += size / scale * torch.randn(weight.shape, generator=generator).to(weight)
    return model


def random_ids(*shape, vocab_size=61, seed=1):
    """Return token ids above the special ones, `[*shape]`."""
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# `set_core` keeps here what it has replaced until the end of the test, and the configurations for which it chose a
# form.
replaced = pytest.MonkeyPatch()
chosen: list[tuple[PreTrainedConfig, bool]] = []


def chosen_form(module, heads, query, key, mask, dropout):
    """Decode from base states if `set_core` chose so, whatever is cached. It leaves other models to the package."""
    choices = [takes_base for config, takes_base in chosen if config is module.config]
    if not choices:
        return takes_new_token(module, heads, query, key, mask, dropout)
    is_new_token = query.shape[2] == 1 and mask is not None and not dropout
    return choices[-1] and is_new_token and heads.collapses_per_head


def set_core(model, core):
    """Set the attention implementation, and until the end of the test the form of one new token.

    "base" is SDPA with decoding from base states at every length; "sdpa" and all others compute on the virtual
    sequence. conftest.py ends it.
    """
    model.set_attn_implementation("sdpa" if core == "base" else core)
    chosen.append((model.config, core == "base"))
    replaced.setattr(virtual_tokens, "takes_new_token", chosen_form)


def forget_cores():
    """Undo `set_core`."""
    replaced.undo()
    chosen.clear()


def take_a_step(model) -> set[str]:
    """Train on one batch, and return the names of the trainable parameters that changed."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trainable.items()}
    optimizer = torch.optim.AdamW(trainable.values(), lr=0.05)
    input_ids = random_ids(2, 9)
    model(input_ids, labels=input_ids).loss.backward()
    optimizer.step()
    return {name for name, parameter in trainable.items() if not torch.equal(parameter, before[name])}


def plant(directory, mark):
    """Put code into a checkpoint that appends its name to the file `mark` when it runs, and return the files' names.

    It is code of a tokenizer, a processor and `custom_generate`, and of another kind of model in the config.
    """
    auto_maps = {
        "config.json": {"AutoModelForTokenClassification": "planted_model.Planted"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "planted_tokenizer.Planted"]},
        "processor_config.json": {"AutoProcessor": "planted_processor.Planted"},
    }
    for name, auto_map in auto_maps.items():
        path = directory / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, "auto_map": content.get("auto_map", {}) | auto_map}))
    names = [f"planted_{part}.py" for part in ("model", "processor", "tokenizer")] + ["custom_generate/generate.py"]
    (directory / "custom_generate").mkdir()
    for name in names:
        (directory / name).write_text(
            "from transformers import PreTrainedTokenizerFast\n\n"
            f"with open({str(mark)!r}, 'a') as file:\n    print({name!r}, file=file)\n\n\n"
            "class Planted(PreTrainedTokenizerFast):\n    pass\n\n\n"
            "def generate(model, *inputs, **arguments):\n    raise SystemExit('planted')\n"
        )
    return names


def padding(real):
    """Return arguments (of a model, of a reference) for `real` [B, N], False where a token is padding."""
    position_ids = (real.cumsum(-1) - 1).clamp_min(0)
    return (
        {"attention_mask": real.long(), "position_ids": position_ids},
        {"padding_mask": real, "position_ids": position_ids},
    )


def packing(lengths, rows=1):
    """Return arguments (of a model, of a reference) for documents of these lengths packed into each row."""
    position_ids = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    document_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand(rows, -1)
    return {"position_ids": position_ids}, {"position_ids": position_ids, "document_ids": document_ids}


def cumulative_lengths(lengths):
    """Return what a padding-free collator gives besides position_ids for documents of these lengths in one row."""
    boundaries, longest = torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths)
    lengths = {f"cu_seq_lens_{side}": boundaries for side in "qk"}
    return lengths | {f"max_length_{side}": longest for side in "qk"}


def causal_4d(attention_mask, kind):
    """Return the mask [batch, 1, N, N] that a padding mask [batch, N] stands for."""
    length = attention_mask.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None, :]
    if kind == "bool":
        return allowed
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


# Outputs and gradients


def logits_in_chunks(model, input_ids, chunks, cache=None):
    """Return the logits of an input that is fed in chunks of these lengths through one cache."""
    logits = []
    with torch.no_grad():
        for chunk in input_ids.split(chunks, dim=1):
            output = model(chunk, **{CACHE: cache}, use_cache=True)
            cache = output[CACHE]
            logits.append(output.logits)
    return torch.cat(logits, dim=1)


def uncached_logits(model, input_ids, **inputs):
    with torch.no_grad():
        return model(input_ids, use_cache=False, **inputs).logits


def greedy(model, input_ids, steps: int) -> torch.Tensor:
    """Generate tokens without a cache."""
    for _ in range(steps):
        following = uncached_logits(model, input_ids)[:, -1:].argmax(-1)
        input_ids = torch.cat((input_ids, following), dim=1)
    return input_ids


def loss_and_gradients(model, input_ids, use_cache=False, **inputs):
    model.zero_grad()
    loss = model(input_ids, labels=input_ids, use_cache=use_cache, **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


def logits_and_gradients(model, core, **inputs):
    """Return the logits of real tokens on a core, and the gradients of the sum of their squares."""
    set_core(model, core)
    model.zero_grad()
    logits = model(**inputs).logits
    real = inputs.get("attention_mask", torch.ones(logits.shape[:2]))[:, : logits.shape[1], None]
    (logits * real).square().sum().backward()
    return [(logits * real).detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def largest_saved_tensor(model, input_ids):
    """Return the size of the largest tensor that autograd keeps from a forward pass for the backward."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        loss = model(input_ids, use_cache=False).logits.square().mean()
    largest = max(sizes)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    return largest


def reference_weights(module):
    """Return float64 leaves with the values of a module's parameters, by name."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def attention_of_first_layer(model, **inputs):
    """Return input and output of the first layer's attention, in the autograd graph of a pass of the whole model."""
    seen = {}

    def keep(module, args, kwargs, output):
        seen["in"] = args[0] if args else kwargs["hidden_states"]
        seen["out"] = output[0]

    handle = model.model.layers[0].self_attn.register_forward_hook(keep, with_kwargs=True)
    model(**inputs)
    handle.remove()
    return seen["in"], seen["out"]


def gradients(output, leaves):
    """Return the gradients of a fixed random projection of the output, by name of the leaf.

    They are zeros where the output does not depend on a leaf.
    """
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad(output, list(leaves.values()), probe.to(output.dtype), materialize_grads=True)
    return dict(zip(leaves, found))


# Kernels


class CountedKernel:
    """Take the place of a Triton kernel, list its launches, and launch it if it is given."""

    def __init__(self, name, launched, kernel=None):
        self.name, self.launched, self.kernel = name, launched, kernel

    def __getitem__(self, grid):
        self.launched.append(self.name)
        return self.kernel[grid] if self.kernel else lambda *_, **__: None


def compiled_kernels(architecture, calls, cache):
    """Return what compile_kernels.py prints: the registers and the memory of each kernel of each call."""
    environment = {"TRITON_CACHE_DIR": str(cache), "TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, ROOT / "tests" / "compile_kernels.py", json.dumps([architecture, calls])]
    answer = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def traced_kernels(*cases):
    """Return what trace_kernels.py prints of cases: the number of graphs, and how often they launch each kernel."""
    command = [sys.executable, ROOT / "tests" / "trace_kernels.py", json.dumps(cases)]
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


# Comparisons


def assert_close(actual, expected, tolerance=2e-5):
    """Compare shapes, and every entry to the tolerance times the largest."""
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= tolerance


def relative_error(actual, expected):
    """Return the largest difference over the largest expected entry, or over 1 where all that is expected is 0.

    Everything here is of order one, but a query that sees a single key has no gradient.
    """
    scale = expected.abs().max().item()
    return (actual.double() - expected).abs().max().item() / (scale if scale > 1e-12 else 1.0)


def assert_gradients_match(actual, expected, tolerance):
    """Compare every gradient, by name, to a tolerance relative to its own largest entry."""
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], gradient) for name, gradient in expected.items()}
    assert all(error < tolerance for error in errors.values()), errors


def assert_layer_matches(model, reference, tolerance, gradient_tolerance=None, real=None, **inputs):
    """Compare output and gradients of the first layer's attention with `reference(hidden_states, weights)`.

    The gradients are of the input and of every parameter. `real` [B, N] marks the tokens to compare, by default all.
    """
    hidden, output = attention_of_first_layer(model, **inputs)
    attention = model.model.layers[0].self_attn
    expected_hidden = hidden.detach().double().requires_grad_()
    weights = reference_weights(attention)
    expected = reference(expected_hidden, weights)
    if real is not None:
        output, expected = output[real], expected[real]

    assert relative_error(output, expected) < tolerance
    actual_gradients = gradients(output, {"input": hidden, **dict(attention.named_parameters())})
    expected_gradients = gradients(expected, {"input": expected_hidden, **weights})
    assert_gradients_match(actual_gradients, expected_gradients, gradient_tolerance or tolerance)


def assert_attention_matches(
    config,
    tolerance,
    gradient_tolerance=None,
    dtype=torch.float32,
    core=None,
    seed=0,
    length=9,
    rows=2,
    inputs=({}, {}),
):
    """Compare as `assert_layer_matches` does, with the reference of the first layer's kind.

    The input has `rows` of `length` tokens; `inputs` of the model and of the reference are those of `padding` or
    `packing`.
    """
    model = random_model(config, dtype=dtype, seed=seed)
    if core is not None:
        set_core(model, core)
    (of_model, of_reference), attention = inputs, reference_attention(config, 0)
    real, of_model = of_reference.get("padding_mask"), {"input_ids": random_ids(rows, length), **of_model}
    reference = partial(attention, **of_reference)
    assert_layer_matches(model, reference, tolerance, gradient_tolerance, real, use_cache=False, **of_model)


def reference_logits(model, input_ids, **inputs):
    """Return the reference's logits for a model, and the float64 weights they depend on."""
    weights, config = reference_weights(model), model.config
    attentions = [reference_attention(config, i) for i in range(config.num_hidden_layers)]
    activation = ACT2FN[config.hidden_act]
    return causal_lm(input_ids, weights, attentions, config.rms_norm_eps, activation, **inputs), weights


# Commands


def command(monkeypatch, capsys, module, *arguments):
    """Run a command in this process, and return its exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    capsys.readouterr()
    code = 0
    try:
        run_cli(module.main)
    except SystemExit as exit:
        code = exit.code
    return code, *capsys.readouterr()


def last_line(text):
    """Return the last line of standard error, which carries the error; no traceback may stand before it."""
    assert "Traceback" not in text
    lines = text.strip().splitlines()
    assert lines and lines[-1].startswith("Error: "), text
    return lines[-1]
