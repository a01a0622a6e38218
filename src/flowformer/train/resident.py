"""Data sets kept in GPU memory: batches are gathered there, without workers and without host-to-device copies.

The batches equal those of `data.collate`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.offline_rl import Windows
from ..data.splits import MASKS, Columns, FlatSequences
from ..nn.masks import zero_padding
from .config import TrainConfig
from .tasks import Batch

MAX_BYTES = 4 * 2**30  # size of each split; the rest of the GPU memory is for the model


class DeviceColumn:
    """The values of one key for all examples, on the device: rows of a tensor, or concatenated sequences.

    The bounds of the sequences stay on the host, which needs them for the shape of a batch.

    Args:
        is_padded: whether examples may differ in length, and are padded.
    """

    def __init__(self, column: Any, is_padded: bool, device: torch.device) -> None:
        self.is_padded = is_padded
        self.rows: Tensor | None = None
        if not is_padded and not isinstance(column, Tensor):
            column = torch.stack(list(column))
        if isinstance(column, Tensor):
            self.rows = column.to(device)
            return
        self.shift: int | None = None
        if isinstance(column, FlatSequences):
            self.starts, ends, flat, self.shift = column.starts, column.ends, column.flat, column.shift
        else:
            ends, flat = torch.tensor([len(case) for case in column]).cumsum(0), torch.cat(list(column))
            self.starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        self.flat, self.lengths = flat.to(device), ends - self.starts

    def take(self, chosen: Tensor, length: int | None) -> tuple[Tensor, Tensor | None]:
        """The chosen examples (B, N, ...), padded with zeros to the longest, and their mask (B, N).

        The mask is None if no example is padded.

        Args:
            chosen: (B,), on the CPU.
            length: minimum length to pad to.
        """
        if self.rows is not None:
            values = self.rows[_to_device(chosen, self.rows.device)]
            return _lengthened(values, length) if self.is_padded and length else (values, None)
        device, lengths = self.flat.device, self.lengths[chosen]
        longest = max(int(lengths.max()), length or 0)
        starts, counts = _to_device(torch.stack((self.starts[chosen], lengths)), device)  # stacked for a single copy
        offsets = torch.arange(longest, device=device)
        mask = offsets < counts[:, None]  # (B, N)
        values = self.flat[torch.where(mask, starts[:, None] + offsets, 0)]
        if self.shift is not None:
            values = values.long() + self.shift
        if int(lengths.min()) == longest:
            return values, None
        return zero_padding(values, mask), mask


class DeviceColumns:
    """The columns of a dataset, on the device."""

    def __init__(self, dataset: Columns, device: torch.device) -> None:
        self.columns = {key: DeviceColumn(column, key in MASKS, device) for key, column in dataset.columns.items()}

    def take(self, chosen: Tensor, length: int | None) -> Batch:
        """The batch of the chosen examples, with the arguments of `DeviceColumn.take`."""
        batch = {}
        for key, column in self.columns.items():
            batch[key], mask = column.take(chosen, length)
            if mask is not None:
                batch[MASKS[key]] = mask
        return batch


class DeviceWindows:
    """The steps of all episodes, on the device, from which windows are cut."""

    def __init__(self, dataset: Windows, device: torch.device) -> None:
        self.window = dataset.window
        self.ends = dataset.ends.to(device)
        self.steps = {key: steps.to(device) for key, steps in dataset.steps.items()}

    def take(self, chosen: Tensor, length: int | None) -> Batch:
        """The batch of the chosen windows, which all have the same length."""
        device = self.ends.device
        first = _to_device(chosen, device)[:, None]
        indices = first + torch.arange(self.window, device=device)
        mask = indices < self.ends[first]  # (B, T)
        indices = torch.where(mask, indices, 0)
        return {key: zero_padding(steps[indices], mask) for key, steps in self.steps.items()} | {"mask": mask}


def _lengthened(values: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """Pad values (B, N, ...) with zeros to a length; also return the mask, None if they are not shorter."""
    count = values.shape[1]
    if count >= length:
        return values, None
    padded = torch.cat((values, values.new_zeros(len(values), length - count, *values.shape[2:])), 1)
    return padded, (torch.arange(length, device=values.device) < count).repeat(len(values), 1)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy x to the device asynchronously."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def applies(dataset: Dataset, config: TrainConfig, device: torch.device) -> bool:
    """Whether the batches of a run are gathered on the device."""
    return config.on_device and device.type == "cuda" and fits(dataset)


def fits(dataset: Any) -> bool:
    """Whether the items are windows, or come from columns without augmentation, and take at most MAX_BYTES."""
    if isinstance(dataset, Windows):
        return sum(steps.nbytes for steps in dataset.steps.values()) <= MAX_BYTES
    is_plain = type(dataset).__getitem__ is Columns.__getitem__
    return is_plain and sum(map(_bytes, dataset.columns.values())) <= MAX_BYTES


def batches(
    dataset: Dataset, order: Iterable[tuple[int, list[int]]], length: int | None, device: torch.device
) -> Iterator[Batch]:
    """The batches in a given order, on the device.

    Args:
        dataset: one that `fits`.
        order: pairs of number and indices, as from `MicroBatches`.
        length: as in `data.collate`.
    """
    copy = _device_copy(dataset, device)
    for _, indices in order:
        yield copy.take(torch.tensor(indices), length)


# the copies of each dataset on each device, which live as long as the dataset: each evaluation needs the same one
_copies: WeakKeyDictionary[Dataset, dict[torch.device, DeviceColumns | DeviceWindows]] = WeakKeyDictionary()


def _device_copy(dataset: Any, device: torch.device) -> DeviceColumns | DeviceWindows:
    """The dataset on a device, copied by the first call."""
    copies = _copies.setdefault(dataset, {})
    if device not in copies:
        kind = DeviceWindows if isinstance(dataset, Windows) else DeviceColumns
        copies[device] = kind(dataset, device)
    return copies[device]


def _bytes(column: Any) -> int:
    if isinstance(column, Tensor):
        return column.nbytes
    return column.flat.nbytes if isinstance(column, FlatSequences) else sum(case.nbytes for case in column)
