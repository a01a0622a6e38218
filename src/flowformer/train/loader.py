"""How batches come from the workers: stacked, in one piece, and pinned where a device will fetch them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .tasks import Batch

ALIGNMENT = 16  # bytes; every dtype can begin at a multiple of it


class Piece:
    """A batch in one block of memory: each tensor that a worker hands over costs the loop about as much as the first.

    >>> batch = {"tokens": torch.tensor([[3, 4]]), "mask": torch.tensor([[True, False]])}
    >>> Piece(batch).batch()
    {'tokens': tensor([[3, 4]]), 'mask': tensor([[ True, False]])}
    """

    def __init__(self, batch: Batch) -> None:
        self.layout = [(name, x.dtype, x.shape) for name, x in batch.items()]
        flat = [x.reshape(-1).view(torch.uint8) for x in batch.values()]
        self.block = torch.cat([torch.nn.functional.pad(x, (0, -len(x) % ALIGNMENT)) for x in flat])

    def pin_memory(self) -> Piece:
        """What a DataLoader calls."""
        self.block = self.block.pin_memory()
        return self

    def batch(self) -> Batch:
        """The tensors, as views of the block."""
        found: dict[str, Tensor] = {}
        start = 0
        for name, dtype, shape in self.layout:
            stop = start + shape.numel() * dtype.itemsize
            found[name] = self.block[start:stop].view(dtype).view(shape)
            start = stop + -stop % ALIGNMENT
        return found


def _piece(collate: Callable[[list[Any]], Batch], items: list[Any]) -> Piece:
    return Piece(collate(items))


def batches(
    dataset: Dataset, order: Any, collate: Callable[[list[Any]], Batch], workers: int, device: torch.device
) -> Iterator[Batch]:
    """The batches that `order` says, read ahead by the workers."""
    loader = DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=partial(_piece, collate),
        num_workers=workers,
        worker_init_fn=_leave_interrupts,
        pin_memory=device.type != "cpu",
        generator=torch.Generator(),  # else making workers would take a random number from the run
    )
    return map(Piece.batch, loader)


def _leave_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; a worker goes on until the loop, which decides, is done with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
