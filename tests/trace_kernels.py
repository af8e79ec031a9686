"""Compile models with their Triton kernels without a GPU, and print what the graphs launch as JSON.

python tests/trace_kernels.py '[["iha", "decoding"]]' takes pairs of the kind of a small model ("iha", "paired_heads",
"interleaved") and a pass ("decoding", "training"). Dynamo and AOTAutograd trace the kernels, because a stand-in for
Triton's driver says that there is a GPU. A graph runs without its kernels, so its results mean nothing. The
interpreter's tests compare results. `traced_kernels` in helpers.py starts it.
"""

import json
import sys
from collections import Counter

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch.utils import _triton
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, interleaving, triton_kernels
from modeling_iha.transformers_versions import CACHE


SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CACHE_LENGTH = 128  # a CPU computes shorter ones from virtual tokens


class Driver:
    """Stand in for Triton's driver of a GPU."""

    target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class WithoutKernels(torch.fx.Interpreter):
    """Run a graph, and pass over its kernels."""

    def call_function(self, target, args, kwargs):
        if target is triton_kernel_wrapper_mutation:
            return None
        if target is triton_kernel_wrapper_functional:
            return {name: kwargs["kwargs"][name] for name in kwargs["tensors_to_clone"]}
        return super().call_function(target, args, kwargs)


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "interleaved":
        return interleave_heads(LlamaForCausalLM(LlamaConfig(**SIZES)), 2)
    return IHAForCausalLM(IHAConfig(**SIZES, attention_kinds=kind, num_pseudo_heads=2))


def trace(model: torch.nn.Module, what: str) -> dict:
    """Return how many graphs there are for tokens of four positions or calls of two lengths, and what they launch."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(WithoutKernels(graph).run)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    if what == "decoding":
        cache = StaticCache(model.config, max_cache_len=CACHE_LENGTH)
        model.to(torch.bfloat16)
        with torch.no_grad():
            for position in range(4):
                positions = torch.tensor([[position]])
                compiled(torch.tensor([[1]]), position_ids=positions, use_cache=True, **{CACHE: cache})
    else:
        for length in (40, 56):
            input_ids = torch.arange(length)[None] % 32
            compiled(input_ids, labels=input_ids, use_cache=False).loss.backward()
    return {"graphs": len(graphs), "launches": launches_of(graphs)}


def launches_of(graphs: list) -> dict[str, int]:
    """Return how often the graphs launch each kernel."""
    found = Counter()
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.target in (triton_kernel_wrapper_mutation, triton_kernel_wrapper_functional):
                found[kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn.__name__] += 1
    return found


cases = [(model_of(kind), what) for kind, what in json.loads(sys.argv[1])]
for module in interleaving, triton_kernels:
    module.kernels_take = lambda *_: True  # tensors of a CPU
driver.set_active(Driver())
_triton.has_triton = lambda *_: True
print(json.dumps([trace(model, what) for model, what in cases]))
