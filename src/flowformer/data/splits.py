"""What a reader returns: train, validation and test datasets of dicts of tensors, and their `DataInfo`; and `collate`.

Shapes: B batch, N length of an item, C channels, M sequences, T tokens of all sequences.
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
# keys of sequences, which may differ in length between items; the value is the key of the mask in a padded batch
MASKS = {"tokens": "mask", "series": "mask", "first": "first_mask", "second": "second_mask"}


@dataclass(frozen=True)
class DataInfo:
    """Description of a data set.

    Args:
        name: the name that `load` takes.
        checksum: checksum of the files that were read.
        num_classes: number of classes.
        vocab_size: exclusive upper bound of the token ids.
        num_features: channels of a series or an image, or dimension of a state.
        num_actions: dimension of an action.
        max_length: upper bound of an item's length, in tokens, steps or pixels; for language, the tokens a case reads.
        padding_id: the token id reserved for padding; None if every id is a token.
        environment: gymnasium's id of the environment with the same physics as the data; empty if not RL.
        differs: description of how the data differ from the paper's; empty if they are the same.
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
    """The map-style datasets of each part; `valid` is None if the data set has no validation part."""

    train: Dataset[Item]
    valid: Dataset[Item] | None
    test: Dataset[Item]
    info: DataInfo


class Columns(Dataset[Item]):
    """A dataset held in memory as columns: for each key a sequence with one tensor per case.

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
    """Token sequences stored end to end in one tensor of a small dtype; indexing returns one sequence as int64.

    Args:
        flat: (T,), all tokens, in any integer dtype, such as uint8 for bytes.
        starts, ends: (M,), range of each sequence in `flat`; ranges may overlap.
        shift: added to every id when it is read; 1 keeps id 0 free for padding.

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
        """Select sequences by index, with repetition allowed; the result shares the tokens in `flat`."""
        return FlatSequences(self.flat, self.starts[indices], self.ends[indices], self.shift)


def collate(items: Sequence[Mapping[str, Any]], length: int | None = None) -> dict[str, Tensor]:
    """Stack items into a batch; tokens, series and pairs are padded at the end with zeros.

    Each padded key gets a mask (B, N) bool, True = takes part: "mask" for tokens and series, "first_mask" and
    "second_mask" for pairs. A key without padding gets no mask.

    Args:
        length: minimum length to pad to, as the paper's code does; None pads to the longest item of the batch.

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
        batch[key], mask = pad(column, length=length)
        if mask is not None:
            batch[MASKS[key]] = mask
    return batch


def pad(
    sequences: Sequence[Tensor], device: torch.device | None = None, *, length: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Pad sequences (N_i, ...) at the end with zeros to a batch (B, N, ...) on the device.

    Also return the mask (B, N) bool, True = takes part; None if no sequence is padded.

    Args:
        device: None leaves the batch on the device of the sequences.
        length: minimum of N; None pads to the longest sequence.
    """
    lengths = torch.tensor([len(x) for x in sequences])
    longest = max(int(lengths.max()), length or 0)
    if int(lengths.min()) == longest:
        return torch.stack(list(sequences)).to(device), None
    padded = pad_sequence(list(sequences), batch_first=True)
    if padded.shape[1] < longest:
        missing = padded.new_zeros(len(sequences), longest - padded.shape[1], *padded.shape[2:])
        padded = torch.cat((padded, missing), 1)
    mask = torch.arange(longest) < lengths[:, None]
    return padded.to(device), mask.to(device)
