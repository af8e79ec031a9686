# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Say what the two ways to make virtual tokens have in common."""

from typing import Any, Protocol

import torch


class VirtualHeads(Protocol):
    """Make the virtual tokens of one call of an attention module, by `MixedHeads` or `PairedHeads`.

    A module with virtual heads names its class in the attribute `virtual_heads`, and `virtual_attention` builds an
    instance for each call."""

    @property
    def num_pseudo_heads(self) -> int: ...

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return the weights that may need gradients."""

    @property
    def allocates_virtual_tokens(self) -> bool:
        """Return whether virtual tokens take memory of their own, so that a long row is computed in chunks."""

    @property
    def takes_new_token(self) -> bool:
        """Return whether `attend_new_token` can compute these heads."""

    @classmethod
    def from_module(
        cls, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Any
    ) -> "VirtualHeads":
        """Return the heads of a module for states [batch, H or G, N or K, head_dim].

        `rotation` is the (cos, sin) that rotate pseudo-heads within their token, or `None`."""

    def attend(
        self,
        attend_virtual: Any,  # mypy does not take a `StockCore`, a named tuple, for a `Callable`
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [batch, N, H, head_dim] for states [batch, H or G, N or K, head_dim], and the weights.

        `attend_virtual` is a function of queries, keys, values, a mask and `kwargs`, all in virtual tokens. It returns
        the output [batch, N * P, heads, head_dim] and the weights over virtual tokens."""

    def attend_new_token(self, *args) -> torch.Tensor:
        """Return the output [batch, 1, H, head_dim] of one new token, by the arguments of `new_token_attention`."""


def virtual_heads_class(module: Any) -> type[VirtualHeads] | None:
    """Return the class by which an attention module makes virtual tokens, or `None`.

    The plugin for vLLM reads the attribute from modules of older checkpoints too, so its name stays. The field of this
    name in a configuration is something else: it holds "paired" or `None`."""
    return getattr(module, "virtual_heads", None)
