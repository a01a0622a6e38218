"""The order of the data: every example once an epoch, shared among processes, the same wherever a run begins."""

from __future__ import annotations

from dataclasses import replace

import torch
from tiny_training import CONFIG

from flowformer.train.batches import MicroBatches, SeededItems, steps_per_epoch


class Noisy(torch.utils.data.Dataset):
    """Random augmentation, from all three sources of random numbers."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        import random

        import numpy as np

        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


class TestOrder:
    def batches(self, start=0, stop=12, process=0, processes=1, **changes):
        config = replace(CONFIG, **changes)
        return list(MicroBatches(20, config, start, stop, process, processes))

    def test_an_epoch_sees_every_example_once(self):
        for first in (0, 3):
            seen = [i for _, part in self.batches(first, first + 3, drop_last=False) for i in part]
            assert sorted(seen) == list(range(20))
        assert steps_per_epoch(20, replace(CONFIG, drop_last=True)) == 2
        assert steps_per_epoch(3, replace(CONFIG, drop_last=True)) == 1

    def test_drawn_with_replacement(self):
        seen = [i for _, part in self.batches(0, 200, replacement=True) for i in part]
        first = seen[:16]
        assert len(set(first)) < 16, "some example comes twice"
        counts = torch.tensor(seen).bincount(minlength=20)
        assert ((counts > 40) & (counts < 130)).all(), "and all come"
        assert self.batches(0, 12, replacement=True)[5:] == self.batches(5, 12, replacement=True)

    def test_repeated_examples_are_in_one_batch(self):
        whole = [part for _, part in self.batches(0, 2, repeats=4)]
        assert all(len(part) == 8 and len(set(part)) == 2 for part in whole)
        assert len({i for part in whole for i in part}) == 4
        assert len(self.batches(0, 2, repeats=4)) == len(self.batches(0, 2))
        halves = [self.batches(0, 2, process=p, processes=2, repeats=2) for p in (0, 1)]
        assert [sorted(part) for _, part in halves[0]] == [sorted(part) for _, part in halves[1]]
        numbers = {number for half in halves for number, _ in half}
        assert len(numbers) == 4, "augmented apart"

    def test_epochs_differ(self):
        assert self.batches(0, 2) != self.batches(2, 4)

    def test_a_later_start_continues(self):
        assert self.batches(0, 12)[5:] == self.batches(5, 12)

    def test_processes_and_parts_share_each_batch(self):
        whole = self.batches(0, 4)
        halves = [self.batches(0, 4, process=p, processes=2, accumulate=2) for p in (0, 1)]
        for step, (_, batch) in enumerate(whole):
            parts = [half[2 * step + i] for half in halves for i in range(2)]
            assert sorted(i for _, part in parts for i in part) == sorted(batch)
            assert len({number for number, _ in parts}) == 4, "each part has random numbers of its own"

    def test_augmentation_depends_on_the_place_alone(self):
        items = SeededItems(Noisy(), 0)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = torch.stack(items.__getitems__((3, [1, 2])))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(5)
        assert torch.equal(torch.stack(items.__getitems__((3, [1, 2]))), first)
        assert not torch.isclose(torch.stack(items.__getitems__((4, [1, 2]))), first).any()
        assert not torch.isclose(torch.stack(SeededItems(Noisy(), 1).__getitems__((3, [1, 2]))), first).any()
