"""Small models with weights that leave nothing at its neutral value, so that no part can drop out unnoticed."""

from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM, IHAModel, collapse_first
from modeling_iha.attention_kinds import ATTENTION_CLASSES


# Every pairing of attention kind and layer type; takes a `sliding_window`.
HYBRID = {
    "attention_kinds": ["iha", "mha", "iha", "mha"],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 4,
}

# One layer of each attention kind.
EVERY_KIND = {"attention_kinds": list(ATTENTION_CLASSES), "num_hidden_layers": len(ATTENTION_CLASSES)}


def small_config(**overrides) -> IHAConfig:
    """Two "iha" layers, 4 heads of 8 in 2 groups, P = 2, no end-of-sequence token; with `overrides`."""
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_pseudo_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return IHAConfig(**{**fields, **overrides})


def random_model(config, model_class=IHAForCausalLM, dtype=torch.float32, seed=0):
    """A model in eval mode whose every parameter is random: norms around 1, mixing, collapse and biases far from
    neutral.

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


def random_ids(*shape, vocab_size=61, seed=1):
    """Token ids above the special ones, `[*shape]`."""
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def set_core(model, core):
    """Sets the attention implementation. "sdpa" is the stock core on the virtual sequence, "collapse_first" the forms that
    SDPA stands for on a CPU, at every length."""
    model.set_attn_implementation("sdpa" if core == "collapse_first" else core)
    model.base_model.attention_form = "base" if core == "collapse_first" else "virtual"


def collapse_short_inputs_first(monkeypatch):
    """From here on "iha" layers on SDPA collapse first however short the input, in several blocks and segments."""
    monkeypatch.setattr(IHAModel, "attention_form", "base")
    monkeypatch.setattr(collapse_first, "MAX_UNSEGMENTED_KEYS", 10)
    monkeypatch.setattr(collapse_first, "SEGMENT_KEYS", 6)
    monkeypatch.setattr(collapse_first, "MIN_BLOCK", 1)
    monkeypatch.setattr(collapse_first, "MAX_BLOCK", 3)


def learn_one_batch(model, optimizer):
    """The loss on one batch of two rows of 9 tokens in the last of 60 steps on it."""
    input_ids = random_ids(2, 9)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
    return loss


def reload(model, directory):
    """The model, saved to the directory and loaded again with every weight in its place."""
    model.save_pretrained(directory)
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded


def left_padding(real):
    """Arguments for `real` [B, N], True where a token is none of padding: (of a model, of a reference)."""
    position_ids = (real.cumsum(-1) - 1).clamp_min(0)
    return (
        {"attention_mask": real.long(), "position_ids": position_ids},
        {"padding_mask": real, "position_ids": position_ids},
    )


def packing(lengths, rows=1):
    """Arguments for documents of these lengths packed into each row: (of a model, of a reference)."""
    position_ids = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
    document_ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand(rows, -1)
    return {"position_ids": position_ids}, {"position_ids": position_ids, "document_ids": document_ids}
