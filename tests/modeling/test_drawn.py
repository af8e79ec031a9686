"""Draw models and calls, and hold what every one of them promises (tests/drawn.py says what is drawn)."""

import pytest
import torch
from drawn import CORES, cases, generations, models, reference_of
from helpers import FP32, FP64, assert_close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


pytestmark = pytest.mark.usefixtures("cpu_cores")
# Rounding to bfloat16 moves the logits of tiny models by some hundredths of their size.
TOLERANCE = {"float64": FP64, "float32": FP32, "bfloat16": 0.1}
FULL_PRECISION = ("float32", "float64")


def drawn(share, **arguments):
    """Run a test on drawn arguments, on a share of the examples of the profile."""
    # The fixtures of the module change nothing from one example to the next.
    options = {"suppress_health_check": list(HealthCheck)}
    count = max(1, round(share * settings.default.max_examples))
    return lambda test: settings(max_examples=count, **options)(given(**arguments)(test))


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
    1.0,
    case=cases(WITH_GRADIENTS, FULL_PRECISION, with_cache=False),
    checkpointing=st.sampled_from((None, {"use_reentrant": False}, {"use_reentrant": True})),
)
def test_a_row_is_learned_as_alone(case, checkpointing):
    """Compare the gradients of the logits of all real tokens with those of eager attention in float64 on single rows.

    A gradient that is zero but for rounding, as that of the bias of keys, is compared with the largest of all."""
    drawn, call = case
    model = drawn.build()
    reference = reference_of(model)
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(checkpointing)
    weight = torch.randn(*call.real.shape, model.config.vocab_size, generator=torch.Generator().manual_seed(2))
    weight = weight.double() * call.real[..., None]
    (call.logits(model) * weight).sum().backward()
    (call.logits_alone(reference, counts_padding=not drawn.is_flash) * weight).sum().backward()
    largest = max(parameter.grad.abs().max() for parameter in reference.parameters() if parameter.grad is not None)
    for (name, actual), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert actual.grad is None or not actual.grad.any(), name
            continue
        difference = (actual.grad - expected.grad).abs().max()
        scale = max(expected.grad.abs().max(), 1e-3 * largest)
        assert difference <= 10 * TOLERANCE[drawn.dtype] * scale, name


@st.composite
def prompts(draw):
    model = draw(models(dtypes=FULL_PRECISION))
    return model, draw(generations(model))


@drawn(0.7, case=prompts())
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
