"""Attend by a kernel that is named as on the Hub, which a stand-in for `get_kernel` loads."""

from types import SimpleNamespace

import fake_flash
import pytest
import torch
from helpers import decoder, random_model, small_config, train_mixing
from transformers import AutoModelForCausalLM, modeling_flash_attention_utils
from transformers.integrations import hub_kernels

from modeling_iha import interleave_heads


NAME = "kernels-community/flash-attn3"


@pytest.fixture
def asked_for(monkeypatch):
    """Load a stand-in for the kernel, and yield the repositories that are asked for and the functions called."""
    calls = []
    flash, varlen = fake_flash.kernel_functions(calls)
    kernel = SimpleNamespace(flash_attn_func=flash, flash_attn_varlen_func=varlen)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda repo, **kwargs: calls.append(repo) or kernel)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    return calls


def models():
    """Return a model of our own and a decoder in place, both with a window."""
    config = small_config(layer_types=["sliding_attention", "full_attention"], sliding_window=4, num_pseudo_heads=2)
    return {"own": random_model(config), "in place": train_mixing(interleave_heads(decoder("llama"), 2, [0], 4))}


@pytest.mark.parametrize("way", ["own", "in place"])
def test_a_kernel_of_the_hub_by_its_name(way, asked_for, tmp_path):
    """Compare documents in one row, as a model that was asked, and as one that was saved and loaded."""
    model = models()[way].eval()
    ids = torch.arange(13)[None]
    positions = torch.cat((torch.arange(7), torch.arange(6)))[None]
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        expected = model(**inputs).logits
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, attn_implementation=NAME)
        model.set_attn_implementation(NAME)
        for other in (model, loaded):
            asked_for.clear()
            assert (other(**inputs).logits - expected).abs().max() < 1e-5 * expected.abs().max()
            assert set(asked_for) == {"flash_attn_varlen_func"}


def test_the_kernel_is_asked_for_by_its_repository(asked_for):
    models()["in place"].set_attn_implementation(NAME)
    assert asked_for == [NAME]
