"""Describe kind "knocking_heads".

Exact start: linear maps are identities. The MLP of the values has U = D = I and G = 0, so it is 2 (v * 1/2) = v.
"""

import torch

from iha.layer_cost import Cost
from modeling_iha import IHAConfig

from . import Companion, mha


def start(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return identity maps."""
    options = config.options_of("knocking_heads")
    d = config.head_dim
    linear = [options.queries and "q_map", options.keys and "k_map", options.values == "linear" and "v_map"]
    state = {f"{name}.weight": torch.eye(d) for name in linear if name}
    if options.values == "mlp":
        state |= {"v_map.up": torch.eye(d), "v_map.gate": torch.zeros(d, d), "v_map.down": torch.eye(d)}
    return state


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of multi-head attention and of the maps of every token's heads."""
    options = config.options_of("knocking_heads")
    d = config.head_dim
    matrices = {None: 0, "linear": 1, "mlp": 3}[options.values]
    queries = options.queries * config.num_attention_heads
    groups = config.num_key_value_heads
    products = d * d * (queries + groups * (options.keys + matrices))
    return mha.cost(config, tokens, window, form) + Cost(
        parameters=d * d * (options.queries + options.keys + matrices),
        prefill=tokens * products,
        training=3 * tokens * products,
        decode=products,
    )


COMPANION = Companion(
    card="knocking-heads attention: maps that all heads share act on the values, and where configured on the queries "
    "and keys. Linear maps only re-parametrise the projections.",
    paper="Zhou et al., 2025, [Knocking-Heads Attention](https://arxiv.org/abs/2510.23052)",
    cost=cost,
    start=start,
    control="v_proj.weight",
)
