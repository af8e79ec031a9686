# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Pair the heads of a decoder of Transformers in place, for a model trained from random weights or trained further.

Paired heads compute what interleaved heads with fixed mixing compute (attention_paired_heads.py), at 1 / P of the
work. The heads are first interleaved, which shows that the model is supported. Then they get the fixed mixing, whose
outputs paired heads have to repeat.
"""

import warnings
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from .in_place import check_unwrapped, check_window, interleave_heads, left_as_it_was
from .interleaved_attention import decoder_config
from .modeling_interleaved import add_heads, interleaved_attention, remove_heads
from .probes import check_same, probe


def pair_heads(
    model: PreTrainedModel,
    num_pseudo_heads: int,
    layers: Iterable[int] | str | None = None,
    sliding_window: int | None = None,
) -> PreTrainedModel:
    """Let groups of P heads of a decoder share one sequence of virtual tokens, in place.

    This changes what the model computes, and a warning says so: it is for models that are trained from random weights
    or trained further. The model gets no additional parameters, and its cache stays as large. `save_pretrained` writes
    a checkpoint that loads as that of `interleave_heads` does. The pairing cannot be undone.

    Args:
        model: any decoder that `interleave_heads` takes.
        num_pseudo_heads: P, at least 2, a divisor of the numbers of query heads and of key/value heads. Attention
            costs P times as much in a layer without a window.
        layers: as in `interleave_heads`.
        sliding_window: a window for these layers in tokens, or `None` for the base model's own. With W / P tokens a
            layer attends to as many pairs as a plain one with W.

    The virtual tokens of a token share its RoPE position, as the base model rotates its heads. In small models that
    learned code, paired heads gained less by this: a quarter less over the form `windows` of docs/FORMS.md at equal
    steps, and an undecided amount at equal time. In `IHAForCausalLM` each head has a separate position.

    Return the model. Raise a ValueError, and leave the model as it was, where its heads cannot be paired."""
    check_unwrapped(model)
    check_window(model, sliding_window)
    with left_as_it_was(model):
        interleave_heads(model, num_pseudo_heads, layers, seed=None, mixing_scale=1.0)
        config = decoder_config(model)
        for name, module in interleaved_attention(model).items():
            head_counts = config.interleaved_layers[name]
            _check_heads(module, head_counts, num_pseudo_heads)
            for weight, value in fixed_mixing(head_counts, num_pseudo_heads).items():
                module.get_parameter(weight).data.copy_(value)
        expected = probe(model)
        remove_heads(model)
        config.virtual_heads = "paired"
        add_heads(model)
        model_type = model.config.model_type
        check_same(model, expected, f"The heads of {model_type} cannot be paired")
    config.interleaved_window = sliding_window
    warnings.warn(f"The heads of this {model_type} are paired, which changes its outputs: train it.")
    return model


def fixed_mixing(head_counts: list[int], num_pseudo_heads: int) -> dict[str, torch.Tensor]:
    """Return the mixing and collapse, float32, with which interleaved heads compute what paired heads do.

    `head_counts` are the numbers of query, key and value heads. Pseudo-head p of head h is head p * S + h mod S, with
    S = heads / P, and head h is the output of its pseudo-head h // S."""

    def alpha(num_heads: int) -> torch.Tensor:
        size = num_heads // num_pseudo_heads
        head = torch.arange(num_heads, device="cpu")[:, None]
        pseudo_head = torch.arange(num_pseudo_heads, device="cpu")
        sources = pseudo_head * size + head % size  # [heads, P]
        return torch.nn.functional.one_hot(sources, num_heads).permute(2, 0, 1).float()

    num_heads, num_key_heads, num_value_heads = head_counts
    # The pseudo-head that is each head's output
    own = torch.arange(num_heads, device="cpu") // (num_heads // num_pseudo_heads)
    return {
        "q_mix.weight": alpha(num_heads),
        "k_mix.weight": alpha(num_key_heads),
        "v_mix.weight": alpha(num_value_heads),
        "collapse.weight": torch.nn.functional.one_hot(own, num_pseudo_heads).float(),
    }


def _check_heads(module: torch.nn.Module, head_counts: list[int], num_pseudo_heads: int) -> None:
    if any(count % num_pseudo_heads for count in head_counts):
        raise ValueError(
            f"num_pseudo_heads is {num_pseudo_heads}: expected a divisor of the {head_counts[0]} query heads and "
            f"{head_counts[1]} key/value heads of {type(module).__name__}."
        )
    if getattr(module, "sinks", None) is not None:
        raise ValueError(
            f"{type(module).__name__} has an attention sink for each head, which paired heads cannot use."
        )
