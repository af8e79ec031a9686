"""Replace attention of an interleaved model, as tools and fused kernels do, and expect an error."""

import copy
import gc
import weakref

import pytest
import torch
from helpers import assert_close, decoder, random_ids, train_mixing
from helpers import uncached_logits as logits
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache

from modeling_iha import interleave_heads


def replace_forward(layer, plain):
    layer.self_attn.forward = plain.self_attn.forward


def replace_module(layer, plain):
    layer.self_attn = plain.self_attn


def replace_forward_of_layer(layer, plain):
    layer.forward = plain.forward


class Renamed(nn.Module):
    """A layer whose attention has another name, as an engine that replaces layers has it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.attention_type = layer, getattr(layer, "attention_type", None)

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


REPLACE = {
    "forward": replace_forward,
    "module": replace_module,
    "forward of a layer": replace_forward_of_layer,
}
LAYERS = pytest.mark.parametrize("layers", [[1], [0, 1, 2]], ids=["one", "all"])
ONE_LAYER = [pytest.param([1], id="one"), pytest.param([0, 1, 2], marks=pytest.mark.slow, id="all")]
MESSAGE = "interleaved heads and attended without them.*Use the model without the tool"


def fused(layer):
    """Have attention of a plain layer pass its mask by, as causal kernels do; one over virtual tokens would fail."""
    forward = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **kwargs: forward(*args, **kwargs | {"attention_mask": None})
    return layer


def replaced(replace, layers, model=None):
    model, plain = model or interleave_heads(decoder("llama"), 2), decoder("llama")
    for i in layers:
        REPLACE[replace](model.model.layers[i], fused(plain.model.layers[i]))
    return model


@LAYERS
@pytest.mark.parametrize("replace", REPLACE)
def test_nothing_attends_beside_the_mixing(replace, layers):
    model = interleave_heads(decoder("llama"), 2)
    logits(model, input_ids=random_ids(1, 5))
    with pytest.raises(RuntimeError, match=MESSAGE):
        replaced(replace, layers, model)(random_ids(1, 5))


@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_no_other_core_attends(core):
    model = interleave_heads(decoder("llama"), 2)
    model.config._attn_implementation = core
    with pytest.raises(RuntimeError, match=MESSAGE):
        model(random_ids(1, 5))


@LAYERS
def test_layers_of_other_names_are_noticed_and_wrapped_ones_run(layers):
    model, plain, tokens = train_mixing(interleave_heads(decoder("llama"), 2)), decoder("llama"), random_ids(1, 5)
    expected = logits(model, input_ids=tokens)
    wrapped, other = copy.deepcopy(model), copy.deepcopy(model)
    for i in layers:
        wrapped.model.layers[i] = Renamed(wrapped.model.layers[i])
        other.model.layers[i] = Renamed(plain.model.layers[i])
    assert logits(wrapped, input_ids=tokens).equal(expected)
    with pytest.raises(RuntimeError, match=MESSAGE):
        other(tokens)


def test_what_was_seen_before_does_not_count():
    """Recompute attention in the backward, outside of any forward of the decoder, and fail in a forward."""
    model, tokens = interleave_heads(decoder("llama"), 2).train(), random_ids(1, 5)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(tokens, labels=tokens).loss.backward()
    handle = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens)
    handle.remove()
    with pytest.raises(RuntimeError, match=MESSAGE):
        replaced("forward of a layer", [1], model)(tokens)


def test_a_forward_that_failed_keeps_no_other_model_alive():
    failed, other = (interleave_heads(decoder("llama"), 2) for _ in range(2))
    failed.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed(random_ids(1, 5))
    other(random_ids(1, 5))
    attention = weakref.ref(other.model.layers[0].self_attn)
    del other
    gc.collect()
    assert attention() is None


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


# Compiled


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model, **options):
    for layer in model.model.layers:
        layer.compile(backend="eager", **options)
    return model


COMPILE = {
    "whole": lambda model, **options: torch.compile(model, backend="eager", **options),
    "layers": compile_layers,
}


@pytest.mark.parametrize(
    ("compiled", "checkpointing"),
    [
        *(("layers", False), ("whole", True)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("layers", True), ("whole", False))),
    ],
)
def test_compiled_models_are_whole_graphs(compiled, checkpointing):
    model, tokens = train_mixing(interleave_heads(decoder("llama"), 2)), random_ids(1, 9)
    expected = logits(model, input_ids=tokens)
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model = COMPILE[compiled](model, fullgraph=True)
    for _ in range(2):
        assert_close(model(input_ids=tokens, use_cache=False).logits, expected)


def test_compiled_layers_share_their_code():
    """Compile more layers than Dynamo compiles the same code for (eight)."""
    model, tokens = train_mixing(interleave_heads(decoder("llama", num_hidden_layers=10), 2)), random_ids(1, 9)
    expected = logits(model, input_ids=tokens)
    torch._dynamo.reset()
    compiled = CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=compiled, fullgraph=True)
    assert_close(model(input_ids=tokens, use_cache=False).logits, expected)
    assert compiled.frame_count == 1


@pytest.mark.parametrize("fullgraph", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "fullgraph"])
@pytest.mark.parametrize(
    ("compiled", "replace", "layers"),
    [
        ("layers", "forward", [1]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("whole", "module", [1]), ("whole", "forward", [1]), ("whole", "module", [0, 1, 2])),
                *(("layers", "module", [1]), ("layers", "forward of a layer", [1])),
            )
        ),
    ],
)
def test_compiled_code_attends_by_the_mixing(compiled, replace, layers, fullgraph):
    """Run a compiled model before, which leaves the flags of compiled code behind."""
    COMPILE["layers"](interleave_heads(decoder("llama"), 2))(random_ids(1, 5))
    model = COMPILE[compiled](replaced(replace, layers), fullgraph=fullgraph)
    with pytest.raises((RuntimeError, torch._dynamo.exc.Unsupported), match="attended without them|Observed exc"):
        model(input_ids=random_ids(1, 5), use_cache=False)


@pytest.mark.parametrize("layers", ONE_LAYER)
def test_modules_are_replaced_after_compilation(layers):
    model = COMPILE["layers"](interleave_heads(decoder("llama"), 2))
    model(random_ids(1, 5))
    with pytest.raises(RuntimeError, match=MESSAGE):
        replaced("module", layers, model)(random_ids(1, 5))


# Calls that pass the hooks of the decoder by


@pytest.mark.parametrize(
    "make", [lambda config: None, lambda config: DynamicCache(config=config)], ids=["own", "given"]
)
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_cache_that_no_hook_prepared_is_refused(name, make):
    """Call forward itself, which runs no hook of the decoder, with a cache in which windows lack a token."""
    model, tokens = train_mixing(interleave_heads(decoder(name), 2)), random_ids(1, 12)
    with torch.no_grad():
        expected = model.model(tokens, use_cache=False)[0]
        assert_close(model.model.forward(tokens, use_cache=False)[0], expected)
        cache = make(model.config)
        prompt = model.model.forward(tokens[:, :11], past_key_values=cache, use_cache=True)
        with pytest.raises(
            RuntimeError, match="forward was called directly, which does not prepare the cache: call the model"
        ):
            model.model.forward(tokens[:, 11:], past_key_values=prompt.past_key_values, use_cache=True)
        prompt = model.model(tokens[:, :11], use_cache=True)
        last = model.model.forward(tokens[:, 11:], past_key_values=prompt.past_key_values, use_cache=True)
    assert_close(last[0], expected[:, 11:])  # the cache is prepared


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
