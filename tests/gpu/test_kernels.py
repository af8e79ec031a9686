"""Test what only a GPU can show of the Triton kernels. `make gpu` also runs test_triton_kernels.py there."""

import os

import pytest
import torch
from helpers import set_core
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.attention.varlen import varlen_attn

from modeling_iha import IHAConfig, IHAForCausalLM, interleaving, triton_kernels
from modeling_iha.interleaving import MixedHeads
from modeling_iha.sdpa_in_blocks import VARLEN_ARGUMENTS
from modeling_iha.triton_kernels import collapse, expand, kernels_take


pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter would run the kernels"),
]


def mixing(num_heads=20, size=4, num_tokens=300, head_dim=128, dtype=torch.bfloat16):
    states = torch.randn(1, num_tokens, num_heads, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
    return states.requires_grad_(), torch.randn(num_heads, num_heads, size, device="cuda", requires_grad=True)


def three(states, alpha):
    """Expand the same states as queries, keys and values."""
    return expand((states,) * 3, (alpha,) * 3)


def test_which_calls_the_kernels_take(monkeypatch):
    states, alpha = mixing()
    assert kernels_take(states, alpha) and kernels_take(states.float(), alpha)
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "ENABLED", False)
        assert not kernels_take(states, alpha)
    assert not kernels_take(states.double(), alpha)
    assert not kernels_take(states[..., :127], alpha)
    assert not kernels_take(states.cpu(), alpha)
    assert not kernels_take(*mixing(num_heads=65, num_tokens=1))
    assert not kernels_take(*mixing(num_heads=33, num_tokens=1, dtype=torch.float32))


def test_a_functional_transform_mixes_in_pytorch():
    states, alpha = mixing()

    def loss(states):
        virtual = MixedHeads(alpha, alpha, alpha, None, None).make_virtual_tokens(states, states, states)
        return sum(each.float().pow(2).sum() for each in virtual)

    gradient = torch.func.grad(loss)(states)
    loss(states).backward()
    assert (gradient.float() - states.grad.float()).norm() < 0.02 * states.grad.float().norm()


def test_a_dtensor_is_mixed_in_pytorch(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        states, alpha = mixing()
        sharded = DTensor.from_local(states.detach(), init_device_mesh("cuda", (1,)))
        assert not kernels_take(sharded, alpha)
    finally:
        torch.distributed.destroy_process_group()


def test_gradients_are_the_same_in_every_run():
    states, alpha = mixing(num_tokens=5000)
    output = torch.randn(1, 8000, 20, 128, device="cuda", requires_grad=True)
    weight = torch.randn(20, 4, device="cuda", requires_grad=True)
    cases = (three(states, alpha), (states, alpha)), ((collapse(output, weight),), (output, weight))
    for results, inputs in cases:
        seeds = [torch.randn_like(result) for result in results]
        first, second = (torch.autograd.grad(results, inputs, seeds, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))


def test_a_cuda_graph_replays_them():
    states, alpha = (tensor.detach() for tensor in mixing())
    expected = three(states, alpha)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        virtual = three(states, alpha)
    states.neg_()
    graph.replay()
    assert all(torch.equal(each, -other) for each, other in zip(virtual, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_states_on_another_device():
    states, alpha = (tensor.detach() for tensor in mixing())
    there = three(states.to("cuda:1"), alpha.to("cuda:1"))
    assert all(torch.equal(each.cpu(), other.cpu()) for each, other in zip(there, three(states, alpha)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_whole_models(dtype, compiled, monkeypatch):
    """Compare logits and gradients with those of a model in float32 without kernels."""
    fields = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_pseudo_heads": 3}
    torch.manual_seed(0)
    model = IHAForCausalLM(IHAConfig.from_preset("tiny", **fields)).to("cuda", torch.bfloat16).float()
    set_core(model, "sdpa")
    input_ids = torch.randint(256, (2, 333)).cuda()
    with monkeypatch.context() as patch:
        patch.setattr(interleaving, "kernels_take", lambda *_: False)
        expected = model(input_ids=input_ids, labels=input_ids, use_cache=False)
        expected.loss.backward()
    wanted = [expected.logits, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    model = model.to(dtype)
    if compiled:
        model.compile(fullgraph=True)
    calls = []
    take = interleaving.kernels_take
    if not compiled:
        monkeypatch.setattr(interleaving, "kernels_take", lambda *given: calls.append(take(*given)) or calls[-1])
    found = model(input_ids=input_ids, labels=input_ids, use_cache=False)
    found.loss.backward()
    assert compiled or (calls and all(calls))
    for got, want in zip([found.logits, *(parameter.grad for parameter in model.parameters())], wanted, strict=True):
        bound = 1e-3 if dtype == torch.float32 else 0.03
        assert (got.float() - want).norm() / want.norm() < bound


@pytest.mark.skipif("enable_gqa" in VARLEN_ARGUMENTS, reason="this PyTorch is told of grouped keys, and handed them")
@pytest.mark.parametrize("window", [-1, 100])
def test_varlen_of_2_11_takes_grouped_keys(window):
    """Compare grouped keys with repeated ones. Where this passes, `attend_by_varlen` need not repeat them."""
    bounds = torch.tensor([0, 70, 71, 300], device="cuda", dtype=torch.int32)

    def run(repeats):
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(300, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
        )
        states = query, key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        output = varlen_attn(*states, bounds, bounds, 229, 229, window_size=(window, 0))
        output.square().sum().backward()
        return output, query.grad, key.grad, value.grad

    for grouped, repeated in zip(run(1), run(4)):
        torch.testing.assert_close(grouped, repeated, atol=0.02, rtol=0.02)
