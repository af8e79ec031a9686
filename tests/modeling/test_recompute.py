"""Test `recompute_virtual_tokens`: what a backward pass makes again is not kept until then.

test_drawn.py draws it, and compares gradients."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers import decoder, random_ids, random_model, small_config, train_mixing
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from iha.step_memory import Counter
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, interleaving, virtual_tokens
from modeling_iha.virtual_tokens import is_attention, recomputes


WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
MODELS = {
    "iha": {},
    "window": WINDOW,
    "all heads": {"pseudo_collapse": "all_heads", "num_pseudo_heads": 3},
    "dropout": {**WINDOW, "attention_dropout": 0.5},
    "paired heads": {"attention_kinds": "paired_heads", "num_pseudo_heads": 2},
}
LENGTH = 180  # blocks begin 128 virtual tokens after a window


def model_of(name, choice, dtype=torch.float64):
    """Return a decoder in place, or a model of ours, with the same weights for each choice."""
    if name == "in place":
        model = decoder("llama")
        interleave_heads(model, 2)
        train_mixing(model)
        model.config.recompute_virtual_tokens = choice
        return model.to(dtype)
    return random_model(small_config(**MODELS[name], recompute_virtual_tokens=choice), dtype=dtype)


def gradients_of(model, **inputs):
    torch.manual_seed(0)  # of the dropout
    model.train()
    model.zero_grad()
    ids = random_ids(2, LENGTH)
    model(ids, labels=ids, use_cache=False, **inputs).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def watch(monkeypatch, owner, name):
    """Return a list of weak references to the storages of what a function returns."""
    function, made = getattr(owner, name), []

    def watched(*args):
        result = function(*args)
        made.append(weakref.ref(result.untyped_storage()))
        return result

    monkeypatch.setattr(owner, name, watched)
    return made


def alive(made):
    return sum(storage() is not None for storage in made)


def test_dropout_is_the_same_again():
    assert_equal(*(gradients_of(model_of("dropout", choice)) for choice in (True, False)))


class AttentionCalls(TorchDispatchMode):
    """Count the operators that compute attention, forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "attention" in function.name() and "backward" not in function.name()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["iha", "window", "in place"])
def test_attention_runs_once(name):
    counts = []
    for choice in (False, True):
        model = model_of(name, choice)
        with AttentionCalls() as calls:
            gradients_of(model)
        counts.append(calls.count)
    assert counts[0] == counts[1] > 0


def test_every_attention_operator_of_pytorch_is_kept():
    """Ask all that PyTorch has registered, on every device. FlashAttention's package calls the states q, k and v."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if "attention" in name or "attn" in name]
    operators = []
    for name in names:
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space in ("aten", "torch_attn"):
            operators.append(getattr(getattr(getattr(torch.ops, space), packet), overload or "default"))
    assert len(operators) > 20 and all(map(is_attention, operators))
    assert not any(map(is_attention, (torch.ops.aten.bmm.default, torch.ops.aten._softmax.default)))
    torch.library.define("of_somebody::forward", "(Tensor q, Tensor k, Tensor v) -> Tensor")
    assert is_attention(torch.ops.of_somebody.forward.default)


def let_parts_be(count, model, monkeypatch):
    """Set the bytes of a part so that the heads of a model of float64 have `count` parts, for two rows."""
    config = model.config
    virtual = 3 * 2 * LENGTH * config.num_attention_heads * config.head_dim * 8 * config.num_pseudo_heads
    monkeypatch.setattr(virtual_tokens, "PART_BYTES", virtual // count + 1)


@pytest.mark.parametrize("windows", [{}, {"layer_types": "sliding_attention", "sliding_window": 4}])
@pytest.mark.parametrize(("groups", "count", "parts"), [(5, 1, 1), (5, 2, 3), (5, 9, 5), (10, 2, 2)])
def test_heads_in_parts_give_the_same_gradients(groups, count, parts, windows, monkeypatch):
    """Five groups in two parts are parts of two, two and one group."""
    fields = {**windows, "num_attention_heads": 10, "num_key_value_heads": groups, "hidden_size": 80}
    models = [
        random_model(small_config(**fields, recompute_virtual_tokens=choice), dtype=torch.float64)
        for choice in (False, True)
    ]
    let_parts_be(count, models[1], monkeypatch)
    mask = torch.tensor([[0] * 7 + [1] * (LENGTH - 7), [1] * LENGTH]) if windows else None
    expected = gradients_of(models[0], attention_mask=mask)
    made = watch(monkeypatch, interleaving, "make_virtual_sequence")
    actual = gradients_of(models[1], attention_mask=mask)
    assert len(made) == 2 * 3 * parts * 2  # passes, states, parts, layers
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_one_part_of_the_heads_is_alive_at_a_time(monkeypatch):
    """Count the peak of a backward pass, where attention keeps its outputs."""
    peaks = []
    for count in (1, 4):
        fields = {"num_key_value_heads": 4, "num_pseudo_heads": 16, "num_hidden_layers": 1}
        model = random_model(small_config(**fields, recompute_virtual_tokens=True), dtype=torch.float64).train()
        let_parts_be(count, model, monkeypatch)
        with Counter() as counter:
            model(random_ids(2, LENGTH), use_cache=False).logits.sum().backward()
        peaks.append(counter.peak)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("case", ["all heads", "paired heads", "mask per head", "sinks", "eager"])
def test_heads_that_cannot_be_parted_stay_together(case, monkeypatch):
    mask = None
    if case in ("sinks", "eager"):
        name = "gpt_oss" if case == "sinks" else "llama"
        models = [interleave_heads(decoder(name, core="eager"), 2) for _ in range(2)]
    else:
        name = case if case in MODELS else "iha"
        models = [model_of(name, choice) for choice in (False, True)]
    for model, choice in zip(models, (False, True)):
        model.config.recompute_virtual_tokens = choice
    if case == "mask per head":
        mask = torch.rand(2, 4, LENGTH, LENGTH) < 0.7
        mask = (mask | torch.eye(LENGTH, dtype=torch.bool)).tril()
    monkeypatch.setattr(virtual_tokens, "PART_BYTES", 1)
    assert_equal(*(gradients_of(model, attention_mask=mask) for model in models))


@pytest.mark.parametrize("name", ["iha", "window", "in place"])
@pytest.mark.parametrize("choice", [True, False, None])
def test_no_virtual_token_is_kept_between_the_passes(name, choice, monkeypatch):
    made = watch(monkeypatch, interleaving, "make_virtual_sequence")
    model, ids = model_of(name, choice, torch.float32).train(), random_ids(1, LENGTH)
    made.clear()
    loss = model(ids, labels=ids, use_cache=False).loss
    layers = model.config.num_hidden_layers
    assert len(made) == 3 * layers
    assert alive(made) == 0 if choice else alive(made) > 2 * layers  # blocks may have copied the queries
    loss.backward()
    assert len(made) == (6 if choice else 3) * layers and alive(made) == 0


@pytest.mark.parametrize("name", ["iha", "window"])
def test_the_outputs_of_attention_are_all_that_is_kept(name):
    """Count in bytes, because blocks copy what does not fill one: three of four virtual tensors go."""
    kept = []
    for choice in (False, True):
        model = model_of(name, choice, torch.float32).train()
        with Counter() as counter:
            loss = model(random_ids(1, LENGTH), use_cache=False).logits.sum()
        kept.append(counter.now)
        loss.backward()
    config = model.config
    heads = 2 * config.num_key_value_heads + config.num_attention_heads
    virtual = config.num_hidden_layers * 4 * LENGTH * config.num_pseudo_heads * heads * config.head_dim
    assert kept[0] - kept[1] >= virtual


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_activation_checkpointing_nothing_more_is_kept(use_reentrant, monkeypatch):
    """Hooks of autograd do not nest: those of this option would keep the output that checkpointing drops."""
    expected = gradients_of(model_of("iha", False))
    model = model_of("iha", True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()  # reentrant checkpointing needs it
    assert_equal(gradients_of(model), expected)
    outputs = watch(monkeypatch, interleaving.MixedHeads, "collapse_output")
    virtual = watch(monkeypatch, interleaving, "make_virtual_sequence")
    kept = []
    attend = interleaving.MixedHeads.collapse_output

    def collapse(heads, output):
        kept.append(weakref.ref(output.untyped_storage()))
        return attend(heads, output)

    monkeypatch.setattr(interleaving.MixedHeads, "collapse_output", collapse)
    ids = random_ids(1, LENGTH)
    loss = model(ids, labels=ids, use_cache=False).loss
    assert len(kept) == len(outputs) == 2 and alive(kept) == alive(virtual) == 0
    loss.backward()


@pytest.mark.slow
def test_a_compiled_model_leaves_the_choice_to_the_compiler():
    torch._dynamo.reset()
    fields = {"num_hidden_layers": 1, "layer_types": "sliding_attention", "sliding_window": 4}
    models = [
        random_model(small_config(**fields, recompute_virtual_tokens=choice)).double() for choice in (False, True)
    ]
    expected, model = gradients_of(models[0]), models[1]
    model.compile(fullgraph=True, backend="aot_eager")
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


def test_without_gradients_nothing_is_wrapped(monkeypatch):
    made = watch(monkeypatch, interleaving, "make_virtual_sequence")
    with torch.no_grad():
        model_of("iha", True, torch.float32)(random_ids(1, 9), use_cache=False)
    assert len(made) == 6 and alive(made) == 0


def test_the_default_goes_by_the_memory_of_the_gpu(monkeypatch):
    """In 2 layers with P = 4 virtual tokens take 8 times the bytes of queries, keys and values."""
    memory = 1000
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    module = SimpleNamespace(config=small_config(num_pseudo_heads=4))

    def chosen(of_queries, of_keys, device="cuda"):
        states = (SimpleNamespace(device=torch.device(device), nbytes=size) for size in (of_queries, of_keys, of_keys))
        return recomputes(module, *states)

    assert chosen(16, 8) and not chosen(15, 8) and not chosen(16, 7) and not chosen(16, 8, "cpu")
    module.config.recompute_virtual_tokens = False
    assert not chosen(16, 8)
    module.config.recompute_virtual_tokens = True
    assert chosen(1, 1) and chosen(1, 1, "cpu")
    with torch.autograd.graph.save_on_cpu():
        assert not chosen(16, 8)


@pytest.mark.parametrize("choice", [True, False, None])
def test_a_checkpoint_keeps_the_choice(choice, tmp_path):
    model = model_of("iha", choice, torch.float32)
    model.save_pretrained(tmp_path)
    assert IHAConfig.from_pretrained(tmp_path).recompute_virtual_tokens is choice
    loaded = IHAForCausalLM.from_pretrained(tmp_path, recompute_virtual_tokens=not choice)
    assert loaded.model.layers[0].self_attn.config.recompute_virtual_tokens is (not choice)


def test_a_decoder_in_place_keeps_the_choice(tmp_path):
    model = model_of("in place", True, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    attention = loaded.model.layers[0].self_attn
    assert attention.config.recompute_virtual_tokens and recomputes(attention, torch.ones(1))
