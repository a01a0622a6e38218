"""Helpers of block-wise attentions: positions without padding, blocks of tokens, softmax within them.

Shapes: B batch, H heads, N tokens, D features, E values, T blocks of C tokens, S sources that a block of queries sees.
A mask of tokens has the shape of one head with one feature, (B, 1, N, 1), so that it is cut as the tokens are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import Mechanism


class BlockMechanism(Mechanism):
    """A mechanism whose pattern depends on positions, which are counted without padding.

    A token may be a query, a source or both. Padding is moved behind the sequence before the pattern is applied, so
    a padded sequence gives the same result as alone.
    """

    cross = False

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        batch, _, length, _ = query.shape
        if query_mask is not None:
            query = query.masked_fill(~query_mask[:, None, :, None], 0)
        if key_mask is not None:
            padding = ~key_mask[:, None, :, None]
            key, value = key.masked_fill(padding, 0), value.masked_fill(padding, 0)
        sources = (query.new_ones(batch, length, dtype=torch.bool) if key_mask is None else key_mask)[:, None, :, None]
        if query_mask is None or key_mask is None:
            lengths = torch.full((batch,), length, device=query.device)
            return self.attend_in_order(query, key, value, is_causal, sources, lengths)
        there = query_mask | key_mask
        order = (~there).byte().argsort(dim=-1, stable=True)[:, None, :, None]
        query, key, value, sources = (x.gather(2, order.expand_as(x)) for x in (query, key, value, sources))
        result = self.attend_in_order(query, key, value, is_causal, sources, there.sum(-1))
        return result.gather(2, order.argsort(dim=2).expand_as(result))

    def attend_in_order(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, sources: Tensor, lengths: Tensor
    ) -> Tensor:
        """The result, (B, H, N, E), where row b is a sequence of lengths[b] tokens and padding behind them.

        Args:
            sources: (B, 1, N, 1) bool, which tokens may be attended to; the others have key and value 0.
            lengths: (B,).
        """
        raise NotImplementedError


def count_blocks(length: int, size: int) -> int:
    return -(-length // size)


def split(x: Tensor, size: int) -> Tensor:
    """(B, H, N, D) to (B, H, T, C, D); the last block is filled with 0."""
    length = x.shape[2]
    return F.pad(x, (0, 0, 0, -length % size)).unflatten(2, (count_blocks(length, size), size))


def join(x: Tensor, length: int) -> Tensor:
    """The inverse of `split`, (B, H, N, D)."""
    return x.flatten(2, 3)[:, :, :length]


def neighbours(x: Tensor, before: int, after: int) -> Tensor:
    """Each block with those around it, (B, H, T, (before + 1 + after)·C, D); beyond the ends, blocks of 0."""
    blocks = x.shape[2]
    x = F.pad(x, (0, 0, 0, 0, before, after))
    return torch.cat([x[:, :, start : start + blocks] for start in range(before + 1 + after)], 3)


def offsets(size: int, before: int, after: int, device: torch.device) -> Tensor:
    """(C, S): how far each source of `neighbours` stands behind each query of the block; negative is the past."""
    positions = torch.arange(-before * size, (1 + after) * size, device=device)
    return positions - torch.arange(size, device=device)[:, None]


def gather_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """For x (B, H, T, C, D) and numbers of blocks (B, H, T', A): those blocks in a row, (B, H, T', A·C, D)."""
    size, dim = x.shape[3:]
    index = blocks.flatten(2)[..., None].expand(-1, -1, -1, size * dim)
    return x.flatten(3).gather(2, index).reshape(*blocks.shape[:3], blocks.shape[3] * size, dim)


def softmax_blocks(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """softmax(QKᵀ/√d) V in every block; a query that sees nothing gives 0.

    Args:
        query: (B, H, T, C, D).
        key, value: (B, H, T, S, D) and (B, H, T, S, E).
        seen: bool, which expands to (B, H, T, C, S).
    """
    batch, _, blocks = query.shape[:3]
    # no row of the softmax may be empty: it would be NaN
    empty = ~seen.any(-1, keepdim=True)
    seen = (seen | empty).expand(batch, -1, blocks, -1, -1)
    # the fused kernels take four dimensions: blocks become batch
    query, key, value, seen = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value, seen))
    result = F.scaled_dot_product_attention(query, key, value, seen).unflatten(0, (batch, blocks)).transpose(1, 2)
    return result.masked_fill(empty, 0)
