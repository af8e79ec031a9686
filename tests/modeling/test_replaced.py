"""Wrap, replace and leave out layers of an interleaved decoder, and call it by other ways than usual."""

import copy

import pytest
import torch
from helpers import assert_close, decoder, random_ids, train_mixing
from helpers import uncached_logits as logits
from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

from modeling_iha import interleave_heads


class Renamed(nn.Module):
    """A layer whose attention has another name, as an engine that replaces layers has it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.attention_type = layer, getattr(layer, "attention_type", None)

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_no_other_core_attends(core):
    model = interleave_heads(decoder("llama"), 2)
    model.config._attn_implementation = core
    with pytest.raises(RuntimeError, match="leave out the interleaved heads: call model.set_attn_implementation"):
        model(random_ids(1, 5))


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]], ids=["one", "all"])
def test_wrapped_layers_run(layers):
    model, tokens = train_mixing(interleave_heads(decoder("llama"), 2)), random_ids(1, 5)
    expected = logits(model, input_ids=tokens)
    for i in layers:
        model.model.layers[i] = Renamed(model.model.layers[i])
    assert logits(model, input_ids=tokens).equal(expected)


@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_a_plain_module_in_the_place_of_one_attends_over_tokens(core):
    """Give it the model's configuration, and compare with a model whose layer was left plain; rows are padded."""
    model = train_mixing(interleave_heads(decoder("llama", core=core), 2))
    other = interleave_heads(decoder("llama", core=core), 2, layers=[0, 2])
    other.load_state_dict(model.state_dict(), strict=False)
    plain = LlamaAttention(model.config, 1)
    plain.load_state_dict(model.model.layers[1].self_attn.state_dict(), strict=False)
    model.model.layers[1].self_attn = plain
    tokens, real = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    real[0, :3] = 0
    expected = logits(other, input_ids=tokens, attention_mask=real)
    assert_close(logits(model, input_ids=tokens, attention_mask=real)[real.bool()], expected[real.bool()])


def test_layers_may_be_passed_by():
    """Cut off layers, end early as `assistant_early_exit` does, and run a model within another's forward."""
    model, tokens = train_mixing(interleave_heads(decoder("llama"), 2)), random_ids(1, 5)
    inner = interleave_heads(decoder("llama"), 3)
    short = copy.deepcopy(model)
    short.config.num_hidden_layers = 2
    expected = logits(short, input_ids=tokens)
    model.model.layers = model.model.layers[:2]
    model.model.layers[1].register_forward_pre_hook(lambda *_: inner(tokens) and None)
    assert logits(model, input_ids=tokens).equal(expected)


# Calls of other forms


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_cache_that_a_call_prepared_serves_a_direct_forward(name):
    """Call forward itself, which runs no hook of the decoder, without a cache or with one of a call."""
    model, tokens = train_mixing(interleave_heads(decoder(name), 2)), random_ids(1, 12)
    with torch.no_grad():
        expected = model.model(tokens, use_cache=False)[0]
        assert_close(model.model.forward(tokens, use_cache=False)[0], expected)
        prompt = model.model(tokens[:, :11], use_cache=True)
        last = model.model.forward(tokens[:, 11:], past_key_values=prompt.past_key_values, use_cache=True)
    assert_close(last[0], expected[:, 11:])


def test_arguments_by_place():
    """Give a cache to a model without a head in the place where its forward has it."""
    model = train_mixing(interleave_heads(decoder("mistral").model, 2))
    tokens, cache = random_ids(1, 12), DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(tokens, use_cache=False)[0]
        model(tokens[:, :11], None, None, cache)
        assert_close(model(tokens[:, 11:], None, None, cache)[0], expected[:, 11:])
        with pytest.raises(TypeError, match="multiple values"):
            model(tokens, input_ids=tokens)
