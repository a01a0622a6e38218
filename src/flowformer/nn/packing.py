"""Packed batches: the tokens of all sequences one after another, without the padding between them.

Shapes: B sequences, N tokens of the longest, T packed tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.bounds import check_bounds

WORTH_PACKING = 0.9  # share of tokens that are no padding, below which packing saves time


class Packing(NamedTuple):
    """Where the tokens of a padded batch are when packed."""

    tokens: Tensor  # (T,), the place of each packed token in the flattened batch; what follows is in no sequence
    cu_seqlens: Tensor  # (B + 1,), the bounds of the packed sequences
    lengths: list[int]  # of the sequences
    max_seqlen: int  # N or more

    @classmethod
    def of(cls, mask: Tensor) -> Self | None:
        """Of a batch with this mask, (B, N), if packing saves time and the lengths can be read here."""
        # tracing, torch.func and tensors without data do not allow it
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
        if traced or mask.is_meta or type(mask) is not Tensor:
            return None
        on_device = mask.sum(1)
        lengths = on_device.tolist()
        if sum(lengths) >= WORTH_PACKING * mask.numel():
            return None
        # on a GPU rounded up, so that few shapes occur
        size, longest = (_round_up(x) if mask.is_cuda else x for x in (sum(lengths), mask.shape[1]))
        tokens = torch.nonzero_static(mask.flatten(), size=size, fill_value=0)[:, 0]
        return cls(tokens, F.pad(on_device.cumsum(0), (1, 0)), lengths, longest)

    @classmethod
    def bounded(cls, cu_seqlens: Tensor, tokens: int, longest: int) -> Self:
        """Of sequences with these bounds among so many tokens, to be padded at their ends to the longest length."""
        check_bounds(tokens, tokens, (cu_seqlens, cu_seqlens, longest, longest), is_causal=False)
        lengths = cu_seqlens.diff()
        mask = torch.arange(longest, device=cu_seqlens.device) < lengths[:, None]
        return cls(mask.flatten().nonzero()[:, 0], cu_seqlens, lengths.tolist(), longest)

    def pack(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (1, T, ...)"""
        return x.flatten(0, 1).index_select(0, self.tokens)[None]

    def unpack(self, x: Tensor, length: int) -> Tensor:
        """(1, T, ...) -> (B, length, ...), 0 at the padding."""
        count, batch = sum(self.lengths), len(self.lengths)
        padded = x.new_zeros(batch * length, *x.shape[2:]).index_copy(0, self.tokens[:count], x[0, :count])
        return padded.view(batch, length, *x.shape[2:])


def _round_up(count: int) -> int:
    """To one of eight sizes between powers of two."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
