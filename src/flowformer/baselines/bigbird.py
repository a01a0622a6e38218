"""BigBird: random blocks, a window of blocks, and two global blocks. O(N·(window + random + 2)·C).

Shapes: B batch, H heads, N tokens, D features, T blocks of C tokens, A blocks that a block sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._utils import check_positive
from .blocks import BlockMechanism, count_blocks, gather_blocks, join, softmax_blocks, split
from .registry import register
from .tokens import check_length, required_length


@register
class BigBirdAttention(BlockMechanism):
    """Block-sparse attention (Zaheer et al., 2020), the form without extra tokens.

    A block of queries sees the blocks around it, some random ones, and the first and the last block, which see every
    token. The random blocks are distinct from these; they are drawn once per head, at construction, and are part
    of the state dict.

    Args:
        num_heads, max_length: heads, and the longest sequence: there is a draw for every head and block.
        block: tokens of a block, C.
        window: blocks of the window, odd, with the block of the queries in the middle.
        random: random blocks per block.

    >>> x = torch.randn(1, 2, 20, 4)
    >>> BigBirdAttention(num_heads=2, max_length=20, block=2)(x, x, x).shape
    torch.Size([1, 2, 20, 4])
    """

    name = "bigbird"
    linear = True
    causal = False
    draws: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        max_length: int | None = None,
        block: int = 64,
        window: int = 3,
        random: int = 3,
        **sizes: int | None,
    ) -> None:
        super().__init__(**sizes)
        check_positive(block=block, window=window)
        if window % 2 == 0:
            raise ValueError(
                f"bigbird attention needs an odd window, centred on the block of the queries, got {window}."
            )
        if random < 0:
            raise ValueError(f"bigbird attention needs 0 or more random blocks, got {random}.")
        self.max_length = required_length(self.name, max_length)
        self.block = block
        self.window = window
        self.random = random
        # integers, so that module.to(dtype) does not round them
        shape = num_heads, count_blocks(self.max_length, block), random
        self.register_buffer("draws", torch.randint(2**31, shape))

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        check_length(self.name, self.max_length, query)
        q, k, v, s = (split(x, self.block) for x in (query, key, value, sources))  # (B, H, T, C, …)
        blocks = torch.arange(q.shape[2], device=query.device)
        last = ((lengths - 1) // self.block).clamp_min(0)[:, None, None]  # (B, 1, 1)
        near, is_counted = self.blocks_seen(blocks, last)  # (B, H, T, A)
        s_near = gather_blocks(s.expand(-1, q.shape[1], -1, -1, -1), near)
        seen = s_near.mT & is_counted.repeat_interleave(self.block, -1)[..., None, :]
        result = softmax_blocks(q, gather_blocks(k, near), gather_blocks(v, near), seen)

        ends = torch.stack([torch.zeros_like(last), last], -1).expand(-1, q.shape[1], -1, -1)  # (B, H, 1, 2)
        rows = softmax_blocks(gather_blocks(q, ends), key[:, :, None], value[:, :, None], sources[:, :, None].mT)
        first_rows, last_rows = rows.chunk(2, 3)
        is_first, is_last = (blocks == 0)[:, None, None], (blocks == last)[..., None, None]
        result = torch.where(is_first, first_rows, torch.where(is_last, last_rows, result))
        return join(result, query.shape[2])

    def blocks_seen(self, blocks: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Which blocks each block sees, (B, H, T, A), and which of these count, so that none counts twice.

        Args:
            blocks: (T,), the blocks of queries.
            last: (B, 1, 1), the last block of each sequence.
        """
        reach, inner = self.window // 2, last - 1  # the blocks that are not global are 1 … inner
        ends = [torch.zeros_like(last), last]
        around = [blocks + offset for offset in range(-reach, reach + 1)]
        seen = ends + around
        counts = [torch.ones_like(last, dtype=torch.bool)] * 2 + [(block >= 1) & (block <= inner) for block in around]

        low, high = (blocks - reach).clamp_min(1), torch.minimum(blocks + reach, inner)
        width = (high - low + 1).clamp_min(0)
        others = inner - width
        taken: list[Tensor] = []
        for nth, draw in enumerate(self.draws[:, : len(blocks)].unbind(-1)):
            rank = draw % (others - nth).clamp_min(1)
            # ranks are among the blocks not yet taken: step over those that are
            for earlier in torch.stack(taken, -1).sort(-1).values.unbind(-1) if taken else ():
                rank = rank + (rank >= earlier)
            taken.append(rank)
            seen.append(torch.where(rank + 1 >= low, rank + 1 + width, rank + 1))
            counts.append(others > nth)
        shape = last.shape[0], self.draws.shape[0], len(blocks)
        numbers, is_counted = (torch.stack([x.expand(shape) for x in part], -1) for part in (seen, counts))
        return numbers.clamp(0, len(blocks) - 1), is_counted
