"""The attention implementations of "iha" layers that start from the base states, and where each of them is used.

A stock core attends over the virtual sequence. These compute the same from the heads' queries, keys and values before the mixing:

| `attn_implementation` | whole inputs, chunks on a cache | one new token |
|---|---|---|
| `"collapse_first"`, the default, on a CPU | `collapse_first_attention` | `absorbed_attention` |
| `"fused_triton"`, on a GPU | `fused_attention` (whole inputs only) | `absorbed_attention` |

Under either name everything else is SDPA: other kinds of layers, the `"all_heads"` collapse, a single pseudo-head, attention dropout, custom
and static-cache masks, traced calls (`torch.compile`, export) and, for "collapse_first", other devices and short inputs.
"""

from collections.abc import Callable

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_tracing

from .absorbed_decode import absorbed_attention
from .collapse_first import collapse_first_attention
from .configuration_iha import IHAConfig
from .triton_kernels import fused_attention


BASE_CORES = ("collapse_first", "fused_triton")
for core in BASE_CORES:
    AttentionInterface.register(core, sdpa_attention_forward)
    AttentionMaskInterface.register(core, sdpa_mask)
SDPA_CORES = ("sdpa", *BASE_CORES)

# The shortest virtual sequence for which collapse-first wins over SDPA on one thread. SDPA shares its heads out among threads, collapse-first only
# single products: with two threads it wins from four times the length on, and with more it has not been measured.
MIN_KEYS = 512


def base_attention(config: IHAConfig, states: torch.Tensor, num_keys: int) -> Callable | None:
    """The function by which an "iha" layer attends from its base states, `None` where it uses a core.

    Args:
        states: [batch, ..., N, any], of the N new tokens and on their device.
        num_keys: how many tokens they see, cached ones included.
    """
    core, num_queries = config._attn_implementation, states.shape[-2]
    if (
        core not in BASE_CORES
        or config.pseudo_collapse != "per_head"
        or config.num_pseudo_heads == 1
        or config.attention_dropout > 0.0
        or is_tracing(states)
    ):
        return None
    if core == "fused_triton":
        if num_queries == 1:
            return absorbed_attention
        return fused_attention if num_queries == num_keys else None
    if states.device.type != "cpu":
        return None
    if num_queries == 1:
        return absorbed_attention
    shortest = MIN_KEYS * torch.get_num_threads() ** 2
    return collapse_first_attention if num_keys * config.num_pseudo_heads >= shortest else None
