"""Compile and export the model whole, no more often than PyTorch compiles a Llama or Mistral of its shape.

The graphs run without code generation, which would need a C++ compiler.
"""

import copy
import gc
import shutil
from functools import partial
from itertools import product

import pytest
import torch
from helpers import (
    WAYS,
    assert_close,
    cumulative_lengths,
    decoder,
    interleaved,
    packing,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, GenerationConfig
from transformers.masking_utils import causal_mask_function, create_sliding_window_causal_mask

from modeling_iha import interleave_heads, virtual_tokens
from modeling_iha.configuration_iha import OPTIONS_CLASSES
from modeling_iha.sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
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
        "output_gate": "elementwise",
        "exclusive_attention": True,
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


@pytest.mark.slow
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
        *(slow("shared", each) for each in ("padded", "plain", "packed")),
        slow("paired", "packed"),
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["iha", "interleaved"])
def test_a_trace_is_for_any_length(name):
    """Trace by `torch.jit`, which knows no autograd function of Python, a length that exceeds the window."""
    model = WAYS[name](5)
    model.config.use_cache = False
    program = torch.jit.trace(Logits(model), (random_ids(1, 40), torch.ones(1, 40).long()), check_trace=False)
    for n in (40, 4, 70):
        input_ids, mask = random_ids(2, n), torch.ones(2, n).long()
        mask[0, : n // 2] = 0
        expected = uncached_logits(model, input_ids, attention_mask=mask)
        assert_close(program(input_ids, mask)[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("name", ["iha", "interleaved", "some interleaved"])
def test_a_trace_keeps_packed_documents_apart(name):
    """Declare them by both ways: a trace has dense masks, which know documents by positions alone."""
    model = WAYS[name](None)

    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, position_ids, bounds):
            options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "use_cache": False}
            return self.model(input_ids, position_ids=position_ids, **options).logits

    call = (random_ids(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), torch.tensor([0, 4, 9], dtype=torch.int32))
    expected = Packed()(*call)
    program = torch.jit.trace(Packed(), call, check_trace=False)
    assert_close(program(*call), expected)


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


# Padding and documents that a call declares


# Models without a kind that needs the scores, as functions of a window. Decoders have the windows of their bases too.
KINDS = ("iha", "mha", "paired_heads", "diff", "diff_v2", "knocking_heads")
OWN = {kind: partial(WAYS["iha"], attention_kinds=kind, num_hidden_layers=1) for kind in KINDS}
DECODERS = {
    "interleaved": partial(WAYS["interleaved"], num_hidden_layers=1),
    "some interleaved": partial(interleaved, "llama", layers=[0], num_hidden_layers=2),
    "mistral": partial(interleaved, "mistral", num_hidden_layers=1),
    "gemma3": partial(interleaved, "gemma3_text", num_hidden_layers=2),
    "plain mistral": lambda window: decoder("mistral", SDPA_IN_BLOCKS, num_hidden_layers=1),
    "plain gemma3": lambda window: decoder("gemma3_text", SDPA_IN_BLOCKS, num_hidden_layers=2),
}
CALLS = {
    **{"nothing": lambda length: {}, "ones": lambda length: {"attention_mask": torch.ones(2, length).long()}},
    "padded": lambda length: {"attention_mask": padded(length)},
    "positions": lambda length: packing((201, length - 201), 2)[0],
    "lengths": lambda length: packing((201, length - 201))[0] | cumulative_lengths((201, length - 201)),
}
LENGTHS = (300, 280, 290)  # the first graph is for the first length, and the second for any
QUICK = [("iha", 20, "padded")]
# Compiled code cannot look for documents in positions: it joins those of other models, and makes ours dense masks.
DECLARED = [
    case if case in QUICK else slow(*case)
    for case in product((*OWN, *DECODERS), (None, 20), CALLS)
    if not (case[0] in DECODERS and case[2] == "positions")
    if not ("plain" in case[0] and (case[1] or case[2] in ("nothing", "lengths")))
]


def padded(length):
    real = torch.ones(2, length).long()
    real[0, :130] = 0  # on the left
    real[1, -3:] = 0  # on the right
    real[1, 70:72] = 0  # and in the middle
    return real


def squares(graph):
    """Return the shapes of tensors that have an entry for each pair of tokens; symbolic sizes have those of a call."""
    found = []
    for node in graph.graph.nodes:
        for tensor in tree_leaves(node.meta.get("example_value")):
            sizes = tensor.shape[-2:] if isinstance(tensor, torch.Tensor) else ()
            shape = [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
            if len(shape) == 2 and min(shape) >= min(LENGTHS):
                found.append(shape)
    return found


@pytest.mark.parametrize(("name", "window", "call"), DECLARED)
@for_any_length
@torch.no_grad()
def test_a_compiled_call_makes_no_square(name, window, call):
    """Two graphs serve every length. Only documents on a CPU break a graph, because they are computed one by one."""
    model, found = (OWN | DECODERS)[name](window), []
    is_whole = call != "lengths"

    def keep(graph, _):
        found.extend(squares(graph))
        return graph

    compiled = torch.compile(model, fullgraph=is_whole, backend=keep)
    for length in LENGTHS if is_whole else LENGTHS[:1]:
        inputs = {"input_ids": random_ids(2 if is_whole else 1, length), "use_cache": False, **CALLS[call](length)}
        logits = compiled(**inputs).logits
        real = inputs.get("attention_mask", torch.ones(logits.shape[:2])).bool()
        assert logits.isfinite().all()
        assert_close(logits[real], model(**inputs).logits[real])
    assert not found or call == "positions"
    assert graphs() == 2 if is_whole else counters["graph_break"]


@pytest.mark.parametrize(
    ("name", "core"), [("interleaved", "sdpa"), slow("iha", "sdpa"), slow("some interleaved", "eager")]
)
def test_documents_that_compiled_code_cannot_find(name, core):
    """Raise an error next to the cache that a call makes by default, and keep them apart without one."""
    model = WAYS[name](None).eval()
    model.set_attn_implementation(core)
    packed = {"input_ids": random_ids(1, 9), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        with pytest.raises(ValueError, match="Compiled code cannot find in position_ids"):
            compiled(**packed)
        apart = compiled(**packed, use_cache=False).logits
        assert_close(apart, model(**packed, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "llama4_text"])
def test_layers_and_chunks_of_a_compiled_decoder(name):
    """Compare with eager code where some layers are plain, padding lies anywhere, and Llama 4 attends in chunks."""
    model = interleaved(name, layers=[1], num_hidden_layers=2)
    inputs = {"input_ids": random_ids(2, 300), "attention_mask": padded(300)}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    real = inputs["attention_mask"].bool()
    assert_close(uncached_logits(compiled, **inputs)[real], uncached_logits(model, **inputs)[real])


def test_compiled_layers_share_their_code_and_take_no_dense_mask():
    """Compile more layers than Dynamo compiles the same code for (eight). Their masks are made in eager code."""
    model, found = WAYS["interleaved"](20, num_hidden_layers=10), []
    inputs = {"input_ids": random_ids(2, LENGTHS[0]), "attention_mask": padded(LENGTHS[0])}
    real = inputs["attention_mask"].bool()
    expected = uncached_logits(model, **inputs)[real]

    def keep(graph, _):
        found.append(squares(graph))
        return graph

    for layer in model.model.layers:
        layer.compile(backend=keep, fullgraph=True)
    assert_close(uncached_logits(model, **inputs)[real], expected)
    assert found == [[]]


@pytest.mark.slow
@for_any_length
def test_checkpointed_layers_are_compiled_as_a_whole():
    model, tokens = WAYS["interleaved"](), random_ids(1, 9)
    expected = uncached_logits(model, tokens)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        assert_close(compiled(input_ids=tokens, use_cache=False).logits.detach(), expected)


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
    """Compile a call of one token that has no cache, with the choice of a GPU: it has the form of a new token."""
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
    assert taken == [True]
    assert_close(output, expected)
