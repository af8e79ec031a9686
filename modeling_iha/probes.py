# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Run a decoder of Transformers on a few tokens, to see what its attention modules do and to compare it with itself.

`interleave_heads` examines a plain model (`examine`). Then it and `pair_heads` compare what the model computes with
what it has to compute (`check_same`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from inspect import signature
from typing import NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.generic import maybe_autocast

from .interleaved_attention import attend_on_core, decoder_config
from .modeling_interleaved import backbone_of
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .sdpa_in_blocks import Backend, read_call
from .transformers_versions import CACHE


# The largest difference from the base model, as a share of the largest hidden state.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
# The running `recording` fills this, for its own thread alone.
CALLS: ContextVar[dict] = ContextVar("calls")


class AttentionCall(NamedTuple):
    """Hold what a call of an attention module tells about it."""

    query: torch.Tensor
    head_counts: tuple[int, int, int]  # of queries, keys and values
    is_causal: bool
    has_lengths: bool  # of documents (`cu_seq_lens_q`)


class Examined(NamedTuple):
    """Hold what `examine` found about a plain model."""

    calls: dict[nn.Module, AttentionCall]
    states: list[torch.Tensor]  # hidden states of the probe
    passes_windows: bool
    passes_cu_seq_lens: bool


def examine(model: PreTrainedModel) -> Examined:
    """Return the calls of the attention modules of a plain model, and the hidden states of the probe.

    Raise a ValueError for a model whose calls show that it cannot be interleaved, or that does not run the probe."""
    with recording(model) as calls:
        states, error = try_probe(model)
    # Check the calls before the error: if a model cannot be interleaved, they show the reason, and its own error does
    # not.
    check_calls(model, calls)
    if error is None:
        # Some models branch on the name of their core, and took another branch for the name that records. Run the
        # probe once more under the real name: these are the states to compare with.
        states, error = try_probe(model)
    model_type = model.config.model_type
    if error is not None:
        raise ValueError(f"{model_type} does not run with a padding mask and a cache: {one_line(error)}") from error
    if not all(each.isfinite().all() for each in states):
        raise ValueError(
            f"{model_type} itself returns NaN or infinity for a padded batch: try another dtype or "
            "attn_implementation."
        )
    return Examined(calls, states, passes_windows(model, states), passes_lengths(model))


def check_calls(model: PreTrainedModel, calls: dict[nn.Module, AttentionCall]) -> None:
    """Raise a ValueError for a model whose attention cannot be interleaved, by the recorded calls."""
    model_type = model.config.model_type
    if not calls:
        raise ValueError(
            f"{model_type} does not call attention through the registry of Transformers, so its heads cannot be "
            "interleaved."
        )
    if "reference_sliding_attention" in (getattr(decoder_config(model), "layer_types", None) or ()):
        raise ValueError(
            f"{model_type} cannot be interleaved: its own cache layers keep the prompt in addition to a window."
        )
    for module, call in calls.items():
        name = f"{model_type} cannot be interleaved: {type(module).__name__}"
        if not call.is_causal:
            raise ValueError(f"{name} is not marked as causal self-attention.")
        if not hasattr(module, "layer_idx"):
            raise ValueError(f"{name} has no layer_idx.")
        if getattr(module, "indexer", None) is not None or getattr(module, "compressor", None) is not None:
            raise ValueError(f"{name} chooses or compresses the keys of each query, in a mask over tokens of its own.")


def check_same(model: PreTrainedModel, expected: list[torch.Tensor], claim: str) -> None:
    """Raise a ValueError that begins with `claim` if the hidden states of the probe are not the expected ones."""
    states, error = try_probe(model)
    if error is None:
        difference = relative_difference(expected, states)
        if difference <= TOLERANCE[expected[0].dtype]:
            return
        problem = f"hidden states differ by {difference:.1e}"
    else:
        problem = one_line(error)
    raise ValueError(f"{claim} ({problem}): docs/MODEL_TYPES.md lists the types to use instead.") from error


def try_probe(model: PreTrainedModel) -> tuple[list[torch.Tensor], Exception | None]:
    """Return the hidden states of the probe, or the error that the base model's code raises."""
    try:
        return probe(model), None
    except torch.OutOfMemoryError:  # not a property of the model type
        raise
    except Exception as error:  # whatever it does with a mask or a cache
        return [], error


def probe(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return hidden states of a padded batch, and of a prompt and one token after it in the cache.

    During the probe windows are at most 4 tokens, so that the 6-token prompt exceeds them."""
    backbone = backbone_of(model)
    config = decoder_config(model)
    tokens = torch.arange(3, 17, device=model.device).view(2, 7) % config.vocab_size
    decoders = [module for module in backbone.modules() if isinstance(module, PreTrainedModel)]
    takes_logits_to_keep = any("logits_to_keep" in signature(decoder.forward).parameters for decoder in decoders)
    # `None` keeps Gemma 4 from cropping the rows of the mask, which are virtual tokens (see `prepare_call`).
    options: dict = {"logits_to_keep": None} if takes_logits_to_keep else {}
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with _evaluating(model), _short_windows(model):
        padded = backbone(input_ids=tokens, attention_mask=mask, use_cache=False, **options)[0][mask.bool()]
        prompt = backbone(input_ids=tokens[1:, :6], use_cache=True, **options)
        cache = prompt.get(CACHE)
        if cache is None:  # some base models do not return the cache they make
            cache = DynamicCache(config=config)
            prompt = backbone(input_ids=tokens[1:, :6], use_cache=True, **{CACHE: cache}, **options)
        last = backbone(input_ids=tokens[1:, 6:], use_cache=True, **{CACHE: cache}, **options)
    return [padded, prompt[0], last[0]]


def passes_windows(model: PreTrainedModel, expected: list[torch.Tensor]) -> bool:
    """Return whether a decoder hands its windows to its attention, by the hidden states of the probe.

    Some, such as Qwen2-MoE, have them in their masks alone, which `sdpa_in_blocks` does not get."""
    with _core(model, SDPA_IN_BLOCKS):
        states, error = try_probe(model)
    return error is None and relative_difference(expected, states) <= TOLERANCE[expected[0].dtype]


def passes_lengths(model: PreTrainedModel) -> bool:
    """Return whether a decoder keeps documents apart, and hands their lengths to each of its attention modules.

    Some drop these (`cu_seq_lens_q`), and in others linear attention reads them, but not as it reads a mask. Calls of
    these models, and of those that join documents, keep the masks of the base."""
    config = decoder_config(model)
    if getattr(config, "attention_chunk_size", None) is not None:
        return False
    tokens = torch.arange(3, 10, device=model.device)[None] % config.vocab_size
    backend = Backend.of_model(SDPA_IN_BLOCKS, model.dtype, model.device)
    lengths = read_call(backend, tokens, None, None, None).keyword_arguments()
    try:
        with recording(model) as calls, _evaluating(model):
            backbone_of(model)(input_ids=tokens, use_cache=False, **lengths)
        with _core(model, SDPA_IN_BLOCKS):
            are_apart = keeps_documents_apart(model)
    except Exception:  # whatever the base model's code does with arguments that it does not know
        return False
    return are_apart and all(call.has_lengths for call in calls.values())


def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether a document, which `position_ids` declare, does not depend on the one before it in its row."""
    first = torch.arange(3, 11, device=model.device).view(2, 4)
    second = torch.arange(11, 14, device=model.device).expand(2, 3)
    tokens = torch.cat((first, second), dim=1) % decoder_config(model).vocab_size
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=model.device).expand(2, 7)
    with _evaluating(model):
        states = backbone_of(model)(input_ids=tokens, position_ids=positions, use_cache=False)[0][:, 4:]
    # The rows may share an expert or a product, so the last bits may differ.
    tolerance = 2e-2 if states.dtype.itemsize == 2 else 1e-4
    return relative_difference([states[0]], [states[1]]) <= tolerance


@contextmanager
def recording(model: PreTrainedModel) -> Iterator[dict[nn.Module, AttentionCall]]:
    """Record the calls of a model's attention modules, and yield them by module."""
    token = CALLS.set({})
    try:
        with _core(model, recorded(decoder_config(model)._attn_implementation)):
            yield CALLS.get()
    finally:
        CALLS.reset(token)


@cache  # a name is registered once and stays: no public method removes it
def recorded(core: str) -> str:
    """Register a core under another name, by which it records its calls, and return the name."""

    def record(module, query, key, value, *args, **kwargs):
        is_causal = kwargs.get("is_causal") is not False and getattr(module, "is_causal", True) is not False
        head_counts = query.shape[1], key.shape[1], value.shape[1]
        has_lengths = kwargs.get("cu_seq_lens_q") is not None
        CALLS.get()[module] = AttentionCall(query, head_counts, is_causal, has_lengths)
        return attend_on_core(core, 1, module, query, key, value, *args, **kwargs)

    name = f"recorded_{core.replace('/', '_')}"
    AttentionInterface.register(name, record)
    if core in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[core])
    return name


@contextmanager
def _core(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the decoder attend by another core.

    The public `set_attn_implementation` also changes the configurations of vision towers."""
    config = decoder_config(model)
    own = config._attn_implementation
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = own


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten the windows of the configuration, which masks read, and of the layers, which attention functions get."""
    owners = [decoder_config(model), *model.modules()]
    windows = [(owner, owner.sliding_window) for owner in owners if getattr(owner, "sliding_window", None)]
    try:
        for owner, window in windows:
            owner.sliding_window = min(window, 4)
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Run a model without dropout, gradients and autocast, which rounds more than the comparison allows.

    Quantized layers of bitsandbytes stay in training mode: otherwise they repack their weights for inference on a CPU,
    and what is trained below them gets no gradient any more."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module in modes:
        if type(module).__module__.startswith("bitsandbytes."):
            module.training = True
    try:
        with torch.no_grad(), maybe_autocast(model.device.type, enabled=False):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def relative_difference(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> float:
    """Return the largest difference as a share of the largest expected value of its tensor."""
    shares = []
    for one, other in zip(expected, actual):
        difference = (one.double() - other.double()).abs().max()
        shares.append((difference / one.double().abs().max()).nan_to_num(torch.inf).item())
    return max(shares)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
