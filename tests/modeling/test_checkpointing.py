"""Activation checkpointing changes no loss and no gradient: the second forward sees the same padding and documents."""

from functools import partial

import pytest
import torch
from helpers import (
    BOTH,
    DECODERS,
    HYBRID,
    WAYS,
    assert_close,
    assert_gradients_match,
    interleaved,
    loss_and_gradients,
    packing,
    random_ids,
    random_model,
    small_config,
)


def hybrid():
    return random_model(small_config(**HYBRID, num_pseudo_heads=3, sliding_window=3))


def with_both(kind):
    return random_model(small_config(attention_kinds=kind, **BOTH))


MODELS = {
    "hybrid": hybrid,
    **{f"{kind} with both additions": partial(with_both, kind) for kind in ("mha", "iha", "paired_heads")},
    **{name: partial(interleaved, name) for name in DECODERS},
    "paired": WAYS["paired"],
}
INPUTS = {
    "plain": {},
    "autocast": {},
    "padded": {"attention_mask": torch.tensor([[0, 0] + [1] * 6])},
    "packed": packing((3, 5))[0],
}
# Under autocast PyTorch's reentrant checkpointing sums gradients in another order, those of a plain OLMo 2 too.
CASES = [(inputs, False) for inputs in INPUTS] + [(inputs, True) for inputs in INPUTS if inputs != "autocast"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("inputs", "use_reentrant"), CASES)
@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_changes_no_gradient(name, inputs, use_reentrant):
    """Say nothing of a cache: a model that checkpoints makes none, without which it finds packed documents."""
    model, input_ids = MODELS[name]().train(), random_ids(1, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=inputs == "autocast"):
        loss, expected = loss_and_gradients(model, input_ids, **INPUTS[inputs])
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
        again, actual = loss_and_gradients(model, input_ids, use_cache=None, **INPUTS[inputs])
    assert_close(again, loss)
    assert_gradients_match(actual, {name: gradient.double() for name, gradient in expected.items()}, 2e-5)
    assert all(gradient.abs().max() > 0 for name, gradient in expected.items() if "_mix" in name)
