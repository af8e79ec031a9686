"""Start processes on a CPU over gloo, in place of a module that Transformers' source distribution leaves out."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    torch.set_num_threads(1)


def _start_rank_processes(fn, args: tuple, nprocs: int) -> None:
    """Run fn(rank, *args) in `nprocs` processes and raise if one of them did.

    They are forked, because new interpreters would take seconds to import PyTorch. A build for CUDA has threads of
    autograd, which do not survive a fork.
    """
    mp.start_processes(fn, args=args, nprocs=nprocs, start_method="spawn" if torch.version.cuda else "fork")


def _run_rank(rank: int, fn, args: tuple, world_size: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    _set_rank_device(rank)
    store = dist.TCPStore("localhost", port, world_size=None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        fn(rank, *args)
    finally:
        dist.destroy_process_group()


def run_distributed(world_size: int):
    """Run fn(rank, *args) in n processes that form a process group, by `run_distributed(n)(fn)(*args)`."""

    def bind(fn):
        def run(*args):
            store = dist.TCPStore("localhost", 0, world_size=None, is_master=True, wait_for_workers=False)
            _start_rank_processes(_run_rank, args=(fn, args, world_size, store.port), nprocs=world_size)

        return run

    return bind
