"""Compare the Triton kernels of one new token with `attend_new_token` in float64, and count their launches.

On a machine without a GPU they run in Triton's interpreter (conftest.py), which multiplies the bits of bfloat16: there
half precision is float16.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from helpers import CountedKernel, decoder, geometry_model, random_ids, set_core, train_mixing
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from modeling_iha import interleave_heads, interleaving, pair_heads, pairing, triton_kernels
from modeling_iha.interleaving import HeadMixing, MixedHeads
from modeling_iha.pairing import PairedHeads
from modeling_iha.transformers_versions import CACHE
from modeling_iha.triton_kernels import decode, kernels_decode


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The largest difference to float64, over the largest value. In float16 that of the plain formula is up to 3.4e-3 here.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}

needs_triton = pytest.mark.skipif(triton_kernels.triton is None, reason="Triton is not installed (pip install triton)")
in_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
)
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16


def rotation_of(num_pseudo_heads, head_dim):
    angles = torch.arange(num_pseudo_heads)[:, None] * 100.0 ** (-torch.arange(head_dim // 2) * 2 / head_dim)
    return torch.cat((angles.cos(),) * 2, dim=-1).to(DEVICE), torch.cat((angles.sin(),) * 2, dim=-1).to(DEVICE)


def mask_of(num_pseudo_heads, num_keys, window=None, padding=(0,), free=0, num_heads=1):
    """Return the mask [batch, num_heads, P, K * P] of a new token, behind which `free` slots of the cache are free.

    Row b begins with `padding[b]` tokens of padding. Head h hides h more tokens."""
    keys = torch.arange(num_keys * num_pseudo_heads)
    query = (num_keys - free - 1) * num_pseudo_heads + torch.arange(num_pseudo_heads)[:, None]
    seen = keys <= query
    if window is not None:
        seen = seen & (keys > query - window * num_pseudo_heads)
    hidden_tokens = torch.tensor(padding)[:, None] + torch.arange(num_heads)
    return (seen & (keys >= hidden_tokens[..., None, None] * num_pseudo_heads)).to(DEVICE)


def additive(mask, least):
    return torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, least)


def draw(num_heads, groups, num_pseudo_heads, head_dim, num_keys, batch=1, dtype=HALF, rotates=True):
    """Return `MixedHeads`, and a query, keys and values."""
    generator = torch.Generator().manual_seed(1)
    sizes = (num_heads, groups, groups)
    mixes = [torch.randn(size, size, num_pseudo_heads, generator=generator).to(DEVICE) for size in sizes]
    collapse = torch.randn(num_heads, num_pseudo_heads, generator=generator).to(DEVICE)
    heads = MixedHeads(*mixes, collapse, rotation_of(num_pseudo_heads, head_dim) if rotates else None)
    query = torch.randn(batch, 1, num_heads, head_dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    states = torch.randn(2, batch, groups, num_keys, head_dim, generator=generator).to(DEVICE, dtype)
    return heads, query, *states


def check_paired(num_pseudo_heads, query, key, value, mask):
    """Compare paired heads, whose mask is [batch or 1, H or 1, P, K * P]."""
    heads = PairedHeads(num_pseudo_heads)
    exact = heads.attend_new_token(
        query.double(), key.double(), value.double(), heads.mask_of_virtual_heads(mask), 0.2
    )
    actual = decode(query, key, value, heads.mask_of_virtual_heads(mask), 0.2)
    assert actual.shape == exact.shape and actual.dtype == value.dtype
    assert (actual - exact).abs().max() <= TOLERANCE[value.dtype] * exact.abs().max()


def in_float64(heads):
    rotation = heads.rotation and tuple(table.double() for table in heads.rotation)
    return MixedHeads(*(weight.double() for weight in heads[:4]), rotation)


@torch.no_grad()
def check(heads, query, key, value, mask):
    scaling = query.shape[-1] ** -0.5 / query.shape[1]
    actual = decode(query, key, value, mask, scaling, *heads)
    exact_mask = mask if mask.dtype == torch.bool else mask.double()
    exact = in_float64(heads).attend_new_token(query.double(), key.double(), value.double(), exact_mask, scaling)
    assert actual.shape == exact.shape and actual.dtype == value.dtype
    assert (actual - exact).abs().max() <= TOLERANCE[value.dtype] * exact.abs().max()


# Results


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def scattered(query, key, value):
    """Return a cache that stores tokens first, and one whose features are not adjacent."""
    key = key.transpose(1, 2).contiguous().transpose(1, 2)
    return query, key, value.transpose(2, 3).contiguous().transpose(2, 3)


# heads, groups, P, head_dim, keys, batch; what `mask_of` is given; how the states differ from those of `draw`
CASES = [
    (
        (4, 2, 3, 16, 70, 2),
        {"window": 69, "padding": (0, 5)},
        None,
    ),  # the oldest key is too far from some pseudo-heads
    ((1, 1, 20, 16, 66, 1), {"window": 65}, None),
    ((5, 5, 2, 80, 1, 1), {}, None),
    ((4, 2, 2, 16, 40, 1), {"num_heads": 4}, None),
    ((4, 2, 2, 16, 150, 1), {}, lambda query, key, value: (query * 300, key, value)),  # beyond any exponential
    ((4, 2, 2, 16, 70, 2), {}, scattered),
    ((4, 2, 2, 16, 70, 1), {}, lambda query, key, value: (query, key, value[..., :6])),
    *(slow((20, 20, size, 128, 150, 1), {"window": 149}, None) for size in (2, 4, 20)),
    slow((20, 20, 2, 128, 150, 1), {}, None),
]


@needs_triton
@pytest.mark.one_of(4)
@in_each_dtype
@pytest.mark.parametrize(("sizes", "given", "change"), CASES)
def test_sizes_masks_and_states(sizes, given, change, dtype):
    heads, *states = draw(*sizes, dtype=dtype)
    mask = mask_of(sizes[2], sizes[4], **given)
    states = change(*states) if change else states
    check(heads, *states, mask)
    if "num_heads" in given:
        check(heads, *states, additive(mask, -torch.inf))


@needs_triton
@in_each_dtype
def test_a_static_cache_with_free_slots(dtype):
    heads, query, key, value = draw(2, 2, 4, 10, 130, dtype=dtype, rotates=False)
    key[:, :, 61:] = value[:, :, 61:] = 1000
    mask = mask_of(4, 130, free=69)
    check(heads, query, key, value, mask)
    check(heads, query, key, value, additive(mask, torch.finfo(dtype).min).to(dtype))
    check(heads, query, key, value, additive(mask, float("-inf")).to(dtype))  # one tile is hidden as a whole


@needs_triton
@pytest.mark.parametrize("head_dim", [10, 64])
@pytest.mark.parametrize("programs", [1, 4, 132])
def test_keys_in_chunks(programs, head_dim, monkeypatch):
    """Give a program one tile of keys, two or all of them, and sum their parts four at once."""
    monkeypatch.setattr(triton_kernels, "DECODE_PROGRAMS", programs)
    monkeypatch.setattr(triton_kernels, "SUMMED_ROWS", 4)
    check(*draw(2, 2, 3, head_dim, 290, dtype=torch.float32), mask_of(3, 290, window=200))


@needs_triton
def test_a_pseudo_head_that_sees_nothing():
    """Sum the values for it, as the plain formula does (in float64 that takes their mean)."""
    heads, *states = draw(4, 2, 2, 16, 70)
    mask = mask_of(2, 70)
    mask[:, :, 0] = False
    with torch.no_grad():
        actual, plain = decode(*states, mask, 0.1, *heads), heads.attend_new_token(*states, mask, 0.1)
    assert plain.isfinite().all() and (actual - plain).abs().max() < 4 * TOLERANCE[HALF] * plain.abs().max()


# heads, groups, P, head_dim, keys, batch
PAIRED = [
    (4, 4, 2, 16, 100, 2),
    (8, 4, 2, 32, 70, 1),
    (20, 20, 4, 64, 70, 1),
    (8, 4, 4, 16, 65, 2),
    (6, 6, 3, 24, 1, 1),
]


@needs_triton
@pytest.mark.one_of(4)
@in_each_dtype
@pytest.mark.parametrize("sizes", PAIRED, ids=str)
@torch.no_grad()
def test_paired_heads(sizes, dtype):
    """Attend globally, within a window, and with a mask for each head."""
    num_heads, groups, num_pseudo_heads, head_dim, num_keys, batch = sizes
    _, *states = draw(num_heads, groups, num_pseudo_heads, head_dim, num_keys, batch=batch, dtype=dtype)
    for mask in (
        mask_of(num_pseudo_heads, num_keys),
        mask_of(num_pseudo_heads, num_keys, window=max(1, num_keys // 2)),
        mask_of(num_pseudo_heads, num_keys, num_heads=1 if num_keys == 1 else num_heads),
    ):
        check_paired(num_pseudo_heads, *states, mask)


@needs_triton
@torch.no_grad()
def test_two_runs_are_equal():
    heads, *states = draw(4, 2, 3, 16, 300)
    mask = mask_of(3, 300)
    assert torch.equal(decode(*states, mask, 0.1, *heads), decode(*states, mask, 0.1, *heads))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@torch.no_grad()
def test_a_cuda_graph_reads_the_mask_of_each_token():
    heads, *states = draw(20, 20, 4, 128, 300)
    mask = mask_of(4, 300, free=100)
    run = partial(decode, *states, mask, 0.1, *heads)
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    mask.copy_(mask_of(4, 300))
    graph.replay()
    assert output.equal(run())


# Whole models


@needs_triton
@pytest.mark.one_of(4)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["window", "llama", "paired llama"])
def test_models(name, cache, monkeypatch):
    """Decode a token after left padding: an "iha" model within a window, an interleaved decoder and one with pairs."""
    calls = []
    for module in interleaving, pairing:
        monkeypatch.setattr(
            module, "decode_by_kernel", lambda *args, **mixing: calls.append(1) or decode(*args, **mixing)
        )
        monkeypatch.setattr(module, "kernels_decode", lambda *_: True)  # in float32, and on a CPU
    if name == "paired llama":
        model = pair_heads(decoder("llama", num_hidden_layers=2), 2)
    elif name == "llama":
        model = train_mixing(interleave_heads(decoder("llama", num_hidden_layers=2), 2))
    else:
        model = geometry_model(name)
    input_ids, mask = random_ids(2, 12).to(DEVICE), torch.ones(2, 12, dtype=torch.long, device=DEVICE)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    set_core(model.to(DEVICE), "sdpa")
    past = StaticCache(model.config, max_cache_len=16) if cache == "static" else DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        inputs = {"attention_mask": mask[:, :-1], "position_ids": positions[:, :-1], CACHE: past}
        model(input_ids[:, :-1], **inputs, use_cache=True)
        assert not calls
        set_core(model, "base")
        inputs = {"attention_mask": mask, "position_ids": positions[:, -1:], CACHE: past}
        actual = model(input_ids[:, -1:], **inputs, use_cache=True).logits[:, -1]
    assert len(calls) == 2
    assert (actual - expected).abs().max() < 2e-5 * expected.abs().max()


# Launches


NO_LAUNCH = ("_unsafe_view", "new_empty", "empty", "promote_types")


class Launches(TorchDispatchMode):
    """Count operators that launch a kernel on a GPU: those that return no view."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        is_view = any(result.alias_info and not result.alias_info.is_write for result in operator._schema.returns)
        if not is_view and name not in NO_LAUNCH:
            self.count[name] += 1
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch):
    """Return a function that counts the launches of another one without gradients."""

    @torch.no_grad()
    def launches(function):
        launched = []
        with Launches() as mode:
            for name in ("chunks_kernel", "sum_kernel"):
                monkeypatch.setattr(triton_kernels, name, CountedKernel(name, launched))
            function()
        return mode.count.total() + len(launched)

    return launches


@pytest.mark.parametrize("num_pseudo_heads", [2, 4, 20])
def test_launches(num_pseudo_heads, launches):
    """Launch 2 instead of 34, and for paired heads 2 instead of at most 14.

    One operator may launch several kernels, such as `logsumexp`, which both plain formulas call."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    mixes = [empty(20, 20, num_pseudo_heads) for _ in range(3)]
    rotation = (empty(num_pseudo_heads, 128), empty(num_pseudo_heads, 128))
    heads = MixedHeads(*mixes, empty(20, num_pseudo_heads), rotation)
    mask = empty(1, 1, num_pseudo_heads, 2049 * num_pseudo_heads, dtype=torch.bool)
    states = (empty(1, 20, 1, 128), empty(1, 20, 2049, 128), empty(1, 20, 2049, 128), mask, 0.1)
    assert launches(lambda: decode(*states, *heads)) == 2
    assert launches(lambda: heads.attend_new_token(*states)) == 34
    assert launches(lambda: decode(*states)) == 2
    assert launches(lambda: PairedHeads(num_pseudo_heads).attend_new_token(*states)) <= 14


@pytest.mark.parametrize("num_pseudo_heads", [2, 4, 20])
def test_scores_are_not_kept(num_pseudo_heads, monkeypatch):
    """Allocate at most 5 MB for 65,536 keys, of which the scores would take 2.1 GB with P = 20."""
    for name in ("chunks_kernel", "sum_kernel"):
        monkeypatch.setattr(triton_kernels, name, CountedKernel(name, []))
    allocated = []
    new_empty = torch.Tensor.new_empty

    def allocate(tensor, *sizes, **options):
        allocated.append(new_empty(tensor, *sizes, **options))
        return allocated[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", allocate)
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    key, value = empty(2, 1, 20, 65536, 128)
    mask = empty(1, 1, num_pseudo_heads, 65536 * num_pseudo_heads, dtype=torch.bool)
    mixes = [empty(20, 20, num_pseudo_heads) for _ in range(3)]
    decode(empty(1, 20, 1, 128), key, value, mask, 0.1, *mixes, empty(20, num_pseudo_heads))
    assert 0 < sum(each.nbytes for each in allocated) <= 5e6


def test_without_gradients_a_weight_is_one_launch(launches):
    mixing = HeadMixing(20, 4)
    assert launches(lambda: mixing(None)) == 1


# The choice


def test_gradients_float32_and_long_heads_take_the_plain_formula(monkeypatch):
    monkeypatch.setattr(triton_kernels, "kernels_take", lambda *_: True)
    query = torch.empty(1, 4, 1, 16, dtype=torch.bfloat16)
    assert not kernels_decode(query, True)
    with torch.no_grad():
        assert kernels_decode(query, True)
        assert not kernels_decode(query, False)
        assert not kernels_decode(query.float(), True)
        assert not kernels_decode(query.repeat(1, 1, 1, 17), True)
