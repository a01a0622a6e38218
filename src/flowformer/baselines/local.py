"""Local attention: softmax(QKᵀ/√d) V within non-overlapping windows. O(N·C) for windows of C tokens.

Shapes: B batch, H heads, N tokens, D features, T windows of C tokens.
"""

from __future__ import annotations

from torch import Tensor

from .._utils import check_positive
from .blocks import BlockMechanism, join, softmax_blocks, split
from .registry import register


@register
class LocalAttention(BlockMechanism):
    """Attention within contiguous windows, the local baseline of the Long-Range Arena (Tay et al., 2021).

    Args:
        window: C, number of tokens of a window.

    >>> import torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> LocalAttention(window=3)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "local"
    linear = True

    def __init__(self, *, window: int = 50, **sizes: int | None) -> None:
        super().__init__(**sizes)
        check_positive(window=window)
        self.window = window

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        length = query.shape[2]
        window = min(self.window, length)
        q, k, v, seen = (split(x, window) for x in (query, key, value, sources))  # (B, H, T, C, …)
        seen = seen.mT
        if is_causal:
            seen = seen & seen.new_ones(window, window).tril()
        return join(softmax_blocks(q, k, v, seen), length)
