"""Compare the Triton kernels with the PyTorch code that defines them, in float64.

On a machine without a GPU they run in Triton's interpreter (conftest.py), which multiplies the bits of bfloat16: there
half precision is float16. The last tests compile them, which needs no GPU either.
"""

import runpy

import pytest
import torch
from helpers import (
    HYBRID,
    CountedKernel,
    assert_close,
    compiled_kernels,
    decoder,
    random_ids,
    small_config,
    traced_kernels,
    train_mixing,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from iha.errors import ROOT
from modeling_iha import IHAForCausalLM, interleave_heads, interleaving
from modeling_iha.interleaving import MixedHeads
from modeling_iha.transformers_versions import CACHE


pytest.importorskip("triton", reason="Triton is not installed (make test installs it)")

from modeling_iha import triton_kernels  # noqa: E402
from modeling_iha.triton_kernels import collapse, expand  # noqa: E402


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Half precision rounds the inputs, the mixing, a rotated gradient and the result: four times 2^-9 or 2^-12 of a value.
ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE, dtype=torch.float64).to(dtype).requires_grad_()


def heads(batch, num_heads, num_tokens, head_dim, layout, dtype=torch.float32):
    """Draw heads [batch, M, N, D] as projections write them ("tokens"), as a cache does, or with features apart."""
    shape, order = {
        "tokens": ((batch, num_tokens, num_heads, head_dim), (0, 2, 1, 3)),
        "heads": ((batch, num_heads, num_tokens, head_dim), (0, 1, 2, 3)),
        "apart": ((batch, num_heads, head_dim, num_tokens), (0, 1, 3, 2)),
    }[layout]
    return leaf(*shape, dtype=dtype).detach().permute(order).requires_grad_()


def tables(num_pseudo_heads, head_dim):
    angles = torch.arange(num_pseudo_heads)[:, None] * 100.0 ** (-torch.arange(head_dim // 2) * 2 / head_dim)
    angles = torch.cat((angles, angles), dim=-1).to(DEVICE)
    return angles.cos(), angles.sin()


def doubles(*tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def expanded(*inputs):
    """Compute `expand` by its definition, of float64 states, which no kernel takes."""
    *inputs, rotation = inputs
    assert inputs[0].dtype == torch.float64
    rotation = rotation and tuple(table.double() for table in rotation)
    return MixedHeads(*inputs[3:], None, rotation).make_virtual_tokens(*inputs[:3])


def expanded_by_kernels(*inputs):
    *inputs, rotation = inputs
    return expand(inputs[:3], inputs[3:], rotation)


def collapsed(output, weight):
    assert output.dtype == torch.float64
    return (MixedHeads(weight[None], None, None, weight, None).collapse_output(output),)


def collapsed_by_kernels(output, weight):
    result = collapse(output, weight)
    assert result.is_contiguous()  # some base models call `view` on it
    return (result,)


def assert_equal_with_gradients(function, definition, inputs, dtype, *constants):
    """Compare the results of a function of inputs, a tuple, and their gradients."""
    results = function(*inputs, *constants)
    exact = doubles(*inputs)
    expected = definition(*exact, *constants)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == dtype and result.shape == wanted.shape
    seeds = [torch.randn_like(result) for result in results]
    gradients = torch.autograd.grad(results, inputs, seeds)
    wanted = torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
    for found, wanted in zip((*results, *gradients), (*expected, *wanted), strict=True):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < ERRORS[dtype], error
    for gradient, given in zip(gradients, inputs):
        assert gradient.dtype == given.dtype


@pytest.fixture
def nan_where_nothing_is_written():
    """Let allocations begin with NaN, and what has no deterministic algorithm raise an error."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# batch, H, G, P, N, K, head_dim of queries and keys, of values, rotates, layout
EXPANDED = [
    pytest.param((2, 3, 3, 3, 5, 5, 80, 80, True, "apart"), id="a head_dim that is no power of two"),
    pytest.param((2, 4, 2, 4, 3, 7, 64, 64, True, "heads"), id="cached keys, grouped"),
    pytest.param((1, 4, 2, 2, 5, 3, 16, 16, False, "heads"), id="fewer keys than queries"),
    pytest.param((1, 5, 5, 2, 35, 35, 8, 8, False, "tokens"), id="two parts of a gradient, without rotation"),
    pytest.param((1, 2, 1, 2, 1, 70, 8, 24, True, "tokens"), id="parts without queries, longer values"),
    pytest.param((1, 20, 20, 2, 3, 3, 128, 128, True, "tokens"), id="20 heads"),
    pytest.param((1, 20, 5, 4, 2, 2, 128, 64, False, "tokens"), id="20 heads in groups, shorter values"),
    pytest.param((1, 20, 4, 20, 1, 1, 64, 64, True, "tokens"), id="P = 20"),
    pytest.param((1, 40, 8, 2, 2, 2, 128, 128, True, "tokens"), id="a token in several tiles"),
    pytest.param((1, 4, 4, 3, 150, 150, 64, 64, True, "heads"), marks=pytest.mark.slow, id="many tokens"),
    pytest.param((2, 20, 20, 3, 13, 13, 64, 64, True, "heads"), marks=pytest.mark.slow, id="rows of 20 heads"),
]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EXPANDED)
@pytest.mark.usefixtures("nan_where_nothing_is_written")
def test_expand(case, dtype):
    batch, num_heads, groups, size, num_tokens, num_keys, head_dim, value_dim, rotates, layout = case
    states = [
        heads(batch, num_heads, num_tokens, head_dim, layout, dtype),
        heads(batch, groups, num_keys, head_dim, layout, dtype),
        heads(batch, groups, num_keys, value_dim, layout, dtype),
    ]
    mixes = [leaf(count, count, size) for count in (num_heads, groups, groups)]
    rotation = tables(size, head_dim) if rotates else None
    assert_equal_with_gradients(expanded_by_kernels, expanded, [*states, *mixes], dtype, rotation)


def attention_inputs(num_heads, groups, size, num_tokens, head_dim):
    """Draw queries, keys and values, and alpha of each."""
    counts = (num_heads, groups, groups)
    states = [heads(1, count, num_tokens, head_dim, "tokens") for count in counts]
    return states, [leaf(count, count, size) for count in counts]


def test_expand_by_a_slice_of_the_heads():
    """Make the virtual tokens of some heads only: their columns of alpha are a view."""
    states, mixes = attention_inputs(6, 3, 3, 3, 16)
    whole = expand(states, mixes, tables(3, 16))
    part = MixedHeads(*mixes, leaf(6, 3), tables(3, 16)).in_parts(3)[1]
    for of_part, of_all, count in zip(expand(states, part[:3], tables(3, 16)), whole, (2, 1, 1), strict=True):
        assert torch.equal(of_part, of_all[:, count : 2 * count])


# batch, N, H, P, D
COLLAPSED = [(1, 3, 4, 20, 128), (2, 13, 5, 3, 64), (1, 33, 4, 4, 80), (1, 2, 20, 2, 128)]
COLLAPSED += [pytest.param(case, marks=pytest.mark.slow) for case in [(1, 3, 20, 20, 128), (1, 40, 40, 4, 64)]]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", COLLAPSED, ids=str)
@pytest.mark.usefixtures("nan_where_nothing_is_written")
def test_collapse(case, dtype):
    batch, num_tokens, num_heads, size, head_dim = case
    output = leaf(batch, num_tokens * size, num_heads, head_dim, dtype=dtype)
    assert_equal_with_gradients(collapsed_by_kernels, collapsed, [output, leaf(num_heads, size)], dtype)


@pytest.mark.slow
def test_the_gradients_of_the_mixing_are_the_same_in_every_run():
    states, mixes = attention_inputs(5, 5, 2, 70, 8)
    output, weight = leaf(1, 140, 5, 8), leaf(5, 2)
    for results, mixing in (expand(states, mixes, tables(2, 8)), mixes), ((collapse(output, weight),), [weight]):
        seeds = [torch.randn_like(result) for result in results]
        first, second = (torch.autograd.grad(results, mixing, seeds, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("rotates", [False, True])
def test_gradients_of_gradients(rotates):
    """Differentiate a gradient again, as a gradient penalty does."""
    states, mixes = attention_inputs(4, 2, 3, 5, 8)
    cases = [
        (expanded_by_kernels, expanded, [*states, *mixes], [tables(3, 8) if rotates else None]),
        (collapsed_by_kernels, collapsed, [leaf(2, 6, 4, 8), leaf(4, 3)], []),
    ]
    for function, definition, inputs, constants in cases:
        found = []
        for each, tensors in (function, inputs), (definition, doubles(*inputs)):
            loss = sum(result.pow(3).sum() for result in each(*tensors, *constants))
            gradients = torch.autograd.grad(loss, tensors, create_graph=True)
            penalty = sum(gradient.pow(2).sum() for gradient in gradients)
            found.append(torch.autograd.grad(penalty, tensors))
        for gradient, wanted in zip(*found, strict=True):
            assert ((gradient - wanted).norm() / wanted.norm()) < ERRORS[torch.float32]


def test_only_gradients_that_are_needed_are_computed():
    """Freeze the mixing, or all but the mixing."""
    for name, are_frozen in ("gradients_of_mixes", "mixes"), ("gradients_of_states", "states"):
        states, mixes = attention_inputs(4, 2, 2, 3, 8)
        for frozen in mixes if are_frozen == "mixes" else states:
            frozen.requires_grad_(False)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(triton_kernels, name)
            sum(virtual.sum() for virtual in expand(states, mixes)).backward()
        assert all((each.grad is None) == (not each.requires_grad) for each in (*states, *mixes))


def test_one_launch_has_queries_keys_and_values(monkeypatch):
    """Launch one kernel forward, and one for the gradients of all states and one for those of all mixing."""
    launched = []
    for name in [name for name in vars(triton_kernels) if name.endswith("_kernel")]:
        kernel = getattr(triton_kernels, name)
        monkeypatch.setattr(triton_kernels, name, CountedKernel(name, launched, kernel))
    states, mixes = attention_inputs(4, 2, 2, 3, 8)
    virtual = expand(states, mixes, tables(2, 8))
    assert launched == ["expand_kernel"]
    torch.autograd.backward(virtual, [torch.ones_like(each) for each in virtual])
    assert launched[1:] == ["expand_backward_states_kernel", "expand_backward_alpha_kernel"]


def models():
    config = small_config(**HYBRID, sliding_window=4, pseudo_collapse="per_head", num_pseudo_heads=3)
    yield IHAForCausalLM(config)
    yield train_mixing(interleave_heads(decoder("llama"), 2, sliding_window=4))


def test_whole_models(monkeypatch):
    """Run windows, grouped queries and both kinds of positions, with the kernels and without them."""
    for model in list(models()):  # `interleave_heads` runs a model on the CPU, which no kernel takes
        model = model.to(DEVICE)
        input_ids = random_ids(1, 6).to(DEVICE)
        found = []
        for takes in False, True:
            calls = []
            monkeypatch.setattr(interleaving, "kernels_take", lambda *_: calls.append(1) or takes)
            result = model(input_ids=input_ids, labels=input_ids, use_cache=False)
            model.zero_grad()
            result.loss.backward()
            found.append([result.logits, *(parameter.grad for parameter in model.parameters())])
            assert calls
        for without_kernels, with_kernels in zip(*found, strict=True):
            assert_close(with_kernels, without_kernels, 1e-5)


@torch.no_grad()
def test_chunks_on_a_cache(monkeypatch):
    """Prefill in two chunks, the second of which has more keys than queries."""
    for model in list(models()):
        model = model.to(DEVICE).eval()
        input_ids = random_ids(1, 9).to(DEVICE)
        found = []
        for takes in False, True:
            monkeypatch.setattr(interleaving, "kernels_take", lambda *_: takes)
            cache = DynamicCache(config=model.config)
            model(input_ids[:, :6], use_cache=True, **{CACHE: cache})
            found.append(model(input_ids[:, 6:], use_cache=True, **{CACHE: cache}).logits)
        assert_close(found[1], found[0], 1e-5)


def test_tensors_without_memory_are_mixed_in_pytorch():
    """Leave CPU tensors, and those of an export, to PyTorch."""
    assert not triton_kernels.kernels_take(torch.empty(1, 2, 3, 4), torch.empty(2, 2, 2))
    with FakeTensorMode():
        states, alpha = torch.empty(1, 2, 3, 4, device="cuda"), torch.empty(2, 2, 2, device="cuda")
    assert not triton_kernels.kernels_take(states, alpha)


@pytest.mark.parametrize(
    ("wanted", "least", "decodes"), [(None, (8192, 4096), False), ("0", (8192, 4096), False), ("all", (0, 0), True)]
)
def test_kernels_that_no_gpu_found_faster_are_off(wanted, least, decodes, monkeypatch):
    """A visit to a GPU takes all of them; `make test` does too (conftest.py)."""
    monkeypatch.delenv("IHA_TRITON_KERNELS")
    if wanted is not None:
        monkeypatch.setenv("IHA_TRITON_KERNELS", wanted)
    kernels = runpy.run_path(triton_kernels.__file__)
    pays = kernels["kernels_are_faster"]
    assert pays(least[1]) and pays(4095) == (wanted == "all")
    with torch.no_grad():
        assert pays(least[0]) and pays(8191) == (wanted == "all")
    for name in "DECODES_MIXED_HEADS", "DECODES_PAIRED_HEADS", "DECODES_COMPILED":
        assert kernels[name] == decodes


def test_a_machine_where_triton_fails_mixes_in_pytorch(monkeypatch):
    """Warn once where Triton finds no C compiler."""
    messages = []
    monkeypatch.setattr(triton_kernels.logger, "warning", messages.append)
    monkeypatch.setattr(triton_kernels, "triton", None)  # an error of any kind
    triton_kernels.triton_works.cache_clear()
    assert [triton_kernels.triton_works() for _ in range(2)] == [False, False] and len(messages) == 1
    triton_kernels.triton_works.cache_clear()


# Compilation


@pytest.mark.slow
def test_compiled_code_takes_the_kernels():
    """Find each kernel in each of two layers, in graphs for one length and any other, or for all tokens on a cache."""
    kinds = ("iha", "paired_heads", "interleaved")
    training, *decoding = traced_kernels(("interleaved", "training"), *((kind, "decoding") for kind in kinds))
    names = ["expand_kernel", "expand_backward_states_kernel", "expand_backward_alpha_kernel"]
    names += ["collapse_kernel", "collapse_backward_kernel"]
    assert training == {"graphs": 4, "launches": dict.fromkeys(names, 2 * 2)}
    for traced in decoding:  # an empty cache has a separate graph
        assert traced["graphs"] <= 2
        assert traced["launches"] == dict.fromkeys(("chunks_kernel", "sum_kernel"), 2 * traced["graphs"])


# dtype, H, G, P, D
MIXING = [("bfloat16", 20, 20, 4, 128), ("bfloat16", 64, 8, 2, 128), ("bfloat16", 16, 16, 2, 256)]
MIXING += [("float32", 20, 20, 4, 128), ("float16", 40, 8, 2, 128), ("bfloat16", 5, 5, 20, 64)]
MIXING += [("float32", 32, 8, 2, 64), ("bfloat16", 32, 32, 2, 80), ("bfloat16", 64, 64, 2, 128)]
# H, G, P, D, and whether the pseudo-heads rotate, or None for paired heads
DECODING = [(20, 20, 4, 128, True), (20, 20, 2, 128, True), (20, 20, 20, 128, True), (32, 8, 2, 64, False)]
DECODING += [(64, 64, 2, 128, True), (16, 8, 2, 128, True), (32, 8, 4, 96, True), (8, 8, 4, 32, True)]
DECODING += [(9, 3, 3, 80, False), (20, 20, 4, 128, None), (32, 8, 2, 64, None), (32, 8, 4, 96, None)]
DECODING += [(8, 8, 4, 32, None)]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_compiled_kernels_spill_no_registers(architecture, tmp_path):
    """Compile what launches compile on A100, H100 and consumer Blackwell, whose programs share at most 99 KiB."""
    calls = [("mixing", *case) for case in MIXING] + [("decoding", *case) for case in DECODING]
    kernels = compiled_kernels(architecture, calls, cache=tmp_path)
    assert len(kernels) == 5 * len(MIXING) + 2 * len(DECODING)
    for kernel in kernels:
        assert kernel["registers"] > 0 and kernel["spilled"] == 0 and kernel["shared"] <= 99 * 1024, kernel


MODELS = {"SmolLM2-135M": (9, 3, 64), "Qwen3-8B": (32, 8, 128), "the paper's 2.4B": (20, 20, 128)}  # H, G, D
SHARED_KIB = {80: 163, 90: 227, 100: 227}  # what a program may have on A100, H100 and B200


@pytest.mark.slow
def test_the_table_of_compiled_kernels(tmp_path):
    """Compare the rows of kernels/README.md with a compilation, which this prints where they differ."""
    rows = []
    for model, (num_heads, groups, head_dim) in MODELS.items():
        for num_pseudo_heads in (2, 4, 20):
            cells = []
            for architecture, most_kib in SHARED_KIB.items():
                mixing = ("mixing", "bfloat16", num_heads, groups, num_pseudo_heads, head_dim)
                decoding = ("decoding", num_heads, groups, num_pseudo_heads, head_dim, True)
                kernels = compiled_kernels(architecture, [mixing, decoding], cache=tmp_path)
                assert all(kernel["shared"] <= most_kib * 1024 for kernel in kernels)
                registers, spilled, shared = (
                    max(kernel[name] for kernel in kernels) for name in ("registers", "spilled", "shared")
                )
                cells.append(f"{registers}, {spilled}, {shared / 1024:.0f}")
            rows.append(f"| {model}, P = {num_pseudo_heads} | {' | '.join(cells)} |")
    table = "\n".join(rows)
    assert table in (ROOT / "kernels" / "README.md").read_text(encoding="utf-8"), table
