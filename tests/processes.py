"""Ranks of a process group, for tests. One process imports, and the ranks are its copies: imports take longest."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def run_ranks(work, ranks, folder):
    """Runs work(rank, folder) in so many processes of a gloo group.

    The function must be importable. Its module is imported once, before the ranks are forked.
    """
    torch.multiprocessing.spawn(_fork, (work, ranks, str(folder)), nprocs=1)


def _fork(_, work, ranks, folder):
    import flowformer.ops.context.op  # noqa: F401  # imports the compiler, once for all ranks

    torch.multiprocessing.start_processes(_work, (work, ranks, folder), nprocs=ranks, start_method="fork")


def _work(rank, work, ranks, folder):
    torch.set_num_threads(1)
    # as torchrun sets them, for accelerate; the process group is there already
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 0}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "1"}
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    work(rank, folder)
    # a thread of gloo that has not ended yet would abort a process that tidies up
    os._exit(0)
