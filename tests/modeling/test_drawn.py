"""Draw models and calls, and hold what every one of them promises (tests/drawn.py says what is drawn)."""

from dataclasses import replace

import pytest
import torch
from drawn import (
    CORES,
    Call,
    Decoder,
    Generation,
    OwnModel,
    calls,
    cases,
    decoders,
    generations,
    models,
    own_models,
    reference_of,
)
from helpers import (
    FP32,
    FP64,
    assert_close,
    causal_4d,
    cumulative_lengths,
    gradients,
    logits_in_chunks,
    packing,
    random_ids,
    random_model,
    reference_logits,
    small_config,
)
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from modeling_iha.transformers_versions import CACHE


pytestmark = pytest.mark.usefixtures("cpu_cores")
# Rounding to bfloat16 moves the logits of tiny models by some hundredths of their size.
TOLERANCE = {"float64": FP64, "float32": FP32, "bfloat16": 0.1, "float16": 0.03}
FULL_PRECISION = ("float32", "float64")


def drawn(share, **arguments):
    """Run a test on drawn arguments, on a share of the examples of the profile."""
    # The fixtures of the module change nothing from one example to the next.
    options = {"suppress_health_check": list(HealthCheck)}
    count = max(1, round(share * settings.default.max_examples))
    return lambda test: settings(max_examples=count, **options)(given(**arguments)(test))


def assert_gradients_close(actual, expected, tolerance):
    """Compare gradients by name, each with its largest entry.

    A gradient that is zero but for rounding, as that of the bias of keys, is compared with the largest of all: "eager"
    rounds probabilities to float32, also in float64."""
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(gradient.abs().max(), 1e-2 * largest)
        assert (actual[name] - gradient).abs().max() <= 10 * tolerance * scale, name


# Eager attention, from which all others are told


@drawn(0.4, drawn=own_models(("eager",), ("float64",)), length=st.integers(1, 9))
def test_eager_attention_is_the_loops_of_the_papers(drawn, length):
    model, input_ids = drawn.build(), random_ids(2, length)
    logits = model(input_ids, use_cache=False).logits
    expected, weights = reference_logits(model, input_ids)
    assert_close(logits, expected, FP64)
    assert_gradients_close(gradients(logits, dict(model.named_parameters())), gradients(expected, weights), FP64)


@drawn(0.2, drawn=decoders(("eager",), ("float64",), names=("llama",), ways=("interleaved", "paired")))
@torch.no_grad()
def test_a_decoder_in_place_is_the_kind_of_its_name(drawn):
    """Compare a Llama with `IHAForCausalLM` of the same weights, on single rows."""
    model = drawn.build()
    same = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "head_dim", "rms_norm_eps")
    same += ("num_attention_heads", "num_key_value_heads", "rope_parameters", "mixing_scale", "num_pseudo_heads")
    kind = "iha" if drawn.way == "interleaved" else "paired_heads"
    slides = [drawn.given_window is not None and layer in drawn.layers for layer in (0, 1)]
    config = IHAConfig(
        **{name: getattr(model.config, name) for name in same},
        attention_kinds=[kind if layer in drawn.layers else "mha" for layer in (0, 1)],
        layer_types=["sliding_attention" if each else "full_attention" for each in slides],
        sliding_window=drawn.given_window,
        pseudo_positions="shared",
        pseudo_collapse=drawn.collapse,
    )
    expected = IHAForCausalLM._from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    expected.load_state_dict(model.state_dict())
    for length in (1, 9, 24):
        ids = random_ids(1, length)
        assert_close(model(ids, use_cache=False).logits, expected(ids, use_cache=False).logits, FP64)


# Any call


# Rows of one token, for whose mask SDPA took the rows of a batch for queries: a crash, or a wrong row where there are
# as many as heads of a group.
@example((OwnModel(("iha", "mha"), (False, False), None, 2, 4, 2, "sdpa"), Call((1,), (("none", 0),) * 3, "padding")))
@example((Decoder("llama", "plain", SDPA_IN_BLOCKS), Call((1,), (("none", 0), ("all", 1)), "padding")))
# A row of padding under a user's mask: the lowest float64 was -inf in float32.
@example((OwnModel(("dcmha",), (False,), None, 2, 4, 2, "sdpa", "float64"), Call((5,), (("left", 2),), "bool", True)))
@drawn(2.0, case=cases())
@torch.no_grad()
def test_a_row_is_what_it_is_alone(case):
    """Compare every real token of a call with eager attention in float64 on its row alone."""
    drawn, call = case
    model = drawn.build()
    expected = call.logits_alone(reference_of(model), counts_padding=not drawn.is_flash)
    actual = call.logits(model).double()
    assert actual.isfinite().all()
    if call.real.any():
        assert_close(actual[call.real], expected[call.real], TOLERANCE[drawn.dtype])


WITH_GRADIENTS = [core for core in CORES if core != "flex_attention"]  # which has none on a CPU


@drawn(
    0.8,
    case=cases(WITH_GRADIENTS, FULL_PRECISION, caches=("dynamic", "whole")),
    checkpointing=st.sampled_from((None, {"use_reentrant": False}, {"use_reentrant": True})),
)
def test_a_row_is_learned_as_alone(case, checkpointing):
    """Compare the gradients of the logits of real tokens with those of eager attention in float64 on single rows."""
    drawn, call = case
    model = drawn.build()
    reference = reference_of(model)
    model.train()
    if checkpointing is not None and call.cache is None:  # it takes no cache
        model.gradient_checkpointing_enable(checkpointing)
    weight = torch.randn(*call.real.shape, model.config.vocab_size, generator=torch.Generator().manual_seed(2))
    weight = weight.double() * call.real[..., None]
    (call.logits(model) * weight).sum().backward()
    (call.logits_alone(reference, counts_padding=not drawn.is_flash) * weight).sum().backward()
    actual, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (model, reference))
    unused = {name for name, gradient in expected.items() if gradient is None}
    assert not any(actual[name].any() for name in unused if actual[name] is not None)
    expected = {name: gradient for name, gradient in expected.items() if name not in unused}
    assert_gradients_close(actual, expected, TOLERANCE[drawn.dtype])


@st.composite
def prompts(draw, dtypes, modes):
    model = draw(models(dtypes=dtypes))
    return model, draw(generations(model, modes))


@drawn(0.6, case=prompts(FULL_PRECISION, ("greedy",)))
@torch.no_grad()
def test_greedy_tokens_are_those_of_each_row_alone(case):
    drawn, generation = case
    model = drawn.build()
    reference = reference_of(model)
    generated = generation.run(model)
    for row, length in enumerate(generation.prompts):
        ids = generated.sequences[row, -length - generation.new_tokens : -1]
        expected = reference(ids[None], use_cache=False).logits[0, -generation.new_tokens :]
        assert_close(torch.stack(generated.logits, dim=1)[row].double(), expected, TOLERANCE[drawn.dtype])
        assert torch.equal(generated.sequences[row, -generation.new_tokens :], expected.argmax(-1))


@drawn(0.2, case=prompts(("float64",), ("beams", "samples")))
@torch.no_grad()
def test_beams_and_samples_are_those_without_a_cache(case):
    drawn, generation = case
    model = drawn.build()
    expected = generation.run(reference_of(model), use_cache=False)
    assert torch.equal(generation.run(model).sequences, expected.sequences)


# What cannot be computed

JOINED = "Packed documents would attend to one another"
NO_DENSE_MASK = (
    r"attention_mask must be \[batch, tokens\], or .* up to the length of the window and without a static cache"
)


def faults(drawn, call, model):
    """Yield arguments with which a call cannot be computed, and what is said."""
    first, second = call.length // 2, call.length - call.length // 2
    restarting, lengths = packing((first, second), call.rows)[0], cumulative_lengths((first, second))
    ones = torch.ones(call.rows, call.length).long()
    hole = ones.clone()
    hole[:, first] = 0
    if call.length > 1:
        if drawn.is_ours:
            yield restarting | {"attention_mask": ones}, JOINED
            yield restarting | {"attention_mask": ones} | lengths, JOINED
            yield restarting | {CACHE: DynamicCache()}, JOINED
            yield restarting | {CACHE: DynamicCache()} | lengths, JOINED
            if first > 1 and second > 1:
                yield restarting | {"attention_mask": hole}, JOINED
            if drawn.is_flash and call.rows > 1:
                yield restarting, JOINED
        if drawn.is_own and call.rows == 1:
            yield lengths, "cu_seq_lens_q needs position_ids that restart"
        if drawn.is_in_blocks:
            position_ids = torch.arange(call.length)[None]  # OPT would take them from the mask
            for tokens in (call.length - 1, call.length + 1):
                mask = {"attention_mask": torch.ones(call.rows, tokens).long(), "position_ids": position_ids}
                yield mask, rf"attention_mask .* does not fit {call.rows} rows of {call.length}"
    if drawn.has_virtual_heads:
        yield {"is_causal": False}, "is_causal=False: interleaved heads are causal"
    if drawn.is_ours:
        dense = causal_4d(ones, "bool")
        dense_message = "takes attention_mask .* alone" if drawn.is_flash else NO_DENSE_MASK
        longer = torch.nn.functional.pad(dense, (0, 3))
        if call.length > 1:
            yield {"attention_mask": dense[:, :, -1:]}, dense_message  # one row for all queries
        if drawn.window is not None and drawn.window < call.length:
            yield {"attention_mask": dense}, dense_message
            yield {"attention_mask": causal_4d(ones, "additive")}, dense_message
        for cache in (None, DynamicCache()):
            yield {"attention_mask": longer, CACHE: cache}, dense_message
        if drawn.takes_static:
            for mask in (dense, longer):
                static = StaticCache(config=model.config, max_cache_len=call.length + 3)
                yield {"attention_mask": mask, CACHE: static}, dense_message
    if drawn.is_own:
        for mask in (ones[0], ones[:, None], dense[:, :, :-1]):
            yield {"attention_mask": mask}, dense_message


@drawn(1.0, case=cases(dtypes=FULL_PRECISION, caches=()))
@torch.no_grad()
def test_what_cannot_be_computed_is_named(case):
    drawn, call = case
    call = Call((call.length,), (("none", 0),) * call.rows)
    model = drawn.build()
    for arguments, message in faults(drawn, call, model):
        with pytest.raises(ValueError, match=message):
            model(call.input_ids, **{"use_cache": False, **arguments})
    if drawn.is_own and drawn.needs_dense_masks:
        for core in ("flash_attention_2", "flex_attention"):
            model.set_attn_implementation(core)
            with pytest.raises(ValueError, match=f"changes the scores, which attn_implementation='{core}' never"):
                model(call.input_ids)


# Memory

LENGTH = 300


class Squares(TorchDispatchMode):
    """Record the tensors that have an entry for each pair of tokens."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.ndim > 1 and min(each.shape[-2:]) >= LENGTH:
                self.found.append((str(operator), tuple(each.shape)))
        return result


@st.composite
def flat_cases(draw):
    """Draw a call that the flat form can say: of all that is drawn, not dense masks and tokens after cached ones.

    Plain decoders have dense masks for documents, which Transformers makes."""
    model = draw(models(("sdpa", SDPA_IN_BLOCKS)).filter(lambda drawn: drawn.is_in_blocks))
    call = draw(calls(model, length=LENGTH, caches=("dynamic", "static")))
    assume(call.mask not in model.dense_masks and not (call.documents and not model.keeps_documents_flat))
    return model, replace(call, chunks=(LENGTH,))


@drawn(0.3, case=flat_cases(), trains=st.booleans())
def test_a_flat_call_makes_no_square(case, trains):
    """Look at training steps, and at prompts of a forward and of `generate`, which makes some masks itself."""
    drawn, call = case
    model = drawn.build()
    with Squares() as squares, torch.set_grad_enabled(trains and call.cache is None):
        logits = call.logits(model.train(trains))
        if logits.requires_grad:
            logits.sum().backward()
        if call.cache is not None:
            prompts = [LENGTH - count * (place == "left") for place, count in call.padding]
            Generation(tuple(prompts), is_static=call.cache == "static", chunk=None, new_tokens=1).run(model)
    assert not squares.found


@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_squares_are_seen(core):
    """Look at eager attention, and at a prompt after cached tokens."""
    model = random_model(small_config(num_hidden_layers=1))
    model.set_attn_implementation(core)
    with Squares() as squares:
        logits_in_chunks(model, random_ids(1, LENGTH + 1), [1, LENGTH])
    assert squares.found
