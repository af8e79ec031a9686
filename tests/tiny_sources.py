"""Tiny random checkpoints of every architecture that converts, with a tokenizer, made on the spot."""

from collections import Counter
from functools import cache

import torch
from helpers import random_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from conversion_scripts.verify_conversion import DEFAULT_TEXT


VOCAB_SIZE = 61
CHAT_TEMPLATE = "{% for message in messages %}<s> {{ message['content'] }} </s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"

_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}

# What `convert_llama_to_iha.py` takes: name -> (model class, config class, fields).
SOURCES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-head-dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-sliding": (Qwen2ForCausalLM, Qwen2Config, _QWEN_SLIDING),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
    "qwen3-sliding-bias": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "attention_bias": True, **_QWEN_SLIDING}),
}
# What has a command of its own.
OTHER_SOURCES = {
    "diffllama": (DiffLlamaForCausalLM, DiffLlamaConfig, {"lambda_std_dev": 0.2}),
    "diffllama-tied-bias-head-dim": (
        DiffLlamaForCausalLM,
        DiffLlamaConfig,
        {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def tiny_source(name="llama", dtype=torch.float32, **overrides):
    """A random model of `SOURCES` or `OTHER_SOURCES`, in eval mode, that never stops generating by itself."""
    model_class, config_class, fields = {**SOURCES, **OTHER_SOURCES}[name]
    config = config_class(**{**_SHARED, **fields, **overrides})
    model = random_model(config, model_class, dtype=dtype)
    model.generation_config.update(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, max_length=77)
    return model


@cache
def tiny_tokenizer(vocab_size=VOCAB_SIZE):
    """A word-level tokenizer with ids 0 .. vocab_size - 1 and a chat template."""
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
    """Writes a random model of `tiny_source` and its tokenizer to `directory`, and returns the model."""
    model = tiny_source(name, dtype, **overrides)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(directory)
    return model
