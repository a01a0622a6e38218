"""Ranks of a process group, for tests. One process imports, and the ranks are its copies: imports take longest."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta

import torch
import torch.distributed as dist
from filelock import FileLock


def run_ranks(work, ranks, tmp_path_factory):
    """Runs work(rank, folder) in so many processes of a gloo group, once for all workers of pytest-xdist.

    The function must be importable. Its module is imported once, before the ranks are forked.

    Returns:
        the folder, and what each rank returned.
    """
    temporary = tmp_path_factory.getbasetemp()
    folder = (temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary) / work.__module__
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what a worker left that failed
            folder.mkdir()
            torch.multiprocessing.spawn(_fork, (work, ranks, str(folder)), nprocs=1)
            (folder / "done").touch()
    return folder, [torch.load(folder / str(rank)) for rank in range(ranks)]


def _fork(_, work, ranks, folder):
    import quick_interpreter

    import flowformer.ops.context.op  # noqa: F401  # imports the compiler, once for all ranks

    quick_interpreter.install()  # as conftest.py does, which this process has not imported
    torch.multiprocessing.start_processes(_work, (work, ranks, folder), nprocs=ranks, start_method="fork")


def _work(rank, work, ranks, folder):
    torch.set_num_threads(1)
    # as torchrun sets them, for accelerate; the process group is there already
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 0}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.save(work(rank, folder), f"{folder}/{rank}")
    # a thread of gloo that has not ended yet would abort a process that tidies up
    os._exit(0)
