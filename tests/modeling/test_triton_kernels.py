"""Compare the Triton kernels with the PyTorch code that defines them, in float64.

On a machine without a GPU they run in Triton's interpreter (conftest.py), which multiplies the bits of bfloat16: there
half precision is float16. The last test compiles them for three architectures, which needs no GPU either.
"""

import pytest
import torch
from helpers import HYBRID, assert_close, compiled_kernels, decoder, random_ids, small_config, train_mixing
from torch._subclasses.fake_tensor import FakeTensorMode

from modeling_iha import IHAForCausalLM, interleave_heads, interleaving
from modeling_iha.interleaving import MixedHeads, make_virtual_sequence


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


def expanded(states, alpha, rotation=None):
    """Compute `expand` by its definition, of float64 states, which no kernel takes."""
    assert states.dtype == torch.float64
    rotation = rotation and tuple(table.double() for table in rotation)
    return make_virtual_sequence(states, alpha, rotation).transpose(1, 2)


def collapsed(output, weight):
    assert output.dtype == torch.float64
    return MixedHeads(weight[None], None, None, weight, None).collapse_output(output)


def assert_equal_with_gradients(function, definition, inputs, dtype, *constants):
    result = function(*inputs, *constants)
    exact = doubles(*inputs)
    expected = definition(*exact, *constants)
    assert result.dtype == dtype and result.shape == expected.shape and result.is_contiguous()
    seed = torch.randn_like(result)
    gradients = torch.autograd.grad(result, inputs, seed)
    for found, wanted in zip(
        (result, *gradients), (expected, *torch.autograd.grad(expected, exact, seed.double())), strict=True
    ):
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


# batch, M, P, N, D, rotates, layout
EXPANDED = [
    pytest.param((2, 3, 3, 5, 80, True, "apart"), id="a head_dim that is no power of two"),
    pytest.param((2, 4, 4, 5, 64, True, "heads"), id="a cached layout"),
    pytest.param((1, 5, 2, 35, 8, False, "tokens"), id="two parts of a gradient, without rotation"),
    pytest.param((1, 20, 2, 3, 128, True, "tokens"), id="20 heads"),
    pytest.param((1, 20, 4, 2, 128, False, "tokens"), id="20 heads without rotation"),
    pytest.param((1, 20, 20, 1, 64, True, "tokens"), id="P = 20"),
    pytest.param((1, 40, 2, 2, 128, True, "tokens"), id="a token in several tiles"),
    pytest.param((1, 4, 3, 150, 64, True, "heads"), marks=pytest.mark.slow, id="many tokens"),
    pytest.param((2, 20, 3, 13, 64, True, "heads"), marks=pytest.mark.slow, id="rows of 20 heads"),
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EXPANDED)
@pytest.mark.usefixtures("nan_where_nothing_is_written")
def test_expand(case, dtype):
    batch, num_heads, size, num_tokens, head_dim, rotates, layout = case
    states = heads(batch, num_heads, num_tokens, head_dim, layout, dtype)
    rotation = tables(size, head_dim) if rotates else None
    assert_equal_with_gradients(expand, expanded, [states, leaf(num_heads, num_heads, size)], dtype, rotation)


def test_expand_by_a_slice_of_the_heads():
    """Make the virtual tokens of some heads only: their columns of alpha are a view."""
    states, alpha = heads(1, 6, 3, 16, "tokens"), leaf(6, 6, 3)
    whole = expand(states, alpha, tables(3, 16))
    assert torch.equal(expand(states, alpha[:, 2:4], tables(3, 16)), whole[:, :, 2:4])


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
    assert_equal_with_gradients(collapse, collapsed, [output, leaf(num_heads, size)], dtype)


def test_the_gradients_of_the_mixing_are_the_same_in_every_run():
    states, alpha, output, weight = heads(1, 5, 70, 8, "tokens"), leaf(5, 5, 2), leaf(1, 140, 5, 8), leaf(5, 2)
    for result, mixing in (expand(states, alpha, tables(2, 8)), alpha), (collapse(output, weight), weight):
        seed = torch.randn_like(result)
        first, second = (torch.autograd.grad(result, mixing, seed, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("rotates", [False, True])
def test_gradients_of_gradients(rotates):
    """Differentiate a gradient again, as a gradient penalty does."""
    rotation = tables(3, 8) if rotates else None
    cases = [
        (expand, expanded, [heads(2, 4, 5, 8, "tokens"), leaf(4, 4, 3)], [rotation]),
        (collapse, collapsed, [leaf(2, 6, 4, 8), leaf(4, 3)], []),
    ]
    for function, definition, inputs, constants in cases:
        found = []
        for each, tensors in (function, inputs), (definition, doubles(*inputs)):
            gradients = torch.autograd.grad(each(*tensors, *constants).pow(3).sum(), tensors, create_graph=True)
            penalty = sum(gradient.pow(2).sum() for gradient in gradients)
            found.append(torch.autograd.grad(penalty, tensors))
        for gradient, wanted in zip(*found, strict=True):
            assert ((gradient - wanted).norm() / wanted.norm()) < ERRORS[torch.float32]


def test_only_gradients_that_are_needed_are_computed():
    """Freeze the mixing, or all but the mixing."""
    for name, frozen in ("gradient_of_alpha", 1), ("gradient_of_states", 0):
        inputs = [heads(1, 4, 2, 8, "tokens"), leaf(4, 4, 2)]
        inputs[frozen] = inputs[frozen].detach()
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(triton_kernels, name)
            expand(*inputs).sum().backward()
        assert inputs[1 - frozen].grad is not None


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


def test_tensors_without_memory_are_mixed_in_pytorch():
    """Leave CPU tensors, and those of an export, to PyTorch."""
    assert not triton_kernels.kernels_take(torch.empty(1, 2, 3, 4), torch.empty(2, 2, 2))
    with FakeTensorMode():
        states, alpha = torch.empty(1, 2, 3, 4, device="cuda"), torch.empty(2, 2, 2, device="cuda")
    assert not triton_kernels.kernels_take(states, alpha)


def test_a_machine_where_triton_fails_mixes_in_pytorch(monkeypatch):
    """Warn once where Triton finds no C compiler."""
    messages = []
    monkeypatch.setattr(triton_kernels.logger, "warning", messages.append)
    monkeypatch.setattr(triton_kernels, "triton", None)  # an error of any kind
    triton_kernels.triton_works.cache_clear()
    assert [triton_kernels.triton_works() for _ in range(2)] == [False, False] and len(messages) == 1
    triton_kernels.triton_works.cache_clear()


# dtype, M, P, D
COMPILED = [("bfloat16", 20, 4, 128), ("bfloat16", 64, 2, 128), ("bfloat16", 16, 2, 256), ("float32", 20, 4, 128)]
COMPILED += [("float16", 40, 2, 128), ("bfloat16", 5, 20, 64), ("float32", 32, 2, 64), ("bfloat16", 32, 2, 80)]


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(120, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("case", [COMPILED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in COMPILED[1:])])
def test_compiled_kernels_spill_no_registers(case, architecture, tmp_path):
    kernels = compiled_kernels("mixing", architecture, [case], cache=tmp_path)
    assert len(kernels) == 5
    for kernel in kernels:
        assert kernel["spilled"] == 0 and kernel["shared"] <= 99 * 1024, kernel  # sm_120 has the least
