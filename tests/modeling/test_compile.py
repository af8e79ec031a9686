"""Compile and export the model whole, no more often than PyTorch compiles a Llama or Mistral of its shape.

The graphs run without code generation, which would need a C++ compiler.
"""

import copy
import gc
import shutil
from functools import partial

import pytest
import torch
from helpers import (
    assert_close,
    decoder,
    random_ids,
    random_model,
    set_core,
    small_config,
    train_mixing,
    uncached_logits,
)
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig
from transformers.masking_utils import causal_mask_function, create_sliding_window_causal_mask

from modeling_iha import interleave_heads, virtual_tokens
from modeling_iha.configuration_iha import OPTIONS_CLASSES
from modeling_iha.transformers_versions import CACHE


# Few models that show every path, because Dynamo traces for a second per layer and graph: each kind stands once, and
# "iha" in each of its geometries.
FULL = [kind for kind in OPTIONS_CLASSES if kind not in ("mha", "simplicial", "diff", "paired_heads")]
GEOMETRIES = {
    "full": {
        "attention_kinds": FULL,
        "num_hidden_layers": len(FULL),
        "attention_options": {kind: getattr(OPTIONS_CLASSES[kind], "example", {}) for kind in FULL},
    },
    "windows": {
        "attention_kinds": ["iha", "simplicial", "diff"],
        "num_hidden_layers": 3,
        "attention_options": {"simplicial": {"windows": [2, 4]}},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    "paired": {
        "attention_kinds": ["paired_heads", "mha"],
        "num_pseudo_heads": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    "shared": {
        "attention_kinds": ["iha", "hyper"],
        "attention_options": {"hyper": {"linear": True, "order": 4}},
        "pseudo_positions": "shared",
        "pseudo_collapse": "all_heads",
        "mixing_scale": 2.0,
    },
}


def slow(*case):
    """Leave a case to `make test-full`: another one traces the same code on its way."""
    return pytest.param(*case, marks=pytest.mark.slow)


# The kinds that change the score matrix compute alike on both, and all others call the core as these three do.
on_sdpa_and_eager = pytest.mark.parametrize(
    ("geometry", "core"), [("shared", "sdpa"), slow("windows", "sdpa"), slow("full", "sdpa"), slow("windows", "eager")]
)

# A cache entry of an operator on symbolic sizes takes longer to make than it saves.
for_any_length = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    # A compilation makes objects enough for many collections, and hardly any are garbage.
    gc.disable()
    yield
    gc.enable()
    torch._dynamo.reset()


def geometry_model(geometry, **options):
    return random_model(small_config(**{"num_pseudo_heads": 3, **GEOMETRIES[geometry]}), **options)


def graphs():
    """Return how often Dynamo has compiled since the test began."""
    return counters["stats"]["unique_graphs"]


@on_sdpa_and_eager
@for_any_length
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
        ("shared", "padded"),
        *(slow("paired", "packed"), slow("shared", "plain"), slow("shared", "packed")),
        *(slow("windows", each) for each in ("plain", "padded", "packed")),
        *(slow("full", each) for each in ("plain", "packed")),
    ],
)
def test_backward(geometry, inputs):
    """Compile the gradients; in float64, because the compiler rounds in another order and many layers magnify it."""
    model = geometry_model(geometry, dtype=torch.float64)
    input_ids = random_ids(1, 8)
    arguments = {
        "plain": {},
        "padded": {"attention_mask": torch.tensor([[0, 0] + [1] * 6])},
        "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
    }[inputs]
    # What padding computes depends on the form of the mask. The loss leaves it out, and the token that it predicts.
    real = arguments.get("attention_mask", torch.ones_like(input_ids))
    labels = input_ids.masked_fill(torch.nn.functional.pad(real[:, :-1], (1, 0), value=1) * real == 0, -100)
    arguments |= {"labels": labels, "use_cache": False}
    model(input_ids, **arguments).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(input_ids, **arguments).loss.backward()
    assert graphs() == 1 and not counters["graph_break"]
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name])


@pytest.mark.parametrize("geometry", ["paired", *map(slow, ("shared", "windows", "full"))])
def test_generate_compiles_the_decoding(geometry):
    """Compile as `generate` does on a GPU for a static cache: one graph for all steps, and none in a second call.

    A window layer needs one more while and one after its cache fills.
    """
    model, compiled = geometry_model(geometry), []
    compile_config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compile_config._compile_all_devices = True  # on a CPU `generate` compiles only when it is told to
    options = {"pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    static = {"cache_implementation": "static", "compile_config": compile_config}

    def count(input_ids, scores):
        compiled.append(graphs())
        return scores

    # To the same length from before the window is full and from after: with the same cache.
    for prompt, steps in ((3, 12), (3, 12), (9, 6)):
        output = model.generate(
            random_ids(2, prompt),
            attention_mask=torch.ones(2, prompt, dtype=torch.long),
            generation_config=GenerationConfig(max_new_tokens=steps, **copy.deepcopy(static), **options),
            logits_processor=[count],
        )
        expected = uncached_logits(model, output.sequences)[:, prompt - 1 : -1]
        assert_close(torch.stack(output.logits, dim=1), expected)
        assert torch.equal(output.sequences[:, prompt:], expected.argmax(-1))
    if model.config.sliding_window is not None:
        assert compiled[0] == 0 and compiled[3] <= 3 and compiled[3:] == compiled[3:4] * 27
    else:
        assert compiled == [0] + [1] * 29
    assert not counters["graph_break"]


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits


@on_sdpa_and_eager
@for_any_length
def test_export(geometry, core):
    model = geometry_model(geometry)
    set_core(model, core)
    length = torch.export.Dim("length", min=2, max=128)
    program = torch.export.export(
        Logits(model),
        (random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)),
        dynamic_shapes=({1: length}, {1: length}),
    ).module()
    for n in (9, 2, 14):
        input_ids, mask = random_ids(2, n, seed=n), torch.ones(2, n, dtype=torch.long)
        mask[0, : n // 2] = 0
        with torch.no_grad():
            logits = program(input_ids, mask)
        assert_close(logits[mask.bool()], uncached_logits(model, input_ids, attention_mask=mask)[mask.bool()])


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_generated_code():
    """Compare loss and gradients of Inductor's kernels with the eager model; the compiler runs for over a minute."""
    model = geometry_model("windows")
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


# The first graph is for the first length, and the second for any.
LENGTHS = (2000, 1970, 2013)


@pytest.mark.parametrize(
    ("kind", "inputs", "lengths"),
    [
        ("iha", "padded", LENGTHS[:1]),
        *(slow("iha", each, LENGTHS) for each in ("plain", "packed", "padded")),
        *(slow("mha", each, LENGTHS) for each in ("plain", "packed", "padded")),
        *(slow("paired_heads", each, LENGTHS) for each in ("plain", "packed", "padded")),
        *(slow(kind, "padded", LENGTHS[:1]) for kind in ("diff", "diff_v2", "knocking_heads")),
    ],
)
@for_any_length
def test_a_compiled_window_takes_no_dense_mask(kind, inputs, lengths):
    """No compiled tensor has an entry for each pair of tokens, and two graphs serve every length."""
    fields = {"attention_kinds": kind, "num_pseudo_heads": 2, "num_hidden_layers": 1}
    model = random_model(small_config(**fields, layer_types="sliding_attention", sliding_window=4))
    check_makes_no_dense_mask(model, inputs, lengths)


@pytest.mark.parametrize(
    ("name", "window", "inputs", "lengths"),
    [
        ("mistral", None, "padded", LENGTHS[:1]),  # it has a window of its own
        slow("mistral", None, "real", LENGTHS),
        slow("llama", 4, "padded", LENGTHS),
        slow("llama", 4, "real", LENGTHS),
    ],
)
@for_any_length
def test_a_compiled_decoder_takes_no_dense_mask_for_a_window(name, window, inputs, lengths):
    model = train_mixing(interleave_heads(decoder(name, num_hidden_layers=1), 2, sliding_window=window))
    check_makes_no_dense_mask(model, inputs, lengths)


def counting(entries):
    """Return a backend that notes the entries of the largest tensor of each graph."""

    def backend(graph, examples):
        made = [node.meta.get("example_value") for node in graph.graph.nodes]
        sizes = [tensor.numel() for tensor in made if isinstance(tensor, torch.Tensor)]
        # In the graph for any length a size is symbolic, and its hint is that of the call that was traced.
        entries.append(max(size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes))
        return graph

    return backend


def check_makes_no_dense_mask(model, inputs, lengths):
    entries = []
    compiled = torch.compile(model, fullgraph=True, backend=counting(entries))
    for length in lengths:
        input_ids, real = random_ids(2, length), torch.ones(2, length, dtype=torch.long)
        given = {}
        if inputs == "packed":
            packed = torch.cat([torch.arange(201), torch.arange(length - 201)])
            given = {"position_ids": packed[None].expand(2, -1)}
        elif inputs == "padded":
            real[0, :130] = 0  # on the left
            real[1, -3:] = 0  # on the right
            real[1, 700:702] = 0  # and in the middle
        if inputs in ("real", "padded"):
            given = {"attention_mask": real}
        with torch.no_grad():
            output = compiled(input_ids, use_cache=False, **given).logits
        assert not output.isnan().any()
        assert_close(output[real.bool()], uncached_logits(model, input_ids, **given)[real.bool()])
    assert graphs() == len(entries) == min(2, len(lengths))
    assert all(0 < count < min(lengths) ** 2 for count in entries)


@pytest.mark.parametrize("name", [slow("mistral"), slow("llama4_text")])
def test_layers_and_chunks_of_a_compiled_decoder(name):
    """Compare with eager code where some layers are plain, padding lies anywhere, and Llama 4 attends in chunks."""
    model = train_mixing(interleave_heads(decoder(name, num_hidden_layers=2), 2, layers=[1]))
    input_ids = random_ids(2, 300)
    real = torch.ones_like(input_ids)
    real[0, :17] = 0
    real[1, -3:] = 0
    expected = uncached_logits(model, input_ids, attention_mask=real)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(input_ids, attention_mask=real, use_cache=False).logits
    assert_close(found[real.bool()], expected[real.bool()])


def test_compiled_layers_take_no_dense_mask_for_a_given_window():
    """Compile the layers alone: their masks are made in eager code, and the window is the layers' own."""
    model = train_mixing(interleave_heads(decoder("llama", num_hidden_layers=1), 2, sliding_window=4))
    input_ids, real = random_ids(2, 300), torch.ones(2, 300, dtype=torch.long)
    real[0, :130] = 0
    expected = uncached_logits(model, input_ids, attention_mask=real)
    entries = []
    for layer in model.model.layers:
        layer.compile(backend=counting(entries), fullgraph=True)
    found = uncached_logits(model, input_ids, attention_mask=real)
    assert_close(found[real.bool()], expected[real.bool()])
    assert len(entries) == 1 and entries[0] < (2 * 300) ** 2


def test_masks_that_compiled_code_cannot_know_stay_dense(small_blocks):
    """Image blocks, functions of the user's and packed documents change a mask in ways that a graph cannot see."""
    config = interleave_heads(decoder("mistral", num_hidden_layers=1), 2).config
    states = torch.zeros(1, 20, 32)
    images = torch.tensor([[-1] * 3 + [0] * 4 + [-1] * 13])

    @partial(torch.compile, backend="eager", fullgraph=True)
    def mask(**given):
        given = {"attention_mask": torch.ones(1, 20, dtype=torch.long), **given}
        return create_sliding_window_causal_mask(config, states, **{CACHE: None}, **given)

    assert mask().shape == (1, 20)  # in tokens
    packed = {"attention_mask": None, "position_ids": torch.arange(20)[None]}
    for given in ({"block_sequence_ids": images}, {"or_mask_function": causal_mask_function}, packed):
        assert mask(**given).shape == (1, 1, 2 * 20, 2 * 20)


@pytest.mark.parametrize("kind", ["iha", slow("paired_heads")])
def test_one_compiled_token_is_causal(kind, monkeypatch):
    """Compile a call of one token that has no cache, with the choice of a GPU: there is no dense mask."""
    fields = {"attention_kinds": kind, "num_pseudo_heads": 2, "num_hidden_layers": 1}
    model = random_model(small_config(**fields))
    input_ids = random_ids(2, 1)
    expected = uncached_logits(model, input_ids)
    taken = []

    def takes(module, heads, query, key, mask, dropout):
        taken.append(mask is not None and mask.ndim == 4)
        return taken[-1]

    monkeypatch.setattr(virtual_tokens, "takes_new_token", takes)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        output = compiled(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits
    assert taken == [False]
    assert_close(output, expected)
