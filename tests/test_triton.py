"""The Triton kernels: triton_checks.py on a GPU or in Triton's interpreter, compilation for a GPU without one, and the
stock form where they do not fit."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, random_ids, random_model, small_config
from transformers.utils import logging

from gpu_kernels import fused_triton as triton_kernels
from gpu_kernels.ahead_of_time import Shape, compile_kernels
from gpu_kernels.attention import MEASURED_TO_WIN, attention, default_form, obstacle, stock_attention
from modeling_iha.collapse_first import IHAWeights, collapse_first_attention


ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)
# What a block may use at most on an A100, H100 and B200.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


@needs_triton
@pytest.mark.parametrize(
    "some",
    [
        ["-k", "(documents or window or layer or one_token or decoding_in or chunks) and not 32-128"],
        pytest.param([], marks=pytest.mark.slow),
    ],
)
def test_kernels_match_their_definition(some):
    # Triton takes the interpreter or the GPU when it is imported.
    interpret = "0" if torch.cuda.is_available() else "1"
    command = ["-m", "pytest", "-p", "no:cacheprovider", "tests/triton_checks.py", *some]
    checks = run(*command, TRITON_INTERPRET=interpret)
    assert checks.returncode == 0, checks.stdout + checks.stderr


def test_package_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, gpu_kernels.attention; "
        "from gpu_kernels.fused_triton import mix_rotate; "
        "mix_rotate(torch.zeros(1, 2, 3, 4), torch.zeros(2, 2, 2))"
    )
    error = run("-c", code).stderr
    assert "ImportError: The Triton kernels need Triton" in error, error


@needs_triton
def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="run on a GPU, and states is on the CPU"):
        triton_kernels.mix_rotate(torch.zeros(1, 2, 3, 4), torch.zeros(2, 2, 2))


@needs_triton
@pytest.mark.parametrize(
    "shape,capability",
    [
        (Shape(torch.bfloat16, 4, 128, window=7, documents=True), 90),
        (Shape(torch.float32, 3, 20, rotated=False), 80),
        # Triton makes constants of arguments that are 1. The fewest rows to a tile.
        (Shape(torch.float16, 1, 128, length=1, window=1, rotated=False), 100),
    ],
    ids=str,
)
def test_kernels_compile_for_a_gpu(shape, capability, monkeypatch, tmp_path):
    """Every kernel, as it is launched, through Triton's compiler and ptxas."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernels(shape, capability)
    assert len(compiled) == 6
    for name, kernel in compiled.items():
        assert 0 < kernel.registers <= 255 and kernel.shared_bytes <= SHARED_MEMORY[capability], name
        on_tensor_cores = "mma" in kernel.ptx
        # The backward of the mixing by itself goes by sums.
        assert on_tensor_cores == (name != "_mix_rotate_backward" and shape.dtype != torch.float32), name


@needs_triton
def test_chunks_of_pseudo_heads():
    chunks = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 4, 16: 8, 20: 4, 32: 8}
    assert {virtual: triton_kernels.chunk_of(virtual) for virtual in chunks} == chunks


def kernel_inputs(num_pseudo_heads=3, head_dim=8, dtype=torch.float32, device=None):
    """Two rows of 19 tokens, 4 heads in 2 groups: queries, keys and values, and the weights."""

    def draw(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)

    states = [draw(2, heads, 19, head_dim) for heads in (4, 2, 2)]
    mixing = [draw(heads, heads, num_pseudo_heads) for heads in (4, 2, 2)]
    angles = draw(num_pseudo_heads, head_dim // 2).float()
    return states, IHAWeights(*mixing, draw(4, num_pseudo_heads), (angles.cos(), angles.sin()))


PACKED_AND_PADDED = torch.tensor([[0] * 5 + [1] * 14, [-1] * 3 + [0] * 16], dtype=torch.int32)


@pytest.mark.parametrize("documents", [None, PACKED_AND_PADDED], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_the_stock_form(window, documents):
    states, weights = kernel_inputs()
    expected = collapse_first_attention(*states, weights, 0.3, window, documents)
    assert_close(stock_attention(*states, weights, 0.3, window, documents), expected)


def test_the_stock_form_without_rotation_and_of_one_token():
    states, weights = kernel_inputs()
    one = [x[:, :, :1] for x in states]
    for inputs, changed in ((states, weights._replace(rotation=None)), (one, weights)):
        expected = collapse_first_attention(*inputs, changed, 0.3)
        assert_close(stock_attention(*inputs, changed, 0.3), expected)


@pytest.fixture
def warnings(monkeypatch):
    """What was warned of."""
    messages = []
    monkeypatch.setattr(logging.get_logger("gpu_kernels.attention"), "warning", lambda text, *_: messages.append(text))
    logging.warning_once.cache_clear()
    return messages


def test_a_model_falls_back_to_the_stock_form_and_says_so_once(warnings):
    model = random_model(small_config(num_pseudo_heads=3))
    expected = [model(random_ids(2, n), use_cache=False).logits for n in (9, 12)]
    model.model.attention_form = attention
    for n, logits in zip((9, 12), expected):
        assert_close(model(random_ids(2, n), use_cache=False).logits, logits)
    (message,) = warnings
    assert "the stock form is: " in message


@needs_triton
@pytest.mark.parametrize(
    "changes,reason",
    [
        ({}, None),
        ({"num_pseudo_heads": 32, "head_dim": 128, "dtype": torch.bfloat16}, None),
        ({"num_pseudo_heads": 32, "head_dim": 64}, None),
        ({"head_dim": 128}, "a head has 512 bytes"),
        ({"dtype": torch.float64}, "the dtype is torch.float64"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"head_dim": 256}, "head_dim is 256"),
        ({"num_pseudo_heads": 33}, "there are 33 pseudo-heads"),
        ({"device": "cpu"}, "the tensors are on the CPU"),
    ],
    ids=str,
)
def test_obstacles(changes, reason):
    states, weights = kernel_inputs(**{"device": "meta", **changes})
    found = obstacle(states[2], weights)
    assert found is None if reason is None else reason in found


def test_one_new_token_falls_back_to_the_absorbed_form(warnings):
    states, weights = kernel_inputs()
    token = [states[0][:, :, -1:], *states[1:]]
    options = (weights, 0.3, 4, PACKED_AND_PADDED)
    expected = collapse_first_attention(*states, *options)[:, -1:]
    with torch.no_grad():
        for _ in range(2):
            assert_close(attention(*token, *options), expected)
    (message,) = warnings
    assert "the stock form is: " in message


def test_the_default_is_the_stock_form_until_a_gpu_has_measured(monkeypatch):
    assert not MEASURED_TO_WIN
    model = random_model(small_config(num_pseudo_heads=3))
    monkeypatch.setitem(MEASURED_TO_WIN, ((9, 0), 3), "layer.json")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert default_form(model) is None
    on_a_gpu = SimpleNamespace(device=torch.device("cuda"), config=model.config)
    assert default_form(on_a_gpu) is attention
    monkeypatch.setattr(model.config, "num_pseudo_heads", 2)
    assert default_form(on_a_gpu) is None
