"""Blocks of heads: attention is computed in blocks small enough to stay in cache, so that no intermediate is as large
as an input.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E); masks (B, N) and (B, M) bool, True = takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..common import Mask, Masks, Options, sum_dtype

# maximum number of elements of one tensor in a block: fits the cache of a CPU, or keeps another device busy
BLOCK_SIZE = {"cpu": 2**19}
DEVICE_BLOCK_SIZE = 2**26
# blocks are not made smaller than this to reach `min_blocks`: the overhead would outweigh the saved memory
SMALL_BLOCK_SIZE = 2**15


class HeadBlock(NamedTuple):
    """Some key heads of some sequences, each with one of the query heads that share it: G heads in total."""

    batch: slice
    key_heads: slice
    query_heads: slice
    num_heads: int  # heads of the block in each sequence
    is_first: bool  # whether these are the first query heads of their key heads: gradients are written, else added

    def sinks(self, x: Tensor) -> Tensor:
        """(B, H, ...) -> (G, ...)"""
        return x[self.batch, self.query_heads].flatten(0, 1)

    def sources(self, x: Tensor) -> Tensor:
        """(B, H_kv, ...) -> (G, ...)"""
        return x[self.batch, self.key_heads].flatten(0, 1)

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.sinks(query), self.sources(key), self.sources(value)

    def mask(self, mask: Mask) -> Tensor | None:
        """(B, N) -> (G, N)"""
        return None if mask is None else mask[self.batch].repeat_interleave(self.num_heads, 0)

    def masks(self, masks: Masks) -> Masks:
        return self.mask(masks[0]), self.mask(masks[1])

    def sink_view(self, x: Tensor) -> Tensor | None:
        """A view (G, ...) of the sinks of x, to write to; None if the strides allow no such view."""
        return _flat_view(x[self.batch, self.query_heads])

    def source_view(self, x: Tensor) -> Tensor | None:
        """A view of the sources of x, likewise; None also if the block must add to what the first block has written."""
        return _flat_view(x[self.batch, self.key_heads]) if self.is_first else None

    def write_sinks(self, x: Tensor, part: Tensor) -> None:
        _write(x[self.batch, self.query_heads], part)

    def write_sources(self, x: Tensor, part: Tensor) -> None:
        view = x[self.batch, self.key_heads]
        if self.is_first:
            _write(view, part)
        else:
            view += part.view(view.shape)


def head_blocks(query: Tensor, key: Tensor, value: Tensor, length: int, min_blocks: int) -> Iterator[HeadBlock]:
    """Blocks that cover all heads, the first one the largest.

    Args:
        length: tokens of a head that are processed at once.
        min_blocks: minimum number of blocks, so that the intermediates of a block are a fraction of the input; fewer if
            blocks would be smaller than SMALL_BLOCK_SIZE.
    """
    batch, heads = key.shape[:2]
    shared = query.shape[1] // max(heads, 1)
    size = max(length * max(query.shape[3], value.shape[3]), 1)
    limit = BLOCK_SIZE.get(query.device.type, DEVICE_BLOCK_SIZE)
    fitting = max(1, min(limit // size, max(batch * heads // min_blocks, SMALL_BLOCK_SIZE // size)))
    rows, width = (fitting // heads, heads) if fitting >= heads > 0 else (1, fitting)
    for row in range(0, batch, rows):
        for head in range(0, heads, width):
            stop = min(head + width, heads)
            for member in range(shared):
                query_heads = slice(head * shared + member, stop * shared, shared)
                yield HeadBlock(slice(row, row + rows), slice(head, stop), query_heads, stop - head, member == 0)


def one_block(
    query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[HeadBlock, Tensor, Tensor, Tensor, Options]:
    """All heads as one block, for graphs without loops, and the arguments for it.

    Key heads are repeated for the query heads that share them, and the powers for each sequence, to (2, G).
    """
    shared = query.shape[1] // max(key.shape[1], 1)
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    if options.powers is not None:
        options = Options(options.scale, options.variant, options.powers.repeat(1, len(query)))
    return HeadBlock(slice(None), slice(None), slice(None), query.shape[1], True), query, key, value, options


def empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # the gradient of a shared key head is a sum over query heads, in the dtype of the sums
    shared = key.shape[1] != query.shape[1]
    grad_key, grad_value = (torch.empty_like(x, dtype=sum_dtype(x) if shared else x.dtype) for x in (key, value))
    return torch.empty_like(query), grad_key, grad_value


def _flat_view(view: Tensor) -> Tensor | None:
    rows, heads = view.shape[:2]
    return view.flatten(0, 1) if rows == 1 or view.stride(0) == heads * view.stride(1) else None


def _write(view: Tensor, part: Tensor) -> None:
    # a part that was written through `sink_view` or `source_view` is already in place
    if part.data_ptr() != view.data_ptr():
        view.copy_(part.view(view.shape))
