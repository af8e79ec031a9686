"""Test the mixing of a model that FSDP2 shards, in two processes on the CPU."""

import pytest
import torch
from helpers import assert_close, decoder, random_ids, train_mixing, uncached_logits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from modeling_iha import interleave_heads, load_adapter, remove_interleaving, save_adapter, set_mixing_scale
from modeling_iha.mixing_weights import state_with_values


TOKENS = random_ids(2, 9)


def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work(rank: int, place: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    whole = train_mixing(interleave_heads(decoder("llama"), 2))
    expected, learned = uncached_logits(whole, TOKENS), state_with_values(whole)
    model = sharded(train_mixing(interleave_heads(decoder("llama"), 2)))
    assert isinstance(model.model.layers[0].self_attn.q_mix.weight, DTensor)
    assert_close(uncached_logits(model, TOKENS), expected)
    mixing = {name: value for name, value in state_with_values(model).items() if "mix" in name or "collapse" in name}
    assert len(mixing) == 12 and all(value.equal(learned[name]) for name, value in mixing.items())

    save_adapter(model, f"{place}/mixing.{rank}")
    other = sharded(interleave_heads(decoder("llama"), 2, seed=9, mixing_scale=1))
    for base in (decoder("llama"), other):
        assert_close(uncached_logits(load_adapter(base, f"{place}/mixing.{rank}"), TOKENS), expected)
    assert other.config.mixing_scale == 40
    set_mixing_scale(model, 3)
    assert_close(uncached_logits(model, TOKENS), expected)
    for call in (remove_interleaving, lambda model: interleave_heads(model, 2)):
        with pytest.raises(ValueError, match="is not a model of Transformers or .*: call interleave_heads before"):
            call(model)
    torch.distributed.destroy_process_group()


def test_sharded_mixing_is_read_saved_loaded_and_changed(tmp_path):
    # Forked processes have the imports of this one already.
    torch.multiprocessing.start_processes(work, (str(tmp_path),), nprocs=2, start_method="fork")
