"""Compare the Triton kernels with their definition in plain float64 torch.

test_triton.py runs this, on a GPU or in Triton's interpreter, in a process of its own: Triton is told which when it is
imported.
"""

import pytest
import torch
import triton
from helpers import random_ids, random_model, small_config
from triton.runtime import interpreter

from gpu_kernels import decode_triton, mix_heads_triton
from gpu_kernels.decode_triton import decode_attention
from gpu_kernels.mix_heads_triton import mix_heads
from modeling_iha import interleaving
from modeling_iha.interleaving import IHAWeights, absorbed_attention


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest entry, or to 0.1 where it vanishes. float32 rounds to 6e-8 and sums of at most some hundred
# terms lose a digit or two; float16 rounds inputs of products, weights and gradients to 5e-4.
ERRORS = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}
HALVES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]


@pytest.fixture(autouse=True, scope="module")
def range_in_the_interpreter():
    """Let a `range` end at a scalar of Triton 3.6, an array of one entry, from which NumPy 2.4 makes no integer."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Take several blocks of rows, several steps of a sum, and several programs for a gradient and for a cache."""
    monkeypatch.setattr(mix_heads_triton, "MAX_ROWS", 16)
    monkeypatch.setattr(mix_heads_triton, "MAX_COLUMNS", 16)
    monkeypatch.setattr(decode_triton, "KEYS", 16)
    monkeypatch.setattr(decode_triton, "PROGRAMS", 4)


def draw(*shape, seed):
    """Return float64 noise that every dtype of ERRORS represents."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise.bfloat16().double()


def rotation_tables(num_pseudo_heads, head_dim):
    """Return cos and sin [P, head_dim], float64, of RoPE's base 10 at 0..P-1."""
    frequencies = 10.0 ** (-torch.arange(head_dim // 2).double() / (head_dim // 2))
    angles = (torch.arange(num_pseudo_heads)[:, None] * frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def plain_mix_heads(states, matrix, rotation):
    mixed = torch.einsum("rm,bnmd->bnrd", matrix, states)
    if rotation is None:
        return mixed
    cos, sin = (table.repeat_interleave(len(matrix) // len(table), dim=0) for table in rotation)
    x1, x2 = mixed.chunk(2, dim=-1)
    return mixed * cos + torch.cat((-x2, x1), dim=-1) * sin


def assert_same(actual, expected, dtype, what):
    assert actual.isfinite().all(), what
    error = ((actual.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()
    assert error <= ERRORS[dtype], f"{what}: {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("tiles", ["large", "small"])
@pytest.mark.parametrize(
    "rows,columns,length,head_dim,pseudo",
    [(1, 1, 1, 4, 1), (9, 3, 7, 16, 3), (8, 4, 3, 40, 2), (4, 4, 5, 6, None), (3, 18, 4, 8, None), (40, 20, 2, 64, 2)],
)
def test_mix_heads(rows, columns, length, head_dim, pseudo, tiles, dtype, request):
    """Compare output and gradients of contiguous and of transposed states."""
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    states = draw(2, columns, length, head_dim, seed=1).transpose(1, 2)
    matrix, gradient = draw(rows, columns, seed=2), draw(2, length, rows, head_dim, seed=3)
    rotation = pseudo and rotation_tables(pseudo, head_dim)
    results = []
    for function, where in ((plain_mix_heads, {}), (mix_heads, {"device": DEVICE, "dtype": dtype})):
        inputs = [x.to(**where).requires_grad_() if where else x.clone().requires_grad_() for x in (states, matrix)]
        tables = rotation and tuple(table.to(DEVICE, torch.float32) if where else table for table in rotation)
        output = function(*inputs, tables)
        gradients = torch.autograd.grad(output, inputs, gradient.to(**where) if where else gradient)
        results.append([output.detach(), *gradients])
    for name, actual, expected in zip(("output", "states", "matrix"), results[1], results[0]):
        assert actual.dtype == dtype and actual.shape == expected.shape
        assert_same(actual, expected, dtype, name)


@pytest.mark.parametrize("collapse", ["per_head", "all_heads"])
@pytest.mark.parametrize("positions", ["interleaved", "shared"])
def test_model(collapse, positions, monkeypatch):
    """Compare logits and every gradient of a model that expands and collapses by the kernels."""
    model = random_model(small_config(num_pseudo_heads=3, pseudo_positions=positions, pseudo_collapse=collapse))
    input_ids, results = random_ids(2, 9).to(DEVICE), []
    model.to(DEVICE)
    for kernels in (False, True):
        if kernels:
            monkeypatch.setattr(interleaving, "expand", mix_heads_triton.expand)
            monkeypatch.setattr(interleaving, "collapse", mix_heads_triton.collapse)
        logits = model(input_ids).logits
        results.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    for expected, actual in zip(*results):
        assert_same(actual, expected.double().cpu(), torch.float32, "model")


@pytest.mark.parametrize("documents", [None, [[0] * 5 + [1] * 32, [-1] * 30 + [0] * 7]], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [None, 1, 17, 36])
@pytest.mark.parametrize(
    "heads,groups,pseudo,head_dim,dtype",
    [(4, 2, 3, 8, torch.float32), (3, 1, 2, 6, torch.float32), (2, 2, 20, 64, torch.float16)],
)
def test_decoding(heads, groups, pseudo, head_dim, dtype, window, documents, small_tiles):
    query, key, value = (draw(2, *shape, head_dim, seed=4) for shape in ((heads, 1), (groups, 37), (groups, 37)))
    mixing = [draw(n, n, pseudo, seed=5) for n in (heads, groups, groups)]
    rotation = rotation_tables(pseudo, head_dim)
    weights = IHAWeights(*mixing, draw(heads, pseudo, seed=6), rotation)
    if documents is not None:
        documents = torch.tensor(documents, dtype=torch.int32)
    expected = absorbed_attention(query, key, value, weights, 0.4 * head_dim**-0.5, window, documents)
    tables = tuple(table.float().to(DEVICE) for table in rotation)
    on_device = IHAWeights(*(weight.to(DEVICE, dtype) for weight in weights[:4]), tables)
    states = (x.to(DEVICE, dtype) for x in (query, key, value))
    documents = documents if documents is None else documents.to(DEVICE)
    actual = decode_attention(*states, on_device, 0.4 * head_dim**-0.5, window, documents)
    assert_same(actual, expected, dtype, "output")


def test_refusals():
    states, matrix = torch.zeros(1, 3, 2, 4, device=DEVICE), torch.zeros(6, 2, device=DEVICE)
    with pytest.raises(ValueError, match="must be float32, float16 or bfloat16, not torch.float64"):
        mix_heads(states.double(), matrix)
    with pytest.raises(ValueError, match=r"matrix must have the shape \[rows, 2\], not \[6, 3\]"):
        mix_heads(states, torch.zeros(6, 3, device=DEVICE))
    with pytest.raises(ValueError, match=r"rotation must be tables \[P, 4\] with P a divisor of 6 rows, not \[4, 4\]"):
        mix_heads(states, matrix, (torch.zeros(4, 4), torch.zeros(4, 4)))
    with pytest.raises(ValueError, match="head_dim must be even, not 3"):
        mix_heads(states[..., :3], matrix)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="multiplies the bits of bfloat16 as integers"):
            mix_heads(states.bfloat16(), matrix)
