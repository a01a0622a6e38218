"""Longformer: a sliding window, and a few global tokens that all tokens attend to and that attend to all tokens.

O(N·(window + global)) time.

Shapes: B batch, H heads, N tokens, D features, G global tokens, T blocks of C = window / 2 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._utils import check_positive
from .blocks import BlockMechanism, join, neighbours, offsets, softmax_blocks, split
from .registry import register


@register
class LongformerAttention(BlockMechanism):
    """Sliding-window attention with global tokens (Beltagy et al., 2020).

    Token i attends to the tokens j with |i − j| ≤ window / 2 and to the first `global_tokens` tokens; these are global
    and attend to every token. With `is_causal`, every token attends only to itself and earlier tokens. Unlike in the
    paper, global tokens share the projections of the others, since a mechanism gets projected heads.

    Args:
        window: even, half of it on each side. The default is also the setting of the Long-Range Arena.
        global_tokens: number of global tokens at the start; 1 for a class token. The Long-Range Arena uses 0.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> LongformerAttention(window=2)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "longformer"
    linear = True

    def __init__(self, *, window: int = 512, global_tokens: int = 1, **sizes: int | None) -> None:
        super().__init__(**sizes)
        check_positive(window=window)
        if window % 2:
            raise ValueError(f"longformer attention needs an even window, half of it on each side, got {window}.")
        if global_tokens < 0:
            raise ValueError(f"longformer attention needs 0 or more global_tokens, got {global_tokens}.")
        self.window = window
        self.global_tokens = global_tokens

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        length, count = query.shape[2], min(self.global_tokens, query.shape[2])
        reach = min(self.window // 2, length)
        before = int(length > reach)
        after = 0 if is_causal else before
        positions = torch.arange(length, device=query.device)
        # exclude global tokens from the window: they are added below and must not count twice
        within = sources & (positions >= count)[:, None]
        q, k, v, within = (split(x, reach) for x in (query, key, value, within))  # (B, H, T, C, …)
        k, v, within = (neighbours(x, before, after) for x in (k, v, within))
        offset = offsets(reach, before, after, query.device)
        seen = within.mT & (offset.abs() <= reach)
        if is_causal:
            seen = seen & (offset <= 0)

        # No causal mask for global tokens: they precede all others, and the rows of global queries are replaced below.
        all_sources = sources[:, :, None].mT  # (B, 1, 1, 1, N)
        k, v = (
            torch.cat([x[:, :, None, :count].expand(-1, -1, y.shape[2], -1, -1), y], 3)
            for x, y in ((key, k), (value, v))
        )
        seen = torch.cat([all_sources[..., :count].expand(*seen.shape[:-1], -1), seen], -1)
        result = join(softmax_blocks(q, k, v, seen), length)
        if is_causal:
            all_sources = all_sources & (positions <= positions[:count, None])
        global_rows = softmax_blocks(query[:, :, None, :count], key[:, :, None], value[:, :, None], all_sources)
        return torch.cat([global_rows[:, :, 0], result[:, :, count:]], 2)
