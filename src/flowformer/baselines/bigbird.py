"""BigBird: random blocks, a window of blocks, and two global blocks. O(N·(window + random + 2)·C).

Shapes: B batch, H heads, N tokens, D features, T blocks of C tokens, A blocks that a block of queries attends to.
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

    A block of queries attends to the blocks around it, to some random blocks, and to the first and the last block. The
    first and the last block are global: their queries attend to every token. The random blocks are distinct from the
    others; they are drawn once for each head, at construction, and saved in the state dict.

    Args:
        num_heads, max_length: number of heads and longest sequence; random blocks are drawn for each head and block.
        block: C, number of tokens of a block.
        window: number of blocks of the window, odd, with the block of the queries in the middle.
        random: number of random blocks for each block of queries.

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
        # integers instead of floats in [0, 1), since module.to(dtype) would round floats
        shape = num_heads, count_blocks(self.max_length, block), random
        self.register_buffer("draws", torch.randint(2**31, shape))

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        check_length(self.name, self.max_length, query)
        size = min(self.block, query.shape[2])
        q, k, v, s = (split(x, size) for x in (query, key, value, sources))  # (B, H, T, C, …)
        blocks = torch.arange(q.shape[2], device=query.device)
        last = ((lengths - 1) // size).clamp_min(0)[:, None, None]  # (B, 1, 1)
        near, is_counted = self.blocks_seen(blocks, last)  # (B, H, T, A)
        s_near = gather_blocks(s.expand(-1, q.shape[1], -1, -1, -1), near)
        seen = s_near.mT & is_counted.repeat_interleave(size, -1)[..., None, :]
        result = softmax_blocks(q, gather_blocks(k, near), gather_blocks(v, near), seen)

        # replace the rows of the first and the last block, which attend to every token
        ends = torch.stack([torch.zeros_like(last), last], -1).expand(-1, q.shape[1], -1, -1)  # (B, H, 1, 2)
        rows = softmax_blocks(gather_blocks(q, ends), key[:, :, None], value[:, :, None], sources[:, :, None].mT)
        first_rows, last_rows = rows.chunk(2, 3)
        is_first, is_last = (blocks == 0)[:, None, None], (blocks == last)[..., None, None]
        result = torch.where(is_first, first_rows, torch.where(is_last, last_rows, result))
        return join(result, query.shape[2])

    def blocks_seen(self, blocks: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the blocks that each block attends to, (B, H, T, A), and a mask of the valid ones.

        The mask, of the same shape, excludes blocks outside the sequence and duplicates.

        Args:
            blocks: (T,), indices of the blocks of queries.
            last: (B, 1, 1), index of the last block of each sequence.
        """
        inner = last - 1  # the blocks that are not global are 1 … inner
        others_at_most = max(len(blocks) - 3, 0)  # of T blocks, two are global and one has the queries
        reach = min(self.window // 2, others_at_most)
        ends = [torch.zeros_like(last), last]
        window = [blocks + offset for offset in range(-reach, reach + 1)]
        seen = ends + window
        counts = [torch.ones_like(last, dtype=torch.bool)] * 2 + [(block >= 1) & (block <= inner) for block in window]

        low, high = (blocks - reach).clamp_min(1), torch.minimum(blocks + reach, inner)
        width = (high - low + 1).clamp_min(0)
        others = inner - width
        drawn: list[Tensor] = []
        for nth, draw in enumerate(self.draws[:, : len(blocks), :others_at_most].unbind(-1)):
            # an index among the blocks outside the window that were not drawn before; then skip the drawn ones
            index = draw % (others - nth).clamp_min(1)
            for earlier in torch.stack(drawn, -1).sort(-1).values.unbind(-1) if drawn else ():
                index = index + (index >= earlier)
            drawn.append(index)
            seen.append(torch.where(index + 1 >= low, index + 1 + width, index + 1))
            counts.append(others > nth)
        shape = last.shape[0], self.draws.shape[0], len(blocks)
        indices, is_counted = (torch.stack([x.expand(shape) for x in part], -1) for part in (seen, counts))
        return indices.clamp(0, len(blocks) - 1), is_counted
