"""Make a tiny random checkpoint, with a tokenizer, of every architecture that converts."""

import json
from collections import Counter
from functools import cache

import torch
from helpers import SIZES, random_ids, random_model
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DiffLlamaForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)

from iha.conversion.verify_conversion import DEFAULT_TEXT


VOCAB_SIZE = 61
CHAT_TEMPLATE = (
    "{% for message in messages %}<s> {{ message['content'] }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHARED = {**SIZES, **_TOKENS, "num_hidden_layers": 6, "max_position_embeddings": 256}
_QWEN_SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}

# What `convert_llama_to_iha.py` takes: name -> (model class, fields).
SOURCES = {
    "llama": (LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-head-dim": (LlamaForCausalLM, {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, {"sliding_window": None}),
    "mistral-sliding": (MistralForCausalLM, {"sliding_window": 7}),
    "qwen2-tied": (Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-sliding": (Qwen2ForCausalLM, _QWEN_SLIDING),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 12}),
    "qwen3-sliding-bias": (Qwen3ForCausalLM, {"head_dim": 8, "attention_bias": True, **_QWEN_SLIDING}),
    "ministral": (
        MinistralForCausalLM,
        {"head_dim": 12, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "smollm3-tied": (SmolLM3ForCausalLM, {"head_dim": 12, "mlp_bias": True}),
    "smollm3-sliding": (
        SmolLM3ForCausalLM,
        {
            **{"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [1, 0] * 3},
            **{"attention_bias": True, "tie_word_embeddings": False, "head_dim": 12},
        },
    ),
}
# Sources that have a separate command.
OTHER_SOURCES = {
    "diffllama": (DiffLlamaForCausalLM, {"lambda_std_dev": 0.2}),
    "diffllama-tied-bias-head-dim": (
        DiffLlamaForCausalLM,
        {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
# What `convert_dcformer_to_iha.py` takes: a config of the released code.
DCFORMER = {
    **{"model_type": "dcformer", "architectures": ["DCFormer"], "torch_dtype": "float32"},
    "auto_map": {"AutoConfig": "configuration_dcformer.DCFormerConfig"},
    **{"vocab_size": 61, "dim": 32, "intermediate_size": 24, "n_layer": 4, "n_head": 4, "n_local_heads": 4},
    **{"head_dim": 8, "rope_base": 100.0, "norm_eps": 1e-6, "block_size": 64, "window_size": 3, "window_type": None},
    **{"use_qk_norm": True, "mgate": True, "mgate_dim": 6, "query_wise": False, "use_dcmha": True},
    **{"is_training": False, "q_chunk_size": 128, "prefill_pad": True, "bos_token_id": 1, "eos_token_id": 2},
}
# Twice the windows of the sliding sources, and odd.
LENGTH = 17


def tiny_source(name="llama", dtype=torch.float32, **overrides):
    """Return a random model of `SOURCES` or `OTHER_SOURCES`, in eval mode."""
    model_class, fields = {**SOURCES, **OTHER_SOURCES}[name]
    config = model_class.config_class(**{**_SHARED, **fields, **overrides})
    model = random_model(config, model_class, dtype=dtype)
    model.generation_config.update(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, max_length=77)
    return model


@cache
def tiny_tokenizer(vocab_size=VOCAB_SIZE):
    """Return a word-level tokenizer with ids 0 .. vocab_size - 1 and a chat template."""
    words, split = Counter(), pre_tokenizers.Whitespace()
    words.update(word for word, _ in split.pre_tokenize_str(DEFAULT_TEXT.read_text(encoding="utf-8")))
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = special + [word for word, _ in words.most_common(vocab_size - len(special))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_source(directory, name="llama", dtype=torch.float32, max_shard_size="1GB", **overrides):
    """Write a random model of `tiny_source` and its tokenizer to `directory`, and return the model."""
    model = tiny_source(name, dtype, **overrides)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(directory)
    return model


def released_weights(config, dtype=torch.float64, seed=0):
    """Return random weights under the released names, with the derived ones that a released file also holds."""
    width, heads, inner = config["dim"], config["n_head"], config["intermediate_size"]
    shapes = {"tok_embeddings.weight": (61, width), "norm.weight": (width,), "output.weight": (61, width)}
    for i in range(config["n_layer"]):
        layer = {
            "attention.wqkv.weight": (3 * width, width),
            "attention.wo.weight": (width, width),
            "attention.dyn_w_proj.dw1": (width, 1, 4, 4 * heads),
            "attention.dyn_w_proj.qkw": (1, 4, 4 * heads, 4, heads),
            "attention.dyn_w_proj.dd": (width, 1, 4 * heads),
            "attention_norm.weight": (width,),
            "ffn_norm.weight": (width,),
            "feed_forward.w1.weight": (inner, width),
            "feed_forward.w3.weight": (inner, width),
            "feed_forward.w2.weight": (width, inner),
        }
        if config["use_qk_norm"]:
            layer |= {"attention.q_norm.scale": (width // heads,), "attention.k_norm.scale": (width // heads,)}
        if config.get("mgate"):
            layer["feed_forward.mg.weight"] = (config["mgate_dim"], width)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif "embed" not in name:
            noise = noise / (shape[2] if "qkw" in name else width) ** 0.5
        weights[name] = noise.to(dtype)
    for i in range(config["n_layer"]):
        dynamic = f"layers.{i}.attention.dyn_w_proj."
        w1, gate = weights[f"{dynamic}dw1"].reshape(width, -1), weights[f"{dynamic}dd"].squeeze(1)
        weights[f"{dynamic}dw_m"] = torch.cat((w1, gate), dim=-1)
        weights[f"{dynamic}qkw_m"] = weights[f"{dynamic}qkw"].reshape(4, 4 * heads, -1).clone()
        for stage in ("pre", "post"):
            weights[f"{dynamic}{stage}_proj.w"] = torch.eye(heads, dtype=dtype)[None]
    return weights


def save_released(directory, config=DCFORMER, form="bin"):
    """Write a released checkpoint in one of the forms that a Hub repository may have, and return its weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    weights = released_weights(config, torch.float32)
    shard_size = "50KB" if form == "shards" else "1GB"
    save_torch_state_dict(weights, directory, max_shard_size=shard_size, safe_serialization=form != "bin")
    tiny_tokenizer().save_pretrained(directory)
    return weights


# What a checkpoint computes


@torch.no_grad()
def logits(model, length=LENGTH):
    return model(random_ids(2, length)).logits


@torch.no_grad()
def padded_logits(model):
    """Return the logits of the last five tokens of a row of five that is padded on the left."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :-5] = 0
    return model(random_ids(2, LENGTH), attention_mask=mask).logits[:, -5:]


@torch.no_grad()
def continuation(model, steps=5):
    prompt = random_ids(1, 9)
    config = GenerationConfig(max_new_tokens=steps, do_sample=False, pad_token_id=0)
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[0].tolist()


def assert_equal_logits(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


# Damage


def edit_weights(source, edit):
    """Change the weights in each file of a checkpoint by `edit`, which is given them by name."""
    for path in source.glob("*.safetensors"):
        weights = load_file(path)
        edit(weights)
        save_file(weights, path, metadata={"format": "pt"})


def edit_config(source, file="config.json", **changes):
    """Change fields in the config.json, or another JSON file, of a checkpoint."""
    path = source / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shards(source):
    """Return the files of weights of a checkpoint, in order."""
    return sorted(source.glob("*.safetensors"))
