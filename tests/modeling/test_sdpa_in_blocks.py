"""Test the attention function "sdpa_in_blocks" by itself, and what test_drawn.py does not draw of it.

This is compiled and exported code, chunks, memory that autograd keeps, and PyTorch's FlashAttention."""

from functools import partial
from types import SimpleNamespace

import fake_flash
import pytest
import torch
from functorch.compile import make_boxed_func
from helpers import (
    assert_close,
    decoder,
    interleaved,
    largest_saved_tensor,
    logits_and_gradients,
    packing,
    random_ids,
    random_model,
    small_config,
    uncached_logits,
)
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_iha import interleave_heads, sdpa_in_blocks
from modeling_iha.sdpa_in_blocks import LEAST_BLOCK, NAME


WINDOW = 40  # of the plain decoders; four rows of such a window do not fill a block
SMALL_WINDOW = 5
PLAIN = ["mistral", "gemma3_text"]
# Fields of our own models, with blocks of 4 queries.
OWN = {
    "iha": {"num_pseudo_heads": 3},
    "paired_heads": {"attention_kinds": "paired_heads"},
    "mha": {"attention_kinds": "mha"},
    "diff": {"attention_kinds": "diff"},
}
CASES = ["plain", "cache", "left_padding", "right_padding", "packed", "packed_row", "hole", "to_come", "custom_mask"]


def model_of(name, window=WINDOW, **fields):
    """Return a plain decoder or one of our models, in float32 and with random weights."""
    if name in OWN:
        fields = {"layer_types": "sliding_attention", "sliding_window": window, **OWN[name], **fields}
        return random_model(small_config(**fields))
    return decoder(name, core=NAME, sliding_window=window, max_position_embeddings=2048, **fields)


def inputs_of(case, rows, length):
    """Return the arguments of a forward pass."""
    inputs = {"input_ids": random_ids(rows, length), "use_cache": case == "cache"}
    real = torch.ones(rows, length).long()
    if case.endswith("padding"):
        real[0, slice(0, 13) if case == "left_padding" else slice(-13, None)] = 0
        inputs |= {"attention_mask": real, "position_ids": (real.cumsum(-1) - 1).clamp(min=0)}
    if case == "hole":
        real[0, 11:13] = 0
        inputs["attention_mask"] = real
    if case == "to_come":  # the mask has room for tokens that are not there yet
        real[0, :13] = 0
        inputs |= {"attention_mask": torch.nn.functional.pad(real, (0, 5), value=1), "use_cache": True}
    if case.startswith("packed"):
        inputs |= packing((20, length - 20), rows)[0]
    if case == "custom_mask":
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance % 3 == 1)
        inputs["attention_mask"] = torch.zeros(rows, 1, length, length).masked_fill(hidden, torch.finfo().min)
    return inputs


def assert_equals_eager(model, core=NAME, **inputs):
    """Compare the logits of real tokens, and the gradients of every parameter."""
    if inputs.get("attention_mask", torch.empty(0)).ndim == 4:
        actual, expected = ([model_logits(model, each, **inputs)] for each in (core, "eager"))
    else:
        actual, expected = (logits_and_gradients(model, each, **inputs) for each in (core, "eager"))
    for value, target in zip(actual, expected, strict=True):
        assert_close(value, target)


def model_logits(model, core, **inputs):
    model.set_attn_implementation(core)
    with torch.no_grad():
        return model(**inputs).logits


@pytest.fixture
def blocks(monkeypatch):
    """Record the queries of each call of `attend_in_blocks`."""
    return counted(monkeypatch, "attend_in_blocks")


def counted(monkeypatch, name):
    lengths, function = [], getattr(sdpa_in_blocks, name)

    def watched(query, *args, **kwargs):
        lengths.append(query.shape[-2])
        return function(query, *args, **kwargs)

    monkeypatch.setattr(sdpa_in_blocks, name, watched)
    return lengths


def sliding_layers(model):
    types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * model.config.num_hidden_layers
    return types.count("sliding_attention")


# Plain decoders of Transformers


def test_chunked_attention_is_left_to_sdpa(blocks):
    """Chunks have a size as windows have."""
    model = decoder("llama4_text", core=NAME, attention_chunk_size=WINDOW, max_position_embeddings=2048)
    assert_equals_eager(model, **inputs_of("plain", 2, 301))
    assert_equals_eager(model, **inputs_of("left_padding", 2, 301))
    assert not blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "iha"])
def test_a_compiled_model_has_the_gradients_of_eager_code(name):
    model = model_of(name, num_hidden_layers=1)
    inputs = inputs_of("left_padding", 2, 230)
    expected = logits_and_gradients(model, NAME, **inputs)
    model.compile(fullgraph=True, backend="aot_eager")
    for actual, target in zip(logits_and_gradients(model, NAME, **inputs), expected, strict=True):
        assert_close(actual, target)


@pytest.mark.slow
def test_export():
    """Export one program for lengths below and above the window, of which one of two layers has one."""
    model = model_of("gemma3_text", num_hidden_layers=2)
    inputs = {"input_ids": random_ids(2, 60), "attention_mask": torch.ones(2, 60).long()}
    shapes = {key: {1: torch.export.Dim("length", min=2, max=1000)} for key in inputs}
    program = torch.export.export(
        model, (), inputs | {"use_cache": False}, dynamic_shapes=shapes | {"use_cache": None}
    )
    for length in (7, 300):
        tokens, mask = random_ids(2, length), torch.ones(2, length).long()
        mask[0, :3] = 0
        logits = program.module()(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        expected = uncached_logits(model, tokens, attention_mask=mask)
        assert_close(logits[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("name", [*PLAIN, "iha"])
def test_memory_grows_with_the_length_times_the_window(name):
    """A dense mask alone would have length^2 entries."""
    model = model_of(name, window=16)
    sizes = [largest_saved_tensor(model, random_ids(1, length)) for length in (512, 1024)]
    assert sizes[1] < 2.1 * sizes[0]
    one_layer = model_of("mistral", window=16, num_hidden_layers=1)
    assert largest_saved_tensor(one_layer, random_ids(1, 1024)) < 1024**2 / 2
    one_layer.set_attn_implementation("sdpa")
    assert largest_saved_tensor(one_layer, random_ids(1, 1024)) >= 1024**2


# The function alone


def naive(query, key, value, documents, window):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows = []
    for b in range(len(query)):
        out = []
        for v in range(query.shape[2]):
            first = max(0, v - window + 1)
            seen = first + (documents[b, first : v + 1] == documents[b, v]).nonzero().flatten()
            scores = torch.einsum("hd,hud->hu", query[b, :, v], key[b][:, seen]) / query.shape[-1] ** 0.5
            out.append(torch.einsum("hu,hud->hd", scores.softmax(-1), value[b][:, seen]))
        rows.append(torch.stack(out))
    return torch.stack(rows)


def random_states(rows, length):
    generator = torch.Generator().manual_seed(length)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    states = (torch.randn(rows, heads, length, 6, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    return module, [each.requires_grad_() for each in states]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 19, None])
@pytest.mark.parametrize("length", [1, 5, 38])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_equal_single_queries(small_blocks, length, window, packed):
    module, (query, key, value) = random_states(2, length)
    documents, bounds = torch.zeros(2, length).int(), None
    if packed:
        documents[1] = torch.arange(length) // 7
        bounds = torch.tensor([0, *range(length, 2 * length, 7), 2 * length, 2 * length]).int()  # the last is empty
    attend = partial(ALL_ATTENTION_FUNCTIONS[NAME], module, sliding_window=window, scaling=6**-0.5)
    output, weights = attend(query, key, value, None, cu_seq_lens_q=bounds)
    expected = naive(query, key, value, documents, length if window is None else window)
    assert weights is None
    torch.testing.assert_close(output, expected)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((output * weight).sum(), (query, key, value))
    for actual, target in zip(gradients, torch.autograd.grad((expected * weight).sum(), (query, key, value))):
        torch.testing.assert_close(actual, target)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
@pytest.mark.parametrize("length", [38, 300])
def test_an_argument_that_changes_scores_raises_an_error(length, name):
    """Call it as Gemma 2 (softcap), GPT-OSS (s_aux) and T5 (position_bias) call attention functions."""
    module, states = random_states(1, length)
    with pytest.raises(
        ValueError, match=f"^attn_implementation='sdpa_in_blocks' does not support {name}: use 'eager'"
    ):
        ALL_ATTENTION_FUNCTIONS[NAME](module, *states, None, sliding_window=5, **{name: torch.ones(())})


DOCUMENTS = torch.tensor([0, *range(9, 38, 9), 38, *range(47, 76, 9), 76]).int()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["row", "packed"])
def test_every_query_drops(small_blocks, documents):
    """Attend to values of one: without dropout every output is 1."""
    module, (query, key, value) = random_states(2, 38)
    attend = partial(ALL_ATTENTION_FUNCTIONS[NAME], module, query, key, torch.ones_like(value), None)
    output, _ = attend(sliding_window=5, cu_seq_lens_q=documents, dropout=0.5)
    assert ((output - 1).abs().amax(dim=(0, 2, 3)) > 0.01).all()
    assert output.mean().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_blocks_are_small_where_gradients_copy_no_keys(requires_grad, monkeypatch):
    """The mask of a block that grows with the window would take memory by the square of the window."""
    rows = []

    def attend(query, key, value, mask, **options):
        rows.append(mask.shape[-2])
        return scaled_dot_product_attention(query, key, value, mask, **options)

    monkeypatch.setattr(sdpa_in_blocks, "scaled_dot_product_attention", attend)
    states = torch.randn(1, 2, 1400, 8)
    with torch.set_grad_enabled(requires_grad):
        ALL_ATTENTION_FUNCTIONS[NAME](SimpleNamespace(), states, states, states, None, sliding_window=800)
    assert set(rows) == {200 if requires_grad else LEAST_BLOCK}


@pytest.mark.parametrize(("size", "window"), [(4, 8), (4, 9), (4, 3), (1, 2), (5, 1)])
def test_the_gradient_of_overlapping_blocks_is_that_of_unfold(size, window):
    """Compare first and second derivatives, by a function that is not linear."""
    states = torch.randn(2, window + 3 * size, 2, dtype=torch.float64, requires_grad=True)

    def overlapping(states):
        return sdpa_in_blocks.OverlappingBlocks.apply(states, size, window)

    def unfolded(states):
        return states.unfold(1, window + size, size).permute(1, 0, 3, 2)

    assert torch.equal(overlapping(states), unfolded(states))
    gradients = [torch.autograd.grad(view(states).exp().sum(), states) for view in (overlapping, unfolded)]
    torch.testing.assert_close(*gradients)
    assert torch.autograd.gradgradcheck(lambda states: overlapping(states).sin(), states)


def test_blocks_are_transformed_by_torch_func():
    """Run two models at once, and differentiate each."""
    fields = {"num_hidden_layers": 1, "layer_types": "sliding_attention", "sliding_window": 4}
    models = [random_model(small_config(**fields), dtype=torch.float64, seed=seed) for seed in (0, 1)]
    ids = random_ids(1, 150)  # blocks begin 128 virtual tokens after the window

    def loss(parameters, buffers):
        return (
            functional_call(models[0], (parameters, buffers), (ids,), {"use_cache": False}).logits.logsumexp(-1).sum()
        )

    losses = vmap(loss)(*stack_module_state(models))
    gradients = vmap(grad(loss))(*stack_module_state(models))
    for place, model in enumerate(models):
        expected = model(ids, use_cache=False).logits.logsumexp(-1).sum()
        expected.backward()
        torch.testing.assert_close(losses[place], expected)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(gradients[name][place], weight.grad)


# PyTorch's FlashAttention


def varlen_stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1)):
    """Compute what `varlen_attn` of torch 2.11 does; tests/gpu/test_gpu.py compares the real one."""
    assert query.dtype == key.dtype == value.dtype and query.shape[1:] == key.shape[1:] == value.shape[1:]
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q is cu_seq_k and max_q == max_k >= cu_seq_q.diff().max()
    assert window_size[1] == 0 and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
    documents = zip(*(states.tensor_split(cu_seq_q[1:-1].tolist()) for states in (query, key, value)))
    return torch.cat([fake_flash.attend(*states, scale, True, window_size) for states in documents])


@pytest.fixture(params=["varlen", "varlen_of_newer_torch"])
def varlen(request, monkeypatch):
    """Record the sizes of heads of the calls of a stand-in for `varlen_attn`, which a CPU is made to take."""
    sizes = []

    def stand_in(query, key, value, *args, **kwargs):
        sizes.append(query.shape[-1])
        if kwargs.pop("enable_gqa", False):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return varlen_stand_in(query, key, value, *args, **kwargs)

    names = {"enable_gqa", "window_size"} if request.param == "varlen_of_newer_torch" else {"window_size"}
    monkeypatch.setattr(sdpa_in_blocks, "varlen_attn", stand_in)
    monkeypatch.setattr(sdpa_in_blocks, "VARLEN_ARGUMENTS", names)
    for name in ("has_varlen_kernel", "has_flash_attention"):
        monkeypatch.setattr(sdpa_in_blocks, name, lambda *args: True)
    return sizes


@pytest.mark.one_of(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*OWN, *PLAIN])
def test_varlen_equals_a_dense_mask(name, case, varlen):
    """Compare forward and gradients. Each layer makes one call. Transformers' masks are dense for packed documents."""
    if name in OWN and case == "custom_mask":
        pytest.skip("which windows over virtual tokens reject: see test_drawn.py")
    model = model_of(name, window=SMALL_WINDOW)
    core = "sdpa" if name in OWN else NAME
    assert_equals_eager(model, core, **inputs_of(case, 1 if case == "packed_row" else 2, 30))
    is_dense = name in PLAIN and case in ("packed", "packed_row", "custom_mask")
    calls = (2 if name == "diff" else 1) * sliding_layers(model)
    # Our models tell padding as documents; next to a hole, and in plain decoders, it is features of the heads.
    is_wider = case == "hole" or (name in PLAIN and case in ("left_padding", "right_padding", "to_come"))
    size = model.config.head_dim + 8 * is_wider
    assert set(varlen) <= {size}, (varlen, size)
    assert len(varlen) == (0 if is_dense else calls)


@pytest.mark.parametrize("case", ["left_padding", "right_padding", "hole"])
@pytest.mark.parametrize("window", [SMALL_WINDOW, None])
def test_padding_of_a_decoder_in_place(window, case, varlen, small_blocks):
    """FlashAttention gets it as documents, in heads of their own size."""
    model = interleaved("llama", window, [0, 2])
    varlen.clear()  # of the probe
    assert_equals_eager(model, "sdpa", **inputs_of(case, 2, 30))
    assert set(varlen) <= {model.config.head_dim + 8 * (case == "hole")}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_left_padding_sees_what_it_sees_in_the_base(name, varlen, small_blocks):
    """Compare all tokens: in training the last one of left padding predicts the first real one."""
    inputs = inputs_of("left_padding", 2, 30)
    expected = model_logits(decoder(name), "sdpa", **inputs)
    model = interleave_heads(decoder(name), 2)
    varlen.clear()  # of the probe
    assert_close(model(**inputs).logits, expected)
    assert varlen


def test_where_varlen_is_taken(monkeypatch):
    """Take it in half precision on a GPU that has it, without dropout."""
    major = 8
    properties = lambda device: SimpleNamespace(major=major)  # noqa: E731  # the real ones need a GPU
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def takes(device="cuda", dtype=torch.float16, head_dim=64, value_dim=None, dropout=0.0):
        query, value = (
            SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 2, 3, size))
            for size in (head_dim, value_dim or head_dim)
        )
        return sdpa_in_blocks.has_varlen_kernel(query, value, dropout)

    assert takes() and takes(dtype=torch.bfloat16) and takes(head_dim=256)
    assert not takes("cpu") and not takes("meta") and not takes(dtype=torch.float32)
    assert not takes(head_dim=20) and not takes(head_dim=264) and not takes(value_dim=32) and not takes(dropout=0.1)
    major = 7
    assert not takes()


@pytest.mark.parametrize("case", ["window", "documents", "documents in a window"])
@pytest.mark.parametrize("groups", [4, 2])
def test_compiled_code_takes_varlen(groups, case, monkeypatch):
    """Trace PyTorch's operator and its gradient without data, as one graph each. It has no kernel for a CPU."""
    monkeypatch.setattr(sdpa_in_blocks, "has_varlen_kernel", lambda *args: True)
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "varlen" in str(node.target)])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with FakeTensorMode():
        states = [torch.empty(2, n, 200, 64, dtype=torch.bfloat16, requires_grad=True) for n in (4, groups, groups)]
        attend = partial(ALL_ATTENTION_FUNCTIONS[NAME], torch.nn.Module(), attention_mask=None)
        options = {"sliding_window": 16} if "window" in case else {}
        if "documents" in case:
            options |= {"cu_seq_lens_q": torch.empty(5, dtype=torch.int32), "max_length_q": 120}
        compiled = torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
        compiled(*states, **options)[0].sum().backward()
    assert [each.grad.shape for each in states] == [each.shape for each in states]
    assert graphs == [["torch_attn._varlen_attn.default"], ["torch_attn._varlen_attn_backward.default"]]
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [5, None])
def test_compiled_documents_break_the_graph_on_a_cpu(window, small_blocks):
    """A graph cannot depend on the number of documents. A whole graph was asked for: PyTorch says what breaks it."""
    module, states = random_states(2, 38)
    attend = partial(ALL_ATTENTION_FUNCTIONS[NAME], module, attention_mask=None, sliding_window=window)
    expected, _ = attend(*states, cu_seq_lens_q=DOCUMENTS)
    actual, _ = torch.compile(attend, backend="eager")(*states, cu_seq_lens_q=DOCUMENTS)
    torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="torch.compiler.disable"):
        torch.compile(attend, backend="eager", fullgraph=True)(*states, cu_seq_lens_q=DOCUMENTS)
