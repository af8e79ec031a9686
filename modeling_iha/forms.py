# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Choose how an "iha" layer computes."""

import torch

from .interleaving import absorption_pays
from .mask_inputs import MaskInputs, MaskKey


def recomputes(attention_form: str | None, num_pseudo_heads: int) -> bool:
    """Return whether training expands the virtual tokens again in the backward pass."""
    return attention_form == "base" and num_pseudo_heads > 1


def choose_form(inputs: MaskInputs, key: MaskKey, num_keys: int) -> str | None:
    """Return the form in which "iha" layers compute steps 2 to 5 of IHA, Algorithm 1.

    `None` is the algorithm as written, on the core of `attn_implementation`. `"absorbed"` computes one new token from
    the cached base states (`absorbed_attention`), without expanding their `num_keys` tokens. `"recomputed"` keeps the
    base states only, and expands them again in the backward pass. No other place decides the form. Raise a ValueError
    for an `attention_form` of another name."""
    config, form, (rows, length) = inputs.config, inputs.attention_form, inputs.inputs_embeds.shape[:2]
    if form not in (None, "virtual", "base"):
        raise ValueError(f'attention_form is {form!r}: expected None, "virtual" or "base".')
    if key.num_pseudo_heads == 1 or form == "virtual":
        return None
    is_plain = config._attn_implementation == "sdpa" and config.pseudo_collapse == "per_head"
    if length == 1 and is_plain and not config.attention_dropout:
        pays = form == "base" or absorption_pays(inputs.inputs_embeds.device, rows, num_keys)
        return "absorbed" if pays else None
    return "recomputed" if recomputes(form, key.num_pseudo_heads) and torch.is_grad_enabled() else None
