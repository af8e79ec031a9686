"""Run window layers on SDPA in blocks of queries: the result is that of a dense mask, which is never built."""

import inspect
from functools import partial
from types import SimpleNamespace

import fake_flash
import pytest
import torch
from helpers import HYBRID, assert_close, decoder, logits_and_gradients, random_ids, random_model, small_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from modeling_iha import interleave_heads, windows
from modeling_iha.first_keys import FirstKeys, known_first_keys, read_mask
from modeling_iha.windows import StockCore, first_key_attention, window_attention


CONFIGS = {
    "iha": {"layer_types": "sliding_attention", "sliding_window": 5, "num_pseudo_heads": 3},
    "iha_window_of_2": {"layer_types": "sliding_attention", "sliding_window": 2},
    "mha": {"layer_types": "sliding_attention", "sliding_window": 5, "attention_kinds": "mha"},
    "diff": {"layer_types": "sliding_attention", "sliding_window": 5, "attention_kinds": "diff"},
    "hybrid": {**HYBRID, "sliding_window": 9},
}


@pytest.fixture
def blocks(monkeypatch):
    """Record the lengths that go through `window_attention`."""
    lengths = []

    def counted(core, query, *args, **kwargs):
        lengths.append(query.shape[2])
        return window_attention(core, query, *args, **kwargs)

    monkeypatch.setattr(windows, "window_attention", counted)
    return lengths


def inputs_of(case, rows, length):
    """Return the arguments of a forward pass of a plain, cached, padded or packed input."""
    inputs, real = (
        {"input_ids": random_ids(rows, length), "use_cache": case == "cache"},
        torch.ones(rows, length).long(),
    )
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
        inputs["position_ids"] = torch.cat([torch.arange(20), torch.arange(length - 20)]).expand(rows, -1)
    return inputs


def assert_sdpa_is_eager(model, **inputs):
    actual = logits_and_gradients(model, "sdpa", **inputs)
    for value, target in zip(actual, logits_and_gradients(model, "eager", **inputs), strict=True):
        assert_close(value, target)


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


@pytest.mark.parametrize("window", [1, 2, 3, 4, 19, None])
@pytest.mark.parametrize("length", [1, 5, 38])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_equal_single_queries(small_blocks, length, window, packed):
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(2, heads, length, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    documents = torch.zeros(2, length).int()
    if packed:
        documents[1] = torch.arange(length) // 7
    module = torch.nn.Module()
    module.config, module.num_key_value_groups = small_config(), 2
    weight = torch.randn(2, length, 4, 6, generator=generator, dtype=torch.float64)
    first_keys = FirstKeys(documents.shape[1], first=torch.searchsorted(documents, documents).int())
    core = StockCore(sdpa_attention_forward, module)
    output, _ = first_key_attention(core, query, key, value, first_keys, sliding_window=window, scaling=6**-0.5)
    expected = naive(query, key, value, documents, length if window is None else window)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad((output * weight).sum(), (query, key, value))
    for actual, target in zip(gradients, torch.autograd.grad((expected * weight).sum(), (query, key, value))):
        torch.testing.assert_close(actual, target)


@pytest.mark.parametrize(("window", "has_values"), [(None, True), (1, True), (3, True), (1, False), (3, False)])
def test_a_mask_says_what_its_first_keys_said(window, has_values):
    """Read a mask of 2 rows of 5 tokens, P = 2, as each layout lays it out, and convert it to tokens."""
    is_document_start = torch.tensor([[True, False, False, True, False], [True, True, False, False, False]])
    over_tokens = known_first_keys(is_document_start, None, 1, window)
    first_keys = known_first_keys(is_document_start, None, 2, window)
    if not has_values:
        over_tokens, first_keys = (FirstKeys(keys.length, keys.window) for keys in (over_tokens, first_keys))
    read = read_mask(first_keys.as_mask("cpu"))
    assert (read.length, read.window) == (10, None if window is None else 2 * window)
    converted = read.over_tokens(2)
    assert (converted.length, converted.window) == (5, window)
    if not has_values:
        assert read.first is None and converted.first is None
        return
    assert torch.equal(read.first, first_keys.first)
    assert torch.equal(converted.first, over_tokens.first)
    if window == 1:
        return  # over tokens each one is a document of its own, and over virtual tokens it is not
    for actual, expected in ((read, first_keys), (converted, over_tokens)):
        assert actual.documents().bounds.tolist() == expected.documents().bounds.tolist()
        assert actual.documents()[1:] == expected.documents()[1:]


@pytest.mark.parametrize("left", [(13, 0), (13, 5)])
@pytest.mark.parametrize("window", [None, 9])
def test_a_mask_of_compiled_code_hides_padding_after_a_graph_break(small_blocks, window, left):
    """Attend in eager code under such a mask, with padding on both sides and between real tokens."""
    query, key, value = (torch.randn(2, 2, 38, 6, dtype=torch.float64) for _ in range(3))
    real = torch.ones(2, 38, dtype=torch.bool)
    real[0, : left[0]] = False
    real[1, : left[1]] = False
    real[1, 20:22] = False
    real[1, -3:] = False
    row_starts = (torch.arange(38) == 0).expand(2, -1)
    first_keys = known_first_keys(row_starts, ~real, 1, window)
    output, _ = first_key_attention(
        StockCore(sdpa_attention_forward, torch.nn.Module()), query, key, value, first_keys
    )
    distance = torch.arange(38)[:, None] - torch.arange(38)
    mask = (distance >= 0) & (distance < (window or 38)) & real[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
    torch.testing.assert_close(output[real], expected[real])


def varlen_stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1)):
    """Compute what `varlen_attn` of torch 2.11 does; tests/gpu/test_gpu.py compares the real one."""
    assert query.dtype == key.dtype == value.dtype and query.shape[1:] == key.shape[1:] == value.shape[1:]
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q is cu_seq_k and max_q == max_k == cu_seq_q.diff().max()
    assert window_size[1] == 0 and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
    documents = zip(*(states.tensor_split(cu_seq_q[1:-1].tolist()) for states in (query, key, value)))
    return torch.cat([fake_flash.attend(*states, scale, True, window_size) for states in documents])


@pytest.fixture(params=[None, "varlen", "varlen_of_newer_torch"])
def varlen(request, monkeypatch):
    """Record the lengths of the calls of a stand-in for `varlen_attn`, which `has_varlen` admits on a CPU, if any."""
    lengths = []

    def counted(query, key, value, *args, **kwargs):
        lengths.append(len(query))
        if kwargs.pop("enable_gqa", False):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return varlen_stand_in(query, key, value, *args, **kwargs)

    def newer(query, key, value, *args, enable_gqa=False, **kwargs): ...

    counted.__signature__ = inspect.signature(newer if request.param == "varlen_of_newer_torch" else varlen_stand_in)
    monkeypatch.setattr(windows, "varlen_attn", counted)
    monkeypatch.setattr(windows, "has_varlen", lambda *args: request.param is not None)
    return lengths


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "case", ["plain", "cache", "left_padding", "right_padding", "packed", "packed_row", "hole", "to_come"]
)
@pytest.mark.parametrize("name", [*CONFIGS, "global"])
def test_sdpa_equals_a_dense_mask(name, case, varlen, blocks, small_blocks, request):
    """Compare forward and gradients in blocks and by varlen, of which each layer with first keys makes one call.

    A hidden token between others leaves a dense mask: what follows sees what came before, which is no document."""
    fields = {"num_pseudo_heads": 3} if name == "global" else CONFIGS[name]
    model = random_model(small_config(**fields))
    assert_sdpa_is_eager(model, **inputs_of(case, 1 if case == "packed_row" else 2, 30))
    has_first_keys = [
        case != "hole" and (layer == "sliding_attention" or case not in ("plain", "cache"))
        for layer in model.config.layer_types
    ]
    calls = (2 if name == "diff" else 1) * sum(has_first_keys)
    has_varlen = request.node.callspec.params["varlen"] is not None
    assert len(varlen) == (calls if has_varlen else 0) and bool(varlen or blocks) == any(has_first_keys)


def test_where_varlen_is_taken(monkeypatch):
    """Take it in half precision on a GPU that has it, also where autocast makes it."""
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)  # these two need a GPU
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: autocast)
    autocast = False

    def takes(device="cuda", dtype=torch.float16, head_dim=64, attention_dropout=0.0):
        states = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 2, 3, head_dim))
        return windows.has_varlen(states, attention_dropout)

    assert takes() and takes(dtype=torch.bfloat16) and takes(head_dim=256)
    assert not takes("cpu") and not takes("meta") and not takes(dtype=torch.float32)
    assert not takes(head_dim=20) and not takes(head_dim=264) and not takes(attention_dropout=0.1)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert not takes()
    autocast = True
    assert takes(dtype=torch.float32)
    capability = (7, 5)
    assert not takes()


def test_the_documents_of_a_mask_are_looked_for_once(small_blocks, monkeypatch):
    """Run more layers than layer types on padded rows: a GPU would wait each time."""
    found, nonzero = [], torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda mask: found.append(mask) or nonzero(mask))
    model = random_model(small_config(**{**HYBRID, "sliding_window": 9}))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(**inputs_of("left_padding", 2, 38))
    assert len(found) == len(set(model.config.layer_types)) < len(model.model.layers)


def test_the_window_of_a_mask_is_made_once(monkeypatch):
    """Run three layers of an eager decoder with a window of its own."""
    made, masked_fill = [], torch.Tensor.masked_fill
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda *args: made.append(1) or masked_fill(*args))
    model = interleave_heads(decoder("llama", core="eager"), 2, sliding_window=4)
    made.clear()
    with torch.no_grad():
        model(random_ids(2, 9), use_cache=False)
    assert len(made) == 1


@pytest.mark.parametrize(("size", "window"), [(4, 8), (4, 9), (4, 3), (1, 2), (5, 1)])
def test_the_gradient_of_overlapping_blocks_is_that_of_unfold(size, window):
    """Compare first and second derivatives, and those of several rows at once, by a function that is not linear."""
    states = torch.randn(2, window + 3 * size, 2, dtype=torch.float64, requires_grad=True)
    overlapping = partial(windows._overlapping_blocks, size=size, window=window)
    unfolded = partial(windows._unfold, size=size, window=window)
    assert torch.equal(overlapping(states), unfolded(states))
    assert torch.autograd.gradgradcheck(lambda states: overlapping(states).sin(), states)
    gradients = [
        torch.func.vmap(torch.func.grad(lambda states: view(states).exp().sum()))(torch.stack((states, states.sin())))
        for view in (overlapping, unfolded)
    ]
    torch.testing.assert_close(*gradients)
    hessians = [
        torch.func.hessian(lambda states: view(states).exp().sum())(states) for view in (overlapping, unfolded)
    ]
    torch.testing.assert_close(*hessians)  # forward over reverse
