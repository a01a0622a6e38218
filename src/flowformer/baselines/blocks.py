"""Helpers of block-wise attentions: moving padding to the end, splitting tokens into blocks, softmax within blocks.

Shapes: B batch, H heads, N tokens, D features, E values, T blocks of C tokens, S sources of a block of queries.
A mask of tokens has the shape (B, 1, N, 1), so that it can be split into blocks like the tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import Mechanism


class BlockMechanism(Mechanism):
    """A mechanism whose pattern depends on the positions of tokens, counted without padding.

    Padding is moved to the end of the sequence before the pattern is applied, so that a padded sequence gives the same
    result as the sequence alone. A token is padding if it is masked both as query and as key.
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
        present = query_mask | key_mask
        order = (~present).byte().argsort(dim=-1, stable=True)[:, None, :, None]
        query, key, value, sources = (x.gather(2, order.expand_as(x)) for x in (query, key, value, sources))
        result = self.attend_in_order(query, key, value, is_causal, sources, present.sum(-1))
        return result.gather(2, order.argsort(dim=2).expand_as(result))

    def attend_in_order(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, sources: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return the result (B, H, N, E) for sequences with padding at the end.

        Args:
            sources: (B, 1, N, 1) bool, True for tokens that may be attended to; the others have key and value 0.
            lengths: (B,), number of tokens of each sequence without padding.
        """
        raise NotImplementedError


def count_blocks(length: int, size: int) -> int:
    """Return the number of blocks of `size` tokens that cover `length` tokens."""
    return -(-length // size)


def split(x: Tensor, size: int) -> Tensor:
    """Split (B, H, N, D) into blocks (B, H, T, C, D); the last block is padded with 0."""
    length = x.shape[2]
    return F.pad(x, (0, 0, 0, -length % size)).unflatten(2, (count_blocks(length, size), size))


def join(x: Tensor, length: int) -> Tensor:
    """Undo `split`: (B, H, T, C, D) to (B, H, N, D)."""
    return x.flatten(2, 3)[:, :, :length]


def neighbours(x: Tensor, before: int, after: int) -> Tensor:
    """Concatenate each block with its neighbours, (B, H, T, (before + 1 + after)·C, D); 0 beyond both ends."""
    blocks = x.shape[2]
    x = F.pad(x, (0, 0, 0, 0, before, after))
    return torch.cat([x[:, :, start : start + blocks] for start in range(before + 1 + after)], 3)


def offsets(size: int, before: int, after: int, device: torch.device) -> Tensor:
    """Return the position of each source of `neighbours` minus that of each query of the block, (C, S)."""
    positions = torch.arange(-before * size, (1 + after) * size, device=device)
    return positions - torch.arange(size, device=device)[:, None]


def gather_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """Concatenate the blocks with the given indices.

    Args:
        x: (B, H, T, C, D).
        blocks: (B, H, T', A), indices of blocks.

    Returns:
        (B, H, T', A·C, D).
    """
    size, dim = x.shape[3:]
    index = blocks.flatten(2)[..., None].expand(-1, -1, -1, size * dim)
    return x.flatten(3).gather(2, index).reshape(*blocks.shape[:3], blocks.shape[3] * size, dim)


def softmax_blocks(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Compute softmax(QKᵀ/√d) V within each block; the result of a query without visible sources is 0.

    Args:
        query: (B, H, T, C, D).
        key, value: (B, H, T, S, D) and (B, H, T, S, E).
        seen: bool, broadcastable to (B, H, T, C, S), True where a query attends to a source.
    """
    batch, _, blocks = query.shape[:3]
    # the softmax of an empty row is NaN: let it attend to all sources and set its result to 0
    empty = ~seen.any(-1, keepdim=True)
    seen = (seen | empty).expand(batch, -1, blocks, -1, -1)
    # the fused kernels take four dimensions, so blocks are moved into the batch dimension
    query, key, value, seen = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value, seen))
    result = F.scaled_dot_product_attention(query, key, value, seen).unflatten(0, (batch, blocks)).transpose(1, 2)
    return result.masked_fill(empty, 0)
