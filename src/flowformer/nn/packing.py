"""Packed sequences: the tokens of a batch in one row, without the padding between the sequences.

Shapes: B sequences, N tokens of the longest, T packed tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.bounds import read_bounds, starts_and_lengths

WORTH_PACKING = 0.9  # packing saves time if tokens, as opposed to padding, are less than this share of the batch


class Packing(NamedTuple):
    """Index that converts a padded batch (B, N) to packed sequences (1, T) and back."""

    # (T,), index of each packed token in the flattened batch; entries from cu_seqlens[-1] on are filler
    tokens: Tensor
    cu_seqlens: Tensor  # (B + 1,), bounds of the packed sequences
    lengths: list[int]  # number of tokens of each sequence
    max_seqlen: int  # upper bound of the lengths: N, or N rounded up

    @classmethod
    def from_mask(cls, mask: Tensor) -> Self | None:
        """The packing of a batch with mask (B, N); None if packing saves no time or the lengths cannot be read."""
        # reading the lengths fails in traced or captured code, under torch.func and for tensors without data
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
        captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
        if traced or captured or mask.is_meta or type(mask) is not Tensor:
            return None
        device_lengths = mask.sum(1)
        lengths = device_lengths.tolist()
        if sum(lengths) >= WORTH_PACKING * mask.numel():
            return None
        # rounded up on a GPU, so that the kernels see few distinct shapes
        size, longest = (_round_up(x) if mask.is_cuda else x for x in (sum(lengths), mask.shape[1]))
        return cls(_indices(mask, size), F.pad(device_lengths.cumsum(0), (1, 0)), lengths, longest)

    @classmethod
    def from_bounds(cls, cu_seqlens: Tensor, tokens: int, longest: int) -> Self:
        """The packing of sequences that are already packed, to be padded at their ends to the longest of them.

        Args:
            cu_seqlens: (B + 1,), bounds of the sequences.
            tokens: T, which may be more than cu_seqlens[-1].
            longest: upper bound of the lengths.
        """
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "got cu_seqlens while a CUDA graph is captured, but this attention reads them on the host, so that the "
                "graph would keep their lengths. Pass a padded batch and its mask, or use FlowAttention."
            )
        read = read_bounds if cu_seqlens.is_cuda else starts_and_lengths
        (_, lengths), _ = read(tokens, tokens, (cu_seqlens, cu_seqlens, longest, longest), is_causal=False)
        longest = max(lengths, default=0)
        mask = torch.arange(longest, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]
        return cls(_indices(mask, sum(lengths)), cu_seqlens, lengths, longest)

    def pack(self, x: Tensor) -> Tensor:
        """Pack a padded batch: (B, N, ...) -> (1, T, ...)."""
        return x.flatten(0, 1).index_select(0, self.tokens)[None]

    def unpack(self, x: Tensor, length: int) -> Tensor:
        """Pad packed sequences with 0: (1, T, ...) -> (B, length, ...)."""
        count, batch = sum(self.lengths), len(self.lengths)
        padded = x.new_zeros(batch * length, *x.shape[2:]).index_copy(0, self.tokens[:count], x[0, :count])
        return padded.view(batch, length, *x.shape[2:])


def _indices(mask: Tensor, size: int) -> Tensor:
    """The indices of True in the flattened mask, filled up with 0 to a given size: (size,)."""
    return torch.nonzero_static(mask.flatten(), size=size, fill_value=0)[:, 0]  # unlike nonzero, without waiting


def _round_up(count: int) -> int:
    """Round up to a multiple of 1/8 of the largest power of two that is not greater."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit
