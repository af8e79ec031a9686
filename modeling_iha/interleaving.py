# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Interleave heads (IHA, Algorithm 1): mix them into pseudo-heads, attend over virtual tokens, collapse.

P pseudo-heads turn token n into the P consecutive virtual tokens n * P .. n * P + P - 1. A stock attention core runs
over the virtual sequence. The algorithm comes first. `absorbed_attention` then computes one new token faster, and
`first_key_attention` windows and documents without a dense mask.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of PyTorch without it
    varlen_attn = None

# Cached tokens that are converted at a time where products of the cache's dtype are slow.
WIDENED_TOKENS = 1024
# Cached tokens whose values one processor of a GPU sums up. On an H200, 8,193 tokens took 0.09 ms, unsplit 0.22.
SPLIT_TOKENS = 512
# The fewest queries of a block. A longer one copies fewer keys and computes more pairs outside the window.
MIN_BLOCK = 128
# The longest rows that are joined to one: more copies and masks then cost what fewer calls save.
JOINED_ROW = 512


class Mixing(nn.Module):
    """Hold weights of order 1 that mix heads, and learn them at a rate of their own.

    Adam moves a weight by its rate at each step, which is far too little for entries of order 1. A weight is therefore
    the change w from a start, the value is start + s * w, and the gradient of w is that of the value. Any optimizer
    then changes the value at s times its rate, and weight decay pulls the value to its start. In half precision w is
    near zero, where it keeps the small steps that a weight near 1 loses.

    Start and scale s are buffers that are saved: whatever moves w, such as a state dict, moves them with it. From
    scratch the start is zero and s is 1, so that w is the value."""

    built_scale = 1.0  # the scale at which `begin` starts

    def add_weight(self, name: str, value: torch.Tensor):
        """Add a parameter with its start, of the same shape, and its scale, of shape []."""
        self.register_parameter(name, nn.Parameter(value))
        weight = self.get_parameter(name)  # on another device where Accelerate or vLLM watches this call
        self.register_buffer(f"{name}_start", torch.zeros_like(weight))
        self.register_buffer(f"{name}_scale", weight.new_ones(()))

    def begin(self, name: str, value: torch.Tensor):
        """Initialise a weight at a value, as far as it was not loaded.

        Checkpoints of earlier versions hold no scale, which is then the configuration's, and where it is 1 no start.
        Raise a ValueError for any other weight without its start."""
        weight = self.get_parameter(name)
        start, scale = self.get_buffer(f"{name}_start"), self.get_buffer(f"{name}_scale")
        if was_loaded(weight) and not was_loaded(start) and self.built_scale != 1:
            raise ValueError(
                f"The weights of a {type(self).__name__} hold changes and no starts: save a model by save_pretrained "
                "or its state_dict, not its parameters alone."
            )
        first, change = (start, weight) if self.built_scale != 1 else (weight, start)
        init.copy_(first, value.to(weight).expand_as(weight))
        init.zeros_(change)
        init.constant_(scale, self.built_scale)

    def value(self, name: str = "weight") -> torch.Tensor:
        """Return the value of a weight."""
        weight = getattr(self, name)
        value = torch.addcmul(getattr(self, f"{name}_start"), weight.detach(), getattr(self, f"{name}_scale"))
        if not torch.is_grad_enabled():
            return value
        return value + (weight - weight.detach())  # zero, with the gradient of the value


def was_loaded(tensor: torch.Tensor) -> bool:
    """Return whether Transformers has read a tensor from a checkpoint."""
    return getattr(tensor, "_is_hf_initialized", False)


def build_at(module: nn.Module, scale: float):
    """Have all mixing weights within a module begin at a scale (see `Mixing`)."""
    for each in module.modules():
        if isinstance(each, Mixing):
            each.built_scale = scale


class HeadMixing(Mixing):
    """Combine heads into pseudo-heads by learned weights, alpha of IHA, Algorithm 1, step 2.

    The value of `weight` [M, M, P] holds alpha[m, h, p], the share of head m in pseudo-head p of head h."""

    def __init__(self, num_heads: int, num_pseudo_heads: int):
        super().__init__()
        self.add_weight("weight", torch.eye(num_heads).unsqueeze(-1).repeat(1, 1, num_pseudo_heads))

    def init_mechanism(self, config: PreTrainedConfig):
        """Start every pseudo-head near its own head, so that the layer starts close to MHA.

        The paper gives no initialisation. The noise makes the pseudo-heads differ."""
        noise = torch.randn_like(self.weight) * getattr(config, "initializer_range", 0.02)  # OPT's has another name
        identity = torch.eye(self.weight.shape[0], device=noise.device, dtype=noise.dtype)
        self.begin("weight", identity.unsqueeze(-1) + noise)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return alpha for the states. Wrappers (PEFT, offloading) act on this call, not on the weight."""
        return self.value()


class HeadCollapse(Mixing):
    """Combine pseudo-heads into heads by learned weights, R of IHA, Algorithm 1, step 5.

    The value of `weight` is [H, P] for `"per_head"`: out[h] = sum_p R[h, p] O[h, p]. It is [H, H * P] for
    `"all_heads"`, which also sums over the heads: column h' * P + p of row h, counted from 0, is the share of
    pseudo-head p of head h' (Definition 3)."""

    def __init__(self, num_heads: int, num_pseudo_heads: int, pseudo_collapse: str):
        super().__init__()
        self.num_pseudo_heads = num_pseudo_heads
        columns = num_pseudo_heads if pseudo_collapse == "per_head" else num_heads * num_pseudo_heads
        self.add_weight("weight", torch.empty(num_heads, columns))
        self.init_mechanism()

    def init_mechanism(self, config: PreTrainedConfig | None = None):
        """Start at the mean over the pseudo-heads."""
        identity = torch.eye(self.weight.shape[0], device=self.weight.device, dtype=self.weight.dtype)
        if self.weight.shape[1] == self.num_pseudo_heads:
            identity = torch.ones_like(identity[:, :1])
        self.begin("weight", identity.repeat_interleave(self.num_pseudo_heads, dim=1) / self.num_pseudo_heads)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return R for the states, as `HeadMixing` returns alpha."""
        return self.value()


def mix(states: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Return pseudo-heads [batch, N, P, M, head_dim] of heads [batch, M, N, head_dim] by alpha [M, M, P] (step 2)."""
    num_heads, _, num_pseudo_heads = alpha.shape
    alpha = alpha.to(states.dtype).permute(2, 1, 0).reshape(num_pseudo_heads * num_heads, num_heads)
    states = states.transpose(1, 2)
    # With one matrix for all tokens `matmul` would join tokens and head_dim, and copy the result into this layout.
    alpha = alpha.expand(*states.shape[:2], -1, -1)
    return torch.matmul(alpha, states).unflatten(2, (num_pseudo_heads, num_heads))


def interleave(states: torch.Tensor) -> torch.Tensor:
    """View pseudo-heads [batch, N, P, M, head_dim] as the virtual sequence [batch, M, N * P, head_dim] (step 3)."""
    return states.flatten(1, 2).transpose(1, 2)


def collapse(states: torch.Tensor, weight: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Collapse virtual tokens [batch, N * P, H, head_dim] to heads [batch, N, H, head_dim] by R (step 5)."""
    states, weight = states.unflatten(1, (-1, num_pseudo_heads)), weight.to(states.dtype)
    if weight.shape[1] == num_pseudo_heads:
        # A product and a sum keep no copy of the states for the backward pass.
        return (states * weight.t().unsqueeze(-1)).sum(dim=2)
    # Cores return contiguous states, and some base models rely on it.
    return torch.einsum("hgp,bnpgd->bnhd", weight.unflatten(1, (-1, num_pseudo_heads)), states).contiguous()


class MixedHeads(NamedTuple):
    """Hold the weights by which an "iha" layer mixes, rotates and collapses its heads (IHA, Algorithm 1).

    It is the `virtual_heads` of such a layer: the class by which `virtual_attention` makes virtual tokens."""

    q_mix: torch.Tensor  # alpha^Q, [H, H, P]
    k_mix: torch.Tensor  # alpha^K, [G, G, P]
    v_mix: torch.Tensor  # alpha^V, [G, G, P]
    collapse: torch.Tensor  # R, [H, P] or [H, H * P]
    # (cos, sin) of R_p, each [P, head_dim]. R_p rotates pseudo-head p within its token; `None` for shared positions.
    rotation: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation) -> "MixedHeads":
        """Return the weights of a module for base states."""
        return cls(module.q_mix(query), module.k_mix(key), module.v_mix(value), module.collapse(query), rotation)

    def attend(
        self,
        core: Callable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run steps 2 to 5 on base states, which `core` sees as the virtual sequence.

        `core` is a function of queries, keys, values, a mask and `kwargs`, all in virtual tokens. It returns the
        output [batch, N * P, H, head_dim] and weights. Return the output [batch, N, H, head_dim] and those weights."""
        query = expand(query, self.q_mix, self.rotation)
        key = expand(key, self.k_mix, self.rotation)
        value = expand(value, self.v_mix)
        output, attn_weights = core(query, key, value, attention_mask, **kwargs)
        return collapse(output, self.collapse, self.q_mix.shape[-1]), attn_weights

    def step(self, *args) -> torch.Tensor:
        """Return the output of one new token, by `absorbed_attention` of the arguments."""
        return absorbed_attention(self, *args)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate states [..., head_dim] by RoPE tables that broadcast to them."""
    half = states.shape[-1] // 2
    # This equals states * cos + rotate_half(states) * sin to the last bit, in fewer passes.
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return states * cos + states.roll(half, dims=-1) * sin


def expand(
    states: torch.Tensor, alpha: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the virtual sequence [batch, M, N * P, head_dim] of heads [batch, M, N, head_dim] (steps 2, 3, R_p)."""
    states = mix(states, alpha)
    if rotation is not None:
        cos, sin = (table.to(states.dtype).unsqueeze(1) for table in rotation)
        states = rotate(states, cos, sin)
    return interleave(states)


def token_attentions(
    attentions: tuple[torch.Tensor, ...], num_tokens: int, paired: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Return attention maps over tokens, [batch, H, N, keys], of a call with `num_tokens` tokens N.

    Maps over virtual tokens, [batch, H, N * P, keys * P], are summed over the P of a key and averaged over the P of a
    query. In a layer of `paired` heads, [batch, H / P, N * P, keys * P], each virtual query is a head's own. Other
    maps stay as they are."""
    maps = []
    for weights, is_paired in zip(attentions, paired, strict=True):
        split = (-1, weights.shape[-2] // num_tokens)
        of_keys = weights.unflatten(-1, split).sum(-1).unflatten(-2, split)  # [batch, heads, N, P, keys]
        maps.append(of_keys.movedim(3, 1).flatten(1, 2) if is_paired else of_keys.mean(-2))
    return tuple(maps)


def virtual_positions(position_ids: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Return positions n * P + p of virtual tokens, [batch, N * P], from positions n of tokens, [batch, N]."""
    offsets = torch.arange(num_pseudo_heads, device=position_ids.device)
    return (position_ids[..., None] * num_pseudo_heads + offsets).flatten(-2)


def virtual_kwargs(kwargs: dict, num_pseudo_heads: int) -> dict:
    """Convert the keyword arguments by which cores find windows and packed documents to virtual tokens.

    Positions become n * P + p even where RoPE shares n: a core would take a repeated position for a new document."""
    virtual = dict(kwargs)
    if kwargs.get("position_ids") is not None:
        virtual["position_ids"] = virtual_positions(kwargs["position_ids"], num_pseudo_heads)
    for name in ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            virtual[name] = kwargs[name] * num_pseudo_heads
    return virtual


class Overlay:
    """Show an object, such as a config or a cache, with the attributes of `overrides` in place of its own."""

    def __init__(self, target: Any, **overrides):
        self._target, self._overrides = target, overrides

    def __getattr__(self, name: str) -> Any:
        return self._overrides[name] if name in self._overrides else getattr(self._target, name)


def is_exported() -> bool:
    """Return whether `torch.export` traces this call, other than by Dynamo.

    In PyTorch 2.11 whatever Dynamo traces, also for `torch.compile`, is told that it is exported."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_absorbed(core: str, config: Any, dropout: float, states: torch.Tensor, num_keys: int) -> bool:
    """Return whether `step` of virtual heads takes one new token: where it can and is faster."""
    # On a CPU, expanding is faster for few tokens (research/benchmarks/default_form.py). A comparison of lengths would
    # bound exports.
    few = states.device.type == "cpu" and (is_exported() or num_keys < 64 or len(states) * num_keys < 128)
    can = config.num_pseudo_heads > 1 and config.pseudo_collapse == "per_head" and not dropout
    return core == "sdpa" and can and not few


def absorbed_attention(
    weights: MixedHeads,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None = None,
    attention_mask: torch.Tensor | None = None,
    product_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the output [batch, 1, H, head_dim] of one new token (IHA, Algorithm 1, steps 2 to 5).

    It rebuilds no pseudo-key or pseudo-value, because mixing and rotation are linear. For query pseudo-head i and key
    pseudo-head j of a head in group g,

        q_i . R_j sum_m alpha_K[m, g, j] k_m = sum_m (alpha_K[m, g, j] R_j^T q_i) . k_m

    The bracket is as small as a query. Mixing and rotation of the keys move into the query, and the scores are one
    product with the cache as it is. In the same way alpha_V moves behind the sum over the cached values, and the
    collapse moves before it: sum_i R[h, i] (softmax_i V) = (sum_i R[h, i] softmax_i) V.

    Args:
        weights: those of the layer, with a collapse [H, P].
        query: [batch, H, 1, head_dim], rotated as the cached keys are.
        key, value: [batch, G, N, head_dim]. Without a mask the last one is the new token's.
        scaling: factor of the scores.
        window: W in tokens, or `None`; ignored with a mask.
        attention_mask: boolean or additive [batch or 1, H or 1, P, N * P] over virtual tokens, or `None`.
        product_dtype: dtype of the products where those of the cache's own are slow, or `None`."""
    # Autocast would round what is in float32 on purpose.
    with torch.autocast(query.device.type, enabled=False):
        batch, heads, _, head_dim = query.shape
        num_pseudo_heads, dtype = weights.collapse.shape[1], value.dtype
        fast_dtype = product_dtype or dtype
        if attention_mask is None and window is not None:
            # For all pseudo-heads but the last, the window begins one token earlier.
            key, value = key[:, :, -window - 1 :], value[:, :, -window - 1 :]
        groups, num_keys = key.shape[1:3]
        query = query.to(fast_dtype)
        q_mix, k_mix, v_mix = (alpha.to(fast_dtype) for alpha in weights[:3])
        k_mix, v_mix = (alpha.repeat_interleave(heads // groups, dim=1) for alpha in (k_mix, v_mix))
        chunk = num_keys if key.dtype == fast_dtype else WIDENED_TOKENS

        query = torch.matmul(q_mix.flatten(1).t() * scaling, query.squeeze(2))
        query = query.view(batch, heads, num_pseudo_heads, 1, head_dim)
        if weights.rotation is not None:
            cos, sin = (table.to(fast_dtype) for table in weights.rotation)
            # R_i, then R_j^T for every j, [batch, H, i, j, head_dim]
            query = rotate(rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)), cos, -sin)
        # [batch, m, H * i * j, head_dim]
        absorbed = (query.unsqueeze(1) * k_mix[:, :, None, :, None]).flatten(2, 4)
        parts = [_scores(absorbed, keys.to(fast_dtype)) for keys in key.split(chunk, dim=2)]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)  # `cat` copies one tensor too
        scores = scores.view(batch, heads, num_pseudo_heads, num_pseudo_heads, num_keys)

        if attention_mask is not None:
            # [batch, heads, i, N * j] as [batch, heads, i, j, N]
            mask = attention_mask.unflatten(-1, (num_keys, num_pseudo_heads)).transpose(-1, -2)
            lowest = torch.finfo(scores.dtype).min  # padding sees nothing, and -inf alone would give NaN
            scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
        else:
            hidden = torch.full((num_pseudo_heads,) * 2, -torch.inf, dtype=scores.dtype, device=scores.device)
            scores[..., -1] += hidden.triu(1)
            if window is not None and num_keys == window + 1:
                scores[..., 0] += hidden.tril()
        # The softmax is in float32 at least, as in the eager core.
        probabilities = torch.softmax(scores.flatten(-2), dim=-1, dtype=torch.promote_types(fast_dtype, torch.float32))

        collapse = weights.collapse.to(probabilities.dtype).unsqueeze(1)
        collapsed = torch.matmul(collapse, probabilities).to(fast_dtype)
        collapsed = collapsed.view(batch, 1, heads * num_pseudo_heads, num_keys)
        pairs = zip(collapsed.split(chunk, dim=-1), value.split(chunk, dim=2))
        output = sum(_weighted_sum(shares, values.to(fast_dtype)) for shares, values in pairs)
        output = output.unflatten(2, (heads, num_pseudo_heads))  # [batch, m, H, j, head_dim]
        return (output * v_mix.unsqueeze(-1)).sum(dim=(1, 3)).unsqueeze(1).to(dtype)


def _scores(absorbed: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return sum_m absorbed[m] . key[m], [batch, rows, N].

    `absorbed` is [batch, G, rows, head_dim], and `key` is [batch, G, N, head_dim]."""
    if key.device.type != "cpu":
        return torch.matmul(absorbed.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2).transpose(1, 2))
    if key.dtype == torch.float32:
        scores = absorbed.new_zeros(len(key), absorbed.shape[2], key.shape[2])
        for m in range(key.shape[1]):
            scores.baddbmm_(absorbed[:, m], key[:, m].transpose(1, 2))
        return scores
    # One product over all cached heads rounds a score once and is faster in half precision. It goes row by row of the
    # batch, because a batched product would first transpose the keys.
    rows = zip(absorbed.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2))
    return torch.stack([torch.mm(queries, keys.t()) for queries, keys in rows])


def _weighted_sum(shares: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return shares @ value, [batch, G, rows, head_dim], of shares [batch, 1, rows, N] and values of each of G heads.

    A GPU would compute the few rows of a head by one of its many processors, so there N is split."""
    whole = 0 if value.device.type == "cpu" else value.shape[2] // SPLIT_TOKENS * SPLIT_TOKENS
    output = torch.matmul(shares[..., whole:], value[:, :, whole:])
    if whole:
        shares = shares[..., :whole].unflatten(-1, (-1, SPLIT_TOKENS)).transpose(2, 3)
        output = output + torch.matmul(shares, value[:, :, :whole].unflatten(2, (-1, SPLIT_TOKENS))).sum(dim=2)
    return output


def block_size(window: int) -> int:
    """Return the number of queries in a block for a window of `window` keys."""
    return max(MIN_BLOCK, window // 4)


def window_attention(
    core: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, L, H, head_dim] of causal attention, within `sliding_window` keys unless it is `None`.

    A dense mask costs O(L^2) time and memory, whatever the window, and is faster where L is little longer. Else every
    block of queries gets the keys that its window reaches, and all go through the core in one call, as a batch with
    one small mask, at a cost of O(L * window). Blocks of keys overlap, and are views: copies would be kept for the
    backward pass, (block + window) / block times the states."""
    (batch, _, length, _), window = query.shape, sliding_window
    if window is None or length <= window:
        return core(module, query, key, value, None, **kwargs)
    if length - window <= MIN_BLOCK:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        return core(module, query, key, value, mask[None, None], **kwargs)
    # Overlapping blocks of several rows are no view, but those of one row that joins them are.
    if batch > 1 and length <= JOINED_ROW:
        states = (query, key, value)
        query, key, value = (each.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for each in states)
        output = _attend_in_blocks(core, module, query, key, value, window, length, **kwargs)
        return output.view(batch, length, *output.shape[2:]), None
    rows = zip(*(states.split(1) for states in (query, key, value)))
    outputs = [_attend_in_blocks(core, module, q, k, v, window, length, **kwargs) for q, k, v in rows]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), None


def _attend_in_blocks(core: Callable, module, query, key, value, window: int, row: int, **kwargs) -> torch.Tensor:
    """Return the output of `window_attention` for more queries than the window has keys.

    The L tokens are of rows of `row` tokens, which do not see one another."""
    (_, heads, length, _), groups = query.shape, query.shape[1] // key.shape[1]
    block = min(block_size(window), length - window)
    last = (length - window) % block
    i = torch.arange(block, device=query.device)[:, None]
    j = torch.arange(block + window, device=query.device)
    mask, view = (i < j) & (j <= i + window), Overlay(module, num_key_value_groups=1)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, block: int) -> torch.Tensor:
        # The heads of a group are rows of one head, because a core would copy the keys for each of them.
        query = query.unflatten(2, (-1, block)).unflatten(1, (-1, groups)).permute(0, 3, 1, 2, 4, 5)
        query = query.flatten(3, 4).flatten(0, 1)  # [blocks, G, groups * block, head_dim]
        key, value = (x.unfold(2, block + window, block).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (key, value))
        seen = mask[None, :block, : block + window]
        if row < length:
            places = torch.arange(first, first + len(query) * block, device=query.device).view(-1, block, 1)
            seen = seen & (places[:, :1] - window + j[: block + window] >= places // row * row)
        output, _ = core(view, query, key, value, seen.repeat(1, groups, 1)[:, None], **kwargs)
        return output.unflatten(1, (groups, block)).permute(0, 2, 3, 1, 4).reshape(1, -1, heads, value.shape[-1])

    # The first queries see every key before them. As a view they would keep all queries for the backward pass. The
    # others go in blocks, the last one shorter, each with its keys and the `window` before. No query sees the first of
    # these. Without it, or with slices of the queries, autograd would fill zeros as long as the states.
    start, query, end = query.split((window, length - window - last, last), dim=2)
    output, _ = core(module, start.contiguous(), key[:, :, :window], value[:, :, :window], None, **kwargs)
    outputs = [output, attend(query, key[:, :, : length - last], value[:, :, : length - last], window, block)]
    if last > 0:
        outputs.append(attend(end, key[:, :, -window - last :], value[:, :, -window - last :], length - last, last))
    return torch.cat(outputs, dim=1)


def has_varlen(states: torch.Tensor, head_dim: int, dropout: float) -> bool:
    """Return whether `varlen_attn` computes the attention of the states after autocast.

    It takes half precision on a GPU from Ampere on, heads of 8 to 256 entries by eights, and no dropout."""
    if varlen_attn is None or states.device.type != "cuda" or dropout:
        return False
    if head_dim % 8 or head_dim > 256 or not is_ampere(states.device.index):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else states.dtype
    allowed = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()  # as `sdpa_kernel` says
    return allowed and dtype in (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def is_ampere(device: int | None) -> bool:
    """Return whether a GPU, by its number, is of the Ampere generation or a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result
def varlen_has_groups() -> bool:
    """Return whether `varlen_attn` takes fewer heads of keys than of queries."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def has_first_keys(mask: Any) -> bool:
    """Return whether a mask is of first keys, int32 [batch, 1, L, 1] or that of `window_keys`, as no other mask is.

    Query v sees the keys u with first_keys[v] <= u <= v."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32


def window_keys(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the mask of first keys of a window of `window` keys without documents or padding, for every batch.

    It is [1, 1, length, window], all columns the same in memory, so that compiled code knows the window, and that
    nothing has to be looked up."""
    first = (torch.arange(length, dtype=torch.int32, device=device) - (window - 1)).clamp(min=0)
    return first[None, None, :, None].expand(-1, -1, -1, window)


def plain_window(first_keys: torch.Tensor) -> int | None:
    """Return the window of a mask of `window_keys`, and `None` for any other mask of first keys."""
    return first_keys.shape[-1] if first_keys.shape[-1] > 1 else None


class Documents(NamedTuple):
    """Hold what a mask of first keys says of all its rows."""

    # The starts of documents among the batch * L tokens of all rows, and the last end, int32 [documents + 1].
    bounds: torch.Tensor
    longest: int
    reach: int  # the most keys that a query sees


def documents_of(first_keys: torch.Tensor) -> Documents:
    """Return the documents of a mask of first keys, found once and kept beside it. A GPU waits for the answer."""
    if not hasattr(first_keys, "documents"):
        first = first_keys[:, 0, :, 0]
        seen = torch.arange(1, first.shape[1] + 1, device=first.device) - first
        bounds = torch.nn.functional.pad((seen == 1).flatten().nonzero().flatten(), (0, 1), value=seen.numel()).int()
        longest, reach = torch.stack((bounds.diff().max(), seen.max())).tolist()
        first_keys.documents = Documents(bounds, longest, reach)
    return first_keys.documents


def first_key_attention(
    core: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_keys: torch.Tensor,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, L, H, head_dim] of attention under a mask of first keys and a window.

    Query v sees the keys u with first_keys[v] <= u <= v and v - sliding_window < u. The mask is that of documents and
    a window. Documents go one by one, or on a GPU in half precision in one call of PyTorch's FlashAttention, and no
    dense mask is made of more than MIN_BLOCK queries. In an "iha" layer the cost is O(N W P^2).

    Args:
        core: an attention function of Transformers that takes a boolean mask.
        query, key, value: [batch, H or G, L, head_dim].
    """
    batch, _, length, _ = query.shape
    fast = query.shape[-1] == value.shape[-1] and has_varlen(query, query.shape[-1], kwargs.get("dropout", 0))
    if (plain := plain_window(first_keys)) is not None:
        window = min(plain, sliding_window or plain)
        if fast:
            bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
            return varlen_attention(Documents(bounds, length, window), module, query, key, value, window, **kwargs)
        return window_attention(core, module, query, key, value, None, window, **kwargs)
    if torch.compiler.is_compiling() or length <= MIN_BLOCK:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place
        mask = (distance >= 0) & (place >= first_keys)
        if sliding_window is not None:
            mask = mask & (distance < sliding_window)
        return core(module, query, key, value, mask, **kwargs)
    documents = documents_of(first_keys)
    window = min(documents.reach, sliding_window or documents.reach)  # as long as a document, it hides nothing
    if fast:
        return varlen_attention(documents, module, query, key, value, window, **kwargs)
    if documents.longest == length and len(documents.bounds) == batch + 1:
        return window_attention(core, module, query, key, value, None, window, **kwargs)
    # The gradient of a split is one concatenation; that of each slice would be a tensor as long as all documents.
    lengths = documents.bounds.diff().tolist()
    rows = zip(*(states.transpose(0, 1).flatten(1, 2).split(lengths, dim=1) for states in (query, key, value)))
    outputs = [
        # Blocks copy the queries. One document that keeps a view would keep all of them for the backward pass.
        window_attention(core, module, q[None].contiguous(), k[None], v[None], None, window, **kwargs)[0]
        for q, k, v in rows
    ]
    return torch.cat(outputs, dim=1).view(batch, length, *outputs[0].shape[2:]), None


def varlen_attention(
    documents: Documents,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute `first_key_attention` by one call of FlashAttention on the tokens of all rows."""
    bounds, longest = documents.bounds, documents.longest
    batch, length = query.shape[0], query.shape[2]
    options: dict = {"scale": scaling, "window_size": (-1 if window >= longest else window - 1, 0)}
    if query.shape[1] > key.shape[1]:
        if varlen_has_groups():
            options["enable_gqa"] = True
        else:
            groups = query.shape[1] // key.shape[1]
            key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    # Autocast leaves rotated queries and keys in float32, and does not reach this operator.
    query, key, value = (states.to(value.dtype).transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    output = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    return output.unflatten(0, (batch, length)), None


def keep_window_edge(cache: Cache, more: list[int], sliding_window: int | None) -> None:
    """Make each sliding layer of a fresh stock cache keep as many more tokens as `more` says, one where P > 1.

    A window of W * P virtual tokens reaches from (n, p) back to (n - W, p + 1). All pseudo-heads but the last still
    see token n - W, which a cache for a window of W tokens has dropped."""
    for layer, tokens in zip(cache.layers, more):
        if tokens == 0 or not lacks_window_edge(layer, sliding_window):
            continue
        if layer.get_seq_length() > 0:
            raise ValueError(
                f"The cache was filled for a window of sliding_window={sliding_window} tokens, but a sliding layer "
                f"of this model needs {tokens} more. Pass a new cache, or none: the model makes its own."
            )
        name = _length_name(layer)
        setattr(layer, name, sliding_window + tokens)
        if layer.is_initialized and name == "max_cache_len":
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])  # `generate` has allocated it


def lacks_window_edge(layer: Any, sliding_window: int | None) -> bool:
    """Return whether a layer of a cache keeps what a window of tokens reaches, and no more."""
    # A recurrent layer does not say whether it slides. A layer that was made shorter keeps its length.
    return getattr(layer, "is_sliding", False) and getattr(layer, _length_name(layer)) == sliding_window


def _length_name(layer: Any) -> str:
    """Return the name of a sliding layer's length: a dynamic layer has a window, a static one a length."""
    return "sliding_window" if hasattr(layer, "sliding_window") else "max_cache_len"
