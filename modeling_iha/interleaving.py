# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Interleave heads: mix them into pseudo-heads, lay these out as virtual tokens, and collapse their outputs.

Algorithm 1 of IHA (arXiv:2602.21371) has five steps. Step 1 projects to heads, step 2 mixes them into pseudo-heads
(by alpha), step 3 interleaves these as virtual tokens, step 4 attends over virtual tokens (virtual_tokens.py, which
lists the symbols of shapes), and step 5 collapses the P outputs of a token (by R).

`rotation` is `None` in every decoder of Transformers, where pseudo-heads share a position. In an `IHAModel` (this
package's own model, which may not be in this directory) it has the RoPE tables of T_p, which rotates pseudo-head p by
p positions more.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from .mixing import Mixing
from .triton_kernels import DECODES_MIXED_HEADS, kernels_are_faster, kernels_decode, kernels_take
from .triton_kernels import collapse as collapse_by_kernel
from .triton_kernels import decode as decode_by_kernel
from .triton_kernels import expand as expand_by_kernel
from .virtual_tokens import masked_softmax


class HeadMixing(Mixing):
    """Combine heads into pseudo-heads by learned weights, alpha of IHA, Algorithm 1, step 2.

    The value of `weight` [M, M, P] holds alpha[m, h, p], the share of head m in pseudo-head p of head h."""

    def __init__(self, num_heads: int, num_pseudo_heads: int, scale: float = 1.0):
        super().__init__(scale)
        self.add_weight("weight", torch.zeros(num_heads, num_heads, num_pseudo_heads))

    def init_mechanism(self, config):
        """Start every pseudo-head near its own head, from random weights (the paper gives no start).

        The noise makes them differ. `interleave_heads` starts otherwise, so that the base's outputs stay."""
        # Some configurations lack the field, such as OPT's, which has `init_std`.
        noise = torch.randn_like(self.weight) * getattr(config, "initializer_range", 0.02)
        self.init_weight("weight", torch.eye(len(noise)).to(noise).unsqueeze(-1) + noise)


class HeadCollapse(Mixing):
    """Combine pseudo-heads into heads by learned weights, R of IHA, Algorithm 1, step 5.

    The value of `weight` is [H, P] for `"per_head"`: out[h] = sum_p R[h, p] O[h, p]. It is [H, H * P] for
    `"all_heads"`, which also sums over the heads: column h' * P + p of row h, counted from 0, is the share of
    pseudo-head p of head h' (Definition 3)."""

    def __init__(self, num_heads: int, num_pseudo_heads: int, pseudo_collapse: str, scale: float = 1.0):
        super().__init__(scale)
        self.num_pseudo_heads = num_pseudo_heads
        num_sources = 1 if pseudo_collapse == "per_head" else num_heads
        self.add_weight("weight", torch.zeros(num_heads, num_sources * num_pseudo_heads))

    def init_mechanism(self, config):
        """Start at the mean over the pseudo-heads, from random weights."""
        num_heads, columns = self.weight.shape
        shares = torch.ones(num_heads, 1) if columns == self.num_pseudo_heads else torch.eye(num_heads)
        self.init_weight("weight", shares.repeat_interleave(self.num_pseudo_heads, dim=1) / self.num_pseudo_heads)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate states [..., head_dim] by RoPE tables that broadcast to them."""
    half = states.shape[-1] // 2
    # This equals states * cos + rotate_half(states) * sin to the last bit, in fewer passes.
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return states * cos + states.roll(half, dims=-1) * sin


def make_virtual_sequence(states: torch.Tensor, alpha: torch.Tensor, rotation: tuple | None = None) -> torch.Tensor:
    """Return the virtual sequence [batch, heads, N * P, head_dim] of states [batch, M, N, head_dim].

    alpha is [M, heads, P], for all M heads or a part of them. The result is a view of what the mixing writes,
    [batch, N, P, heads, head_dim], so interleaving copies nothing."""
    batch, num_heads, num_tokens, head_dim = states.shape
    num_pseudo_heads = alpha.shape[2]
    states = states.transpose(1, 2).reshape(-1, num_heads, head_dim)  # [batch * N, M, head_dim]
    alpha = alpha.to(states.dtype).permute(2, 1, 0).reshape(-1, num_heads)  # [P * heads, M]
    # `matmul` would find this product by three times as many operations, each of which takes time in Python.
    mixed = torch.bmm(alpha.expand(states.shape[0], -1, -1), states)  # [batch * N, P * heads, head_dim]
    if rotation is not None:
        cos, sin = (table.to(states.dtype).unsqueeze(1) for table in rotation)  # [P, 1, head_dim]
        mixed = rotate(mixed.unflatten(1, (num_pseudo_heads, -1)), cos, sin)
    return mixed.view(batch, num_tokens * num_pseudo_heads, -1, head_dim).transpose(1, 2)


class MixedHeads(NamedTuple):
    """Make the virtual tokens of one call by a layer's mixing, and collapse their outputs."""

    q_mix: torch.Tensor  # alpha^Q, [H, H, P]
    k_mix: torch.Tensor  # alpha^K, [G, G, P]
    v_mix: torch.Tensor  # alpha^V, [G, G, P]
    collapse: torch.Tensor  # R, [H, P] or [H, H * P]
    rotation: tuple[torch.Tensor, torch.Tensor] | None  # (cos, sin) of T_p, [P, head_dim]; `None` where T_p is 1

    @classmethod
    def of_module(cls, module: nn.Module, states: torch.Tensor, rotation=None) -> "MixedHeads":
        """Return the weights of a module. Its parts do not use the states, but wrappers such as PEFT act on calls."""
        return cls(module.q_mix(states), module.k_mix(states), module.v_mix(states), module.collapse(states), rotation)

    @property
    def num_pseudo_heads(self) -> int:
        return self.q_mix.shape[-1]

    @property
    def collapses_per_head(self) -> bool:
        return self.collapse.shape[1] == self.num_pseudo_heads

    def in_parts(self, count: int) -> list["MixedHeads"]:
        """Return the mixing in parts of G // `count` key/value heads, at least one, with their queries."""
        num_groups = self.k_mix.shape[1]
        if count == 1 or not self.collapses_per_head:
            return [self]
        groups_of_part = max(1, num_groups // count)
        mixes = [mix.split(groups_of_part * mix.shape[1] // num_groups, dim=1) for mix in self[:3]]
        collapses = self.collapse.split(groups_of_part * len(self.collapse) // num_groups)
        return [self._replace(q_mix=q, k_mix=k, v_mix=v, collapse=r) for q, k, v, r in zip(*mixes, collapses)]

    def make_virtual_tokens(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
        """Return queries, keys and values of virtual tokens, [batch, H or G, tokens * P, head_dim] (steps 2 and 3)."""
        is_faster = kernels_are_faster(query.shape[0] * query.shape[2])
        if is_faster and kernels_take(query, self.q_mix) and value.shape[-1] % 2 == 0:
            return expand_by_kernel((query, key, value), self[:3], self.rotation)
        query = make_virtual_sequence(query, self.q_mix, self.rotation)
        key = make_virtual_sequence(key, self.k_mix, self.rotation)
        return query, key, make_virtual_sequence(value, self.v_mix)

    def collapse_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return heads [batch, N, H, head_dim] of virtual outputs [batch, N * P, H, head_dim] by R (step 5)."""
        is_faster = kernels_are_faster(output.shape[0] * output.shape[1] // self.num_pseudo_heads)
        if is_faster and self.collapses_per_head and kernels_take(output, self.collapse):
            return collapse_by_kernel(output, self.collapse)
        output = output.unflatten(1, (-1, self.num_pseudo_heads))
        weight = self.collapse.to(output.dtype)
        if weight.shape[1] == self.num_pseudo_heads:
            # `einsum` would permute the states, and autograd would keep that copy for the backward pass.
            return (output * weight.t().unsqueeze(-1)).sum(dim=2)
        weight = weight.unflatten(1, (-1, self.num_pseudo_heads))
        # Some base models call `view` on the output of attention, so it must be contiguous.
        return torch.einsum("hgp,bnpgd->bnhd", weight, output).contiguous()

    def mask_of_virtual_heads(self, mask: Any) -> Any:
        """Return a mask unchanged: there are as many virtual heads as heads (unlike in pairing.py)."""
        return mask

    def attend_new_token(self, query, key, value, mask: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the output [batch, 1, H, head_dim] of a query [batch, H, 1, head_dim] (Algorithm 1, steps 2 to 5).

        No virtual token of the cache is built. Mixing, rotation and collapse are linear, so they move from the cached
        tokens to the new one. For query pseudo-head i and key pseudo-head j of a head in group g,

            T_i q_i . T_j sum_m alpha_K[m, g, j] k_m = sum_m (alpha_K[m, g, j] T_j^T T_i q_i) . k_m

        The term in parentheses does not depend on the cached tokens. It is computed first, and the scores are then one
        product with the cache as it is. In the same way R is applied before the sum over the cached values,
        sum_i R[h, i] (softmax_i V) = (sum_i R[h, i] softmax_i) V, and alpha_V after it.

        The mask is boolean or additive, [batch or 1, H or 1, P, K * P] over virtual tokens."""
        if kernels_decode(query, DECODES_MIXED_HEADS):
            return decode_by_kernel(query, key, value, mask, scaling, **self._asdict())
        dtype = value.dtype
        heads_per_group = query.shape[1] // key.shape[1]
        k_mix = self.k_mix.to(dtype).permute(1, 2, 0).repeat_interleave(heads_per_group, dim=0)  # [H, P (j), G (m)]
        v_mix = self.v_mix.to(dtype).repeat_interleave(heads_per_group, dim=1)  # [G (m), H, P (j)]
        with maybe_autocast(query.device.type, enabled=False):  # it would round what is in float32 on purpose
            query = make_virtual_sequence(query, self.q_mix.to(dtype) * scaling, self.rotation).unsqueeze(3)  # T_i q_i
            if self.rotation is not None:
                cos, sin = (table.to(dtype) for table in self.rotation)
                query = rotate(query, cos, -sin)  # T_j^T T_i q_i: the tables of all j broadcast
            probabilities = masked_softmax(scores_of_cached_keys(query, k_mix, key), mask)
            return sum_cached_values(probabilities, self.collapse, v_mix, value)


def scores_of_cached_keys(query: torch.Tensor, k_mix: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the scores [batch, H, P (i), P (j), K] of keys [batch, G, K, head_dim], which k_mix would mix.

    The query is [batch, H, P (i), P (j) or 1, head_dim], and k_mix is [H, P (j), G (m)]."""
    absorbed = query.contiguous().unsqueeze(4) * k_mix[:, None, :, :, None]  # [batch, H, P, P (j), G, head_dim]
    keys = key.transpose(1, 2).flatten(2).transpose(1, 2)  # [batch, G * head_dim, K]
    scores = torch.matmul(absorbed.flatten(4).flatten(1, 3), keys)  # sums over m too
    return scores.unflatten(1, absorbed.shape[1:4])


def sum_cached_values(probabilities, collapse, v_mix: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the output [batch, 1, H, head_dim] of probabilities [batch, H, P (i), P (j), K], collapsed by R.

    Values are [batch, G, K, head_dim], and v_mix is [G (m), H, P (j)]. Only sums over K are mixed."""
    shares = torch.matmul(collapse.to(probabilities.dtype).unsqueeze(1), probabilities.flatten(-2)).to(value.dtype)
    shares = shares.view(shares.shape[0], 1, -1, value.shape[2])  # [batch, 1, H * P (j), K]
    sums = torch.matmul(shares, value).unflatten(2, v_mix.shape[1:])  # [batch, G (m), H, P (j), head_dim]
    return (sums * v_mix.unsqueeze(-1)).sum(dim=(1, 3)).unsqueeze(1)
