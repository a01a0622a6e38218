"""Batches packed into one block: what goes in comes out, from workers too."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flowformer.data import collate
from flowformer.train import batches
from flowformer.train.batches import PackedBatch, load_batches

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 7, 3)])
def test_a_packed_batch_is_its_batch(shape):
    torch.manual_seed(0)
    batch = {str(dtype): (torch.randn(shape) * 9).to(dtype) for dtype in DTYPES}
    found = PackedBatch(batch).unpack()
    assert list(found) == list(batch)
    for name, x in batch.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)


def test_tensors_of_any_strides():
    x = torch.arange(12).view(3, 4).T[::2]
    assert torch.equal(PackedBatch({"x": x}).unpack()["x"], x)


class Tokens(Dataset):
    def __getitem__(self, index):
        return {"tokens": torch.arange(index + 1), "label": torch.tensor(index)}


@pytest.mark.filterwarnings("error")
def test_memory_is_pinned_for_cuda_alone():
    """DataLoader warns elsewhere that it cannot."""
    (found,) = load_batches(Tokens(), [[0]], collate, 0, torch.device("mps"))
    assert found["tokens"].tolist() == [[0]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_their_order(workers):
    order = [[4, 1], [2], [0, 3, 5]]
    found = list(load_batches(Tokens(), order, collate, workers, torch.device("cpu")))
    for indices, batch in zip(order, found, strict=True):
        expected = collate([Tokens()[index] for index in indices])
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_no_more_workers_than_cores(monkeypatch):
    """torch warns of more."""
    started = []

    def loader(*args, num_workers, worker_init_fn, **options):
        started.append(num_workers)
        return DataLoader(*args, **options)

    monkeypatch.setattr(batches, "DataLoader", loader)
    monkeypatch.setattr(batches, "cores", lambda: 3)
    for workers in (2, 8):
        list(load_batches(Tokens(), [[0]], collate, workers, torch.device("cpu")))
    assert started == [2, 3]
