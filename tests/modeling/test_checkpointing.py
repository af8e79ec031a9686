"""Activation checkpointing changes no loss and no gradient under autocast. test_drawn.py checkpoints without it."""

import pytest
import torch
from helpers import (
    HYBRID,
    WAYS,
    assert_close,
    assert_gradients_match,
    interleaved,
    loss_and_gradients,
    random_ids,
    random_model,
    small_config,
)


MODELS = {
    "hybrid": lambda: random_model(small_config(**HYBRID, num_pseudo_heads=3, sliding_window=3)),
    "qwen3_moe": lambda: interleaved("qwen3_moe"),
    "paired": WAYS["paired"],
}


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_changes_no_gradient_under_autocast(name):
    """Say nothing of a cache: a model that checkpoints makes none.

    PyTorch's reentrant checkpointing sums gradients in another order, those of a plain OLMo 2 too."""
    model, input_ids = MODELS[name]().train(), random_ids(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = loss_and_gradients(model, input_ids)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
        again, actual = loss_and_gradients(model, input_ids, use_cache=None)
    assert_close(again, loss)
    assert_gradients_match(actual, {name: gradient.double() for name, gradient in expected.items()}, 2e-5)
