# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Mix heads into pseudo-heads, attend over virtual tokens and collapse (IHA, Algorithm 1)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .interleaving import collapse, make_virtual_sequence
from .new_token import new_token_attention


class MixedHeads(NamedTuple):
    """Hold the weights by which a layer mixes, rotates and collapses its heads (IHA, Algorithm 1).

    "iha" layers and those of `interleave_heads` have such heads (see `VirtualHeads`)."""

    q_mix: torch.Tensor  # alpha^Q, [H, H, P]
    k_mix: torch.Tensor  # alpha^K, [G, G, P]
    v_mix: torch.Tensor  # alpha^V, [G, G, P]
    collapse: torch.Tensor  # R, [H, P] or [H, H * P]
    # (cos, sin) of T_p, each [P, head_dim]. T_p rotates pseudo-head p within its token; `None` for shared positions.
    rotation: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def num_pseudo_heads(self) -> int:
        return self.q_mix.shape[-1]

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        return (self.q_mix, self.k_mix, self.v_mix, self.collapse)

    @property
    def allocates_virtual_tokens(self) -> bool:
        return True

    @property
    def takes_new_token(self) -> bool:
        # `new_token_attention` knows a collapse within each head only.
        return self.collapse.shape[1] == self.num_pseudo_heads

    @classmethod
    def from_module(
        cls, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation
    ) -> "MixedHeads":
        """Return the weights of a module.

        They do not depend on the states. Mixing modules are called with states because wrappers (PEFT, offloading,
        FSDP) act on calls."""
        return cls(module.q_mix(query), module.k_mix(key), module.v_mix(value), module.collapse(query), rotation)

    def attend(
        self,
        attend_virtual: Callable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run steps 2 to 5 of the algorithm. `attend_virtual` is step 4 (see `VirtualHeads.attend`)."""
        query = make_virtual_sequence(query, self.q_mix, self.rotation)
        key = make_virtual_sequence(key, self.k_mix, self.rotation)
        value = make_virtual_sequence(value, self.v_mix)
        output, attn_weights = attend_virtual(query, key, value, attention_mask, **kwargs)
        return collapse(output, self.collapse, self.num_pseudo_heads), attn_weights

    def attend_new_token(self, *args) -> torch.Tensor:
        """Return the output of one new token. `args` are the arguments of `new_token_attention` after the heads."""
        return new_token_attention(self, *args)
