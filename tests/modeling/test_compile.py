"""Compile and export the model whole, no more often than PyTorch compiles a Llama or Mistral of its shape.

The graphs run without code generation, which would need a C++ compiler.
"""

import copy
import shutil
from itertools import product

import pytest
import torch
from helpers import assert_close, random_ids, random_model, set_core, small_config, uncached_logits
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig, StaticCache

from modeling_iha import input_checks
from modeling_iha.kind_options import OPTIONS_CLASSES


# As few layers as show every path: compiling costs time for each.
GEOMETRIES = {
    "global": {"num_hidden_layers": 1},
    "shared": {"num_hidden_layers": 1, "pseudo_positions": "shared", "pseudo_collapse": "all_heads"},
    "hybrid": {
        "attention_kinds": ["iha", "mha"],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    **{
        kind: {
            "num_hidden_layers": 1,
            "attention_kinds": kind,
            "attention_options": {kind: options.example},
        }
        for kind, options in OPTIONS_CLASSES.items()
        if kind not in ("iha", "mha")
    },
    "hyper_linear": {
        "num_hidden_layers": 1,
        "attention_kinds": "hyper",
        "attention_options": {"hyper": {"linear": True, "order": 4}},
    },
    "simplicial": {
        "num_hidden_layers": 1,
        "attention_kinds": "simplicial",
        "attention_options": {"simplicial": {"windows": [2, 4]}},
        "layer_types": "sliding_attention",
        "sliding_window": 4,
    },
}
IHA = ("global", "shared", "hybrid")
# The kinds that change the score matrix compute alike on both, and all "iha" layers attend alike.
on_sdpa_and_eager = pytest.mark.parametrize(
    ("geometry", "core"), [*product(GEOMETRIES, ["sdpa"]), ("hybrid", "eager"), ("diff", "eager")]
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def geometry_model(geometry):
    return random_model(small_config(num_pseudo_heads=3, **GEOMETRIES[geometry]))


def graphs():
    """Return how often Dynamo has compiled since the test began."""
    return counters["stats"]["unique_graphs"]


@on_sdpa_and_eager
@torch.no_grad()
def test_forward(geometry, core):
    """Compile two graphs for all lengths: the second is for any length."""
    model = geometry_model(geometry)
    set_core(model, core)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in (9, 7, 5, 12, 6):
        input_ids = random_ids(2, length)
        assert_close(compiled(input_ids, use_cache=False).logits, uncached_logits(model, input_ids))
    assert graphs() == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("geometry", "inputs"),
    [
        *product(["global", "hybrid"], ["plain", "padded", "packed"]),
        *product([geometry for geometry in GEOMETRIES if geometry not in IHA], ["plain", "packed"]),
    ],
)
def test_backward(geometry, inputs):
    model = geometry_model(geometry)
    input_ids = random_ids(1, 8)
    arguments = {
        "plain": {},
        "padded": {"attention_mask": torch.tensor([[0, 0] + [1] * 6])},
        "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
    }[inputs]
    arguments |= {"labels": input_ids, "use_cache": False}
    model(input_ids, **arguments).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(input_ids, **arguments).loss.backward()
    assert graphs() == 1 and not counters["graph_break"]
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name])


def test_the_size_of_a_dense_mask_is_checked(monkeypatch):
    monkeypatch.setattr(input_checks, "MAX_MASK_BYTES", 0)
    window = {"layer_types": "sliding_attention", "sliding_window": 4, "num_hidden_layers": 1}
    model = random_model(small_config(num_pseudo_heads=3, **window))
    with pytest.raises(Exception, match="needs a mask of"):
        torch.compile(model, backend="eager")(random_ids(1, 30), use_cache=False)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@torch.no_grad()
def test_decoding_from_a_static_cache(geometry):
    """Compile one graph for all steps; a window layer needs one more while and one after its cache fills."""
    model = geometry_model(geometry)
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    input_ids = random_ids(2, 14)
    expected = uncached_logits(model, input_ids)
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(input_ids[:, :3], past_key_values=cache)
    compiled_after = []
    for n in range(3, 14):
        logits = compiled(input_ids[:, n : n + 1], past_key_values=cache).logits
        assert_close(logits, expected[:, n : n + 1])
        compiled_after.append(graphs())
    assert not counters["graph_break"]
    if model.config.sliding_window is not None:
        assert compiled_after[-1] <= 3 and compiled_after[2:] == compiled_after[-1:] * 9
    else:
        assert compiled_after == [1] * 11


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_generate_compiles_the_decoding(geometry):
    """Compile as `generate` does on a GPU for a static cache: equal tokens, and a second call compiles nothing."""
    model = geometry_model(geometry)
    input_ids = random_ids(2, 9)
    options = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
    compile_config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compile_config._compile_all_devices = True  # on a CPU `generate` compiles only when it is told to
    static = GenerationConfig(cache_implementation="static", compile_config=compile_config, **options)
    mask = torch.ones_like(input_ids)
    expected = model.generate(input_ids, attention_mask=mask, generation_config=GenerationConfig(**options))
    assert graphs() == 0
    actual = model.generate(input_ids, attention_mask=mask, generation_config=copy.deepcopy(static))
    assert torch.equal(actual, expected)
    compiled = graphs()
    assert 1 <= compiled <= 2
    again = model.generate(input_ids, attention_mask=mask, generation_config=copy.deepcopy(static))
    assert torch.equal(again, expected)
    assert graphs() == compiled
    assert not counters["graph_break"]


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits


@on_sdpa_and_eager
def test_export(geometry, core):
    """Export one program for every length, with left padding."""
    model = geometry_model(geometry)
    set_core(model, core)
    length = torch.export.Dim("length", min=2, max=128)
    program = torch.export.export(
        Logits(model),
        (random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)),
        dynamic_shapes=({1: length}, {1: length}),
    )
    for n in (9, 2, 14):
        input_ids, mask = random_ids(2, n, seed=n), torch.ones(2, n, dtype=torch.long)
        mask[0, : n // 2] = 0
        with torch.no_grad():
            logits = program.module()(input_ids, mask)
        assert_close(logits[mask.bool()], uncached_logits(model, input_ids, attention_mask=mask)[mask.bool()])


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_generated_code():
    """Compare loss and gradients of Inductor's kernels with the eager model; the compiler runs for over a minute."""
    model = geometry_model("hybrid")
    input_ids = random_ids(2, 8)
    expected_loss = model(input_ids, labels=input_ids, use_cache=False).loss
    expected_loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True)(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    assert_close(loss.detach(), expected_loss.detach(), 1e-5)
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name])
