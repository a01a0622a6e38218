"""Which examples an update sees, and with which random numbers: functions of the seed and of the place in the run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .config import TrainConfig


class Batches(Sampler[tuple[int, list[int]]]):
    """The parts of each update that one process computes, from an update on: the number of a part, and its indices.

    An epoch is a permutation drawn from the seed and the number of the epoch; all processes draw the same. With
    replacement, it is as many independent draws. Repeated examples follow one another, and the processes share them.
    """

    def __init__(self, length: int, config: TrainConfig, start: int, stop: int, process: int, processes: int) -> None:
        self.length, self.config, self.start, self.stop = length, config, start, stop
        self.process, self.parts = process, processes * config.accumulate

    def __len__(self) -> int:
        return (self.stop - self.start) * self.config.accumulate

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        size, per_epoch = self.config.batch_size, steps_per_epoch(self.length, self.config)
        epoch, order = -1, list[int]()
        for step in range(self.start, self.stop):
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
                if self.config.replacement:
                    drawn = torch.randint(self.length, (self.length,), generator=generator)
                else:
                    drawn = torch.randperm(self.length, generator=generator)
                order = drawn.repeat_interleave(self.config.repeats)[: self.length].tolist()
            first = step % per_epoch * size
            batch = order[first : first + size]
            for part in range(self.process, self.parts, self.parts // self.config.accumulate):
                # a batch shorter than there are parts gives the last of them what others have too
                yield step * self.parts + part, batch[part :: self.parts] or batch[:1]


class SeededItems(Dataset):
    """A dataset whose random augmentation depends on the seed and the place in the run alone, whoever reads it when."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, part: tuple[int, list[int]]) -> list[Any]:
        number, indices = part
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


def steps_per_epoch(length: int, config: TrainConfig) -> int:
    whole, rest = divmod(length, config.batch_size)
    return max(1, whole if config.drop_last else whole + (rest > 0))
