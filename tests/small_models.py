"""Small models with weights that leave nothing at its neutral value, so that no part can drop out unnoticed."""

from copy import deepcopy

import torch

from modeling_iha import IHAConfig, IHAForCausalLM, base_attention, collapse_first
from modeling_iha.configuration_iha import ATTENTION_OPTIONS


# Every pairing of attention kind and layer type; takes a `sliding_window`.
HYBRID = {
    "attention_kinds": ["iha", "mha", "iha", "mha"],
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 4,
}

# One layer of each attention kind.
EVERY_KIND = {"attention_kinds": list(ATTENTION_OPTIONS), "num_hidden_layers": len(ATTENTION_OPTIONS)}


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


def collapse_short_inputs_first(monkeypatch):
    """From here on "collapse_first" does what it says however short the input, in several blocks."""
    monkeypatch.setattr(base_attention, "MIN_KEYS", 0)
    monkeypatch.setattr(collapse_first, "WHOLE", 10)
    monkeypatch.setattr(collapse_first, "SEGMENT", 6)
    monkeypatch.setattr(collapse_first, "MIN_BLOCK", 1)
    monkeypatch.setattr(collapse_first, "MAX_BLOCK", 3)
