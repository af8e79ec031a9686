"""Stand in for FlashAttention-2 with dense CPU code, to test Transformers' flash dispatch without a GPU.

Everything around the kernel is Transformers' own: unpadding, documents from position_ids or cu_seq_lens, the window.
The conventions of the kernel are those of flash_attn 2.1 and later: the causal mask and the window are aligned to the
bottom right corner (the last query sits on the last key), and window_size = (left, right) counts the keys besides the
query's own.
"""

import torch
from transformers import PreTrainedModel, modeling_flash_attention_utils


def install(monkeypatch) -> list[str]:
    """Make `model.set_attn_implementation("flash_attention_2")` work on CPU until the test ends.

    Return a list that takes the name of each kernel function that is called.
    """
    calls = []
    utils = modeling_flash_attention_utils
    functions = (*kernel_functions(calls), None, utils._pad_input, utils._unpad_input)
    monkeypatch.setattr(utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, *args, **kwargs: True)
    return calls


def kernel_functions(calls: list):
    """Return `flash_attn_func` and `flash_attn_varlen_func`, which add their names to `calls`."""

    # Transformers passes only what it finds in these signatures.
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        calls.append("flash_attn_func")
        return torch.stack([attend(*states, softmax_scale, causal, window_size) for states in zip(q, k, v)])

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
    ):
        calls.append("flash_attn_varlen_func")
        # The kernel launches its grid from these: a length that is too small would leave rows unwritten.
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q[-1] == q.shape[0] and cu_seqlens_k[-1] == k.shape[0] == v.shape[0]
        outputs = []
        for i in range(len(cu_seqlens_q) - 1):
            of_queries = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
            of_keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
            outputs.append(attend(q[of_queries], k[of_keys], v[of_keys], softmax_scale, causal, window_size))
        return torch.cat(outputs)

    return flash_attn_func, flash_attn_varlen_func


def attend(q, k, v, softmax_scale, causal, window_size):
    """Attend within one sequence: q `[queries, H, d]`, k and v `[keys, G, d]`, output `[queries, H, d]`."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
    ahead = torch.arange(k.shape[0]) - (torch.arange(q.shape[0]) + k.shape[0] - q.shape[0]).unsqueeze(1)
    left, right = window_size
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)  # a row that sees nothing gives zero
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)
