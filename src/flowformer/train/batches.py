"""Batches of a run: the order of the examples, the seed of their random augmentation, and the worker processes.

The order and the augmentation depend only on the seed and the step, so that a resumed run sees the same batches as an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .._utils import cores
from .config import TrainConfig
from .tasks import Batch

ALIGNMENT = 16  # bytes; a multiple of the size of every dtype, so that a slice can be viewed as any of them


class MicroBatches(Sampler[tuple[int, list[int]]]):
    """The micro-batches of one rank from step `start` to `stop`, as pairs of a global number and example indices.

    The order of an epoch is a permutation drawn from the seed and the epoch, the same on every rank. With `replacement`
    the examples are drawn independently instead. With `repeats` the copies of an example are adjacent in the order, and
    the ranks divide them up.
    """

    def __init__(self, length: int, config: TrainConfig, start: int, stop: int, rank: int, world_size: int) -> None:
        self.length, self.config, self.start, self.stop = length, config, start, stop
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return (self.stop - self.start) * self.config.accumulate

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        size, per_epoch = self.config.batch_size, steps_per_epoch(self.length, self.config)
        per_step = self.world_size * self.config.accumulate
        epoch, order = -1, list[int]()
        for step in range(self.start, self.stop):
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                order = self._order(epoch)
            first = step % per_epoch * size
            batch = order[first : first + size]
            for i in range(self.rank, per_step, self.world_size):
                # a batch with fewer examples than micro-batches repeats an example: no micro-batch may be empty
                yield step * per_step + i, batch[i::per_step] or batch[:1]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
        if self.config.replacement:
            drawn = torch.randint(self.length, (self.length,), generator=generator)
        else:
            drawn = torch.randperm(self.length, generator=generator)
        return drawn.repeat_interleave(self.config.repeats)[: self.length].tolist()


def steps_per_epoch(length: int, config: TrainConfig) -> int:
    whole, rest = divmod(length, config.batch_size)
    return max(1, whole if config.drop_last else whole + (rest > 0))


class SeededItems(Dataset):
    """A dataset whose random augmentation depends on the seed and the number of the micro-batch, not on the worker."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, micro_batch: tuple[int, list[int]]) -> list[Any]:
        number, indices = micro_batch
        numpy_state, python_state = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices=[]):
            seed = int.from_bytes(hashlib.sha256(f"{self.seed} {number}".encode()).digest()[:4])
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            items = [self.dataset[index] for index in indices]
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        return items


class PackedBatch:
    """A batch in one block of memory, since the main process pays a fixed cost for each tensor that a worker sends.

    >>> batch = {"tokens": torch.tensor([[3, 4]]), "mask": torch.tensor([[True, False]])}
    >>> PackedBatch(batch).unpack()
    {'tokens': tensor([[3, 4]]), 'mask': tensor([[ True, False]])}
    """

    def __init__(self, batch: Batch) -> None:
        self.layout = [(name, x.dtype, x.shape) for name, x in batch.items()]
        flat = [x.reshape(-1).view(torch.uint8) for x in batch.values()]
        self.block = torch.cat([torch.nn.functional.pad(x, (0, -len(x) % ALIGNMENT)) for x in flat])

    def pin_memory(self) -> PackedBatch:
        """Pin the block of memory; the DataLoader calls this."""
        self.block = self.block.pin_memory()
        return self

    def unpack(self) -> Batch:
        """The tensors, as views of the block."""
        tensors: dict[str, Tensor] = {}
        start = 0
        for name, dtype, shape in self.layout:
            stop = start + shape.numel() * dtype.itemsize
            tensors[name] = self.block[start:stop].view(dtype).view(shape)
            start = stop + -stop % ALIGNMENT
        return tensors


def load_batches(
    dataset: Dataset,
    order: Iterable[Any],
    collate: Callable[[list[Any]], Batch],
    workers: int,
    device: torch.device,
) -> Iterator[Batch]:
    """The batches in a given order, prefetched by worker processes and in pinned memory for a CUDA device.

    Args:
        workers: number of worker processes, limited to the number of cores.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=partial(_pack, collate),
        num_workers=min(workers, cores()),
        worker_init_fn=_leave_signals_to_main,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise the loader draws the workers' seed from the run's generator
    )
    return map(PackedBatch.unpack, loader)


def _pack(collate: Callable[[list[Any]], Batch], items: list[Any]) -> PackedBatch:
    return PackedBatch(collate(items))


def _leave_signals_to_main(worker: int) -> None:
    """Ignore Ctrl-C and SIGTERM in a worker; the main process ends it.

    A terminal, `timeout` and Slurm send them to all processes, but the main process still needs batches.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
