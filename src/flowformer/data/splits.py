"""The result of every loader: datasets of dicts of tensors, a description of them, and `collate`.

Shapes: B batch, N length of an item, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

Item = dict[str, Tensor]
# items of these keys run over time and may differ in length; the value is the key of their mask
MASKS = {"tokens": "mask", "series": "mask", "first": "first_mask", "second": "second_mask"}


@dataclass(frozen=True)
class DataInfo:
    """Description of a data set.

    Args:
        name: as `load` takes it.
        checksum: of the files that were read.
        num_classes: of the labels.
        vocab_size: upper bound of token ids (exclusive).
        num_features: channels of a series, numbers of a state.
        num_actions: numbers of an action.
        max_length: no item is longer; for language, how many tokens are predicted at once.
        padding_id: the id that no token has; None where every id is a token.
        environment: gymnasium's id of the environment with the physics of the data; empty for other data.
        differs: a description of how the data differ from the paper's; empty if they are the same.
    """

    name: str
    checksum: str
    num_classes: int | None = None
    vocab_size: int | None = None
    num_features: int | None = None
    num_actions: int | None = None
    max_length: int | None = None
    padding_id: int | None = None
    environment: str = ""
    differs: str = ""


class Splits(NamedTuple):
    """The parts of a data set, map-style; `valid` is None where none is published."""

    train: Dataset[Item]
    valid: Dataset[Item] | None
    test: Dataset[Item]
    info: DataInfo


class Columns(Dataset[Item]):
    """Cases held in memory, one sequence of tensors per key.

    >>> cases = Columns(series=[torch.zeros(5, 2), torch.zeros(3, 2)], label=torch.tensor([1, 0]))
    >>> len(cases), cases[1]["series"].shape, cases[1]["label"]
    (2, torch.Size([3, 2]), tensor(0))
    """

    def __init__(self, **columns: Sequence[Tensor] | Tensor | FlatSequences) -> None:
        lengths = {key: len(column) for key, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"every key must have as many cases, got {lengths}.")
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Item:
        return {key: column[index] for key, column in self.columns.items()}


class FlatSequences:
    """Token sequences kept end to end in one small-typed tensor, read as int64.

    Args:
        flat: (T,), all tokens; uint8 is enough for bytes.
        starts, ends: (M,), where each sequence lies; they may overlap.
        shift: added to every id, so that 0 can be padding.

    >>> flat, starts, ends = torch.tensor([7, 8, 9], dtype=torch.uint8), torch.tensor([0, 2]), torch.tensor([2, 3])
    >>> sequences = FlatSequences(flat, starts, ends, shift=1)
    >>> sequences[0], sequences[1]
    (tensor([8, 9]), tensor([10]))
    """

    def __init__(self, flat: Tensor, starts: Tensor, ends: Tensor, shift: int = 0) -> None:
        self.flat, self.starts, self.ends, self.shift = flat, starts, ends, shift

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return self.flat[self.starts[index] : self.ends[index]].long() + self.shift

    def take(self, indices: Tensor) -> FlatSequences:
        """The chosen sequences, which may repeat; the tokens are shared."""
        return FlatSequences(self.flat, self.starts[indices], self.ends[indices], self.shift)


def collate(items: Sequence[Mapping[str, Any]], length: int | None = None) -> dict[str, Tensor]:
    """Stacks items into a batch; tokens, series and pairs are padded at the end with zeros.

    A padded key brings a mask (B, N) bool, True = takes part: "mask" for tokens and series, "first_mask" and
    "second_mask" for pairs. A batch without padding has no mask.

    Args:
        length: pad at least to this length, as the paper's code does; None pads to the longest of the batch.

    >>> batch = collate([{"tokens": torch.tensor([4, 5, 6])}, {"tokens": torch.tensor([7])}])
    >>> batch["tokens"].tolist(), batch["mask"].tolist()
    ([[4, 5, 6], [7, 0, 0]], [[True, True, True], [True, False, False]])
    """
    batch = {}
    for key in items[0]:
        column = [item[key] for item in items]
        if key not in MASKS:
            batch[key] = torch.stack(column)
            continue
        lengths = torch.tensor([len(x) for x in column])
        longest = max(int(lengths.max()), length or 0)
        if int(lengths.min()) == longest:
            batch[key] = torch.stack(column)
            continue
        padded = pad_sequence(column, batch_first=True)
        if padded.shape[1] < longest:
            missing = padded.new_zeros(len(column), longest - padded.shape[1], *padded.shape[2:])
            padded = torch.cat((padded, missing), 1)
        batch[key] = padded
        batch[MASKS[key]] = torch.arange(longest) < lengths[:, None]  # (B, N)
    return batch
