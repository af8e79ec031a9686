"""Compare the estimated memory of FSDP2 with what two processes on the CPU hold in a training step."""

import weakref

import pytest
import torch
from helpers import random_ids, small_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from iha.step_memory import Way, of_sharded_training
from modeling_iha import IHAForCausalLM


TOKENS, GPUS = 128, 2
FIELDS = {
    **{"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"vocab_size": 512, "max_position_embeddings": 256, "num_hidden_layers": 5},
    **{"attention_kinds": ["iha"] * 4 + ["mha"], "num_pseudo_heads": 2, "sliding_window": 64},
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
}


class Held(TorchDispatchMode):
    """Find the most bytes that are ever held. FSDP2 empties storages that live on, so their sizes are asked anew."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.storages: dict[int, weakref.ref] = {}

    def add(self, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        self.storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if type(tensor) is torch.Tensor:
                self.add(tensor)
        alive = [storage for reference in self.storages.values() if (storage := reference()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result


def sharded(checkpointing: bool) -> IHAForCausalLM:
    """Return a model as sft/accelerate_configs/fsdp2.yaml shards it."""
    model = IHAForCausalLM(small_config(**FIELDS)).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    half = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    options = {"mp_policy": half, "mesh": init_device_mesh("cpu", (GPUS,)), "reshard_after_forward": True}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def peak_of_a_step(checkpointing: bool) -> int:
    """Return the most bytes that this process holds in the backward pass of a second step."""
    model, ids = sharded(checkpointing), random_ids(1, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters())

    def backward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    held = Held()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    for tensor in (*model.parameters(), *model.buffers(), *states):
        held.add(tensor.detach())
    with held:
        backward()
    return held.peak


def work(rank: int, place: str, checkpointing: bool, estimated: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=GPUS)
    measured = peak_of_a_step(checkpointing)
    assert estimated == pytest.approx(measured, rel=0.06), (estimated, measured)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_memory_of_a_gpu_is_what_a_process_holds(checkpointing, tmp_path):
    estimated = of_sharded_training(small_config(**FIELDS), 1, TOKENS, Way(checkpointing), GPUS).peak
    # Forked processes have the imports of this one already.
    arguments = (str(tmp_path), checkpointing, estimated)
    torch.multiprocessing.start_processes(work, arguments, nprocs=GPUS, start_method="fork")
