"""The Sparse Transformer: near tokens, and a few tokens of each farther block. O(N·(l + N/l)), or O(N√N) for l = √N.

Shapes: B batch, H heads, N tokens, D features, T blocks of l = stride tokens, S near sources, c summary tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._utils import check_positive
from ..ops.common import sum_dtype
from .blocks import BlockMechanism, join, neighbours, offsets, split
from .registry import register
from .tokens import masked_softmax

# einsum equations for the scores of the far sources and for the sum of their values. Far sources are the tokens at the
# same position of other blocks (strided), or the summary tokens of other blocks (fixed).
STRIDED = "bhtcd,bhscd->bhtcs", "bhtcs,bhsce->bhtce"
FIXED = "bhtcd,bhsd->bhtcs", "bhtcs,bhse->bhtce"


@register
class SparseAttention(BlockMechanism):
    """Factorised attention (Child et al., 2019); every head attends to the union of both factors in one softmax.

    "strided": token i attends to the tokens j with |i − j| < l, and to those with (i − j) mod l = 0.
    "fixed": token i attends to its own block of l tokens, and to the last c tokens of every other block.
    The paper's attention is causal; without `is_causal`, later tokens are included by the same rule.

    Args:
        pattern: "fixed", which the paper uses for text, or "strided", which it uses for images.
        stride: l. The default is the setting of the Long-Range Arena; the paper recommends about √N.
        summary: c, for the fixed pattern. The default is the setting of the Long-Range Arena.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> SparseAttention(pattern="strided", stride=2)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "sparse"

    def __init__(self, *, pattern: str = "fixed", stride: int = 50, summary: int = 10, **sizes: int | None) -> None:
        super().__init__(**sizes)
        check_positive(stride=stride, summary=summary)
        if pattern not in ("fixed", "strided"):
            raise ValueError(f"unknown pattern {pattern!r} of sparse attention; accepted: 'fixed', 'strided'.")
        if pattern == "fixed" and summary > stride:
            raise ValueError(
                f"a block of stride {stride} has no {summary} summary tokens; pass a summary up to {stride}."
            )
        self.pattern = pattern
        self.stride = stride
        self.summary = summary

    def attend_in_order(self, query, key, value, is_causal: bool, sources: Tensor, lengths: Tensor) -> Tensor:
        dtype = sum_dtype(query)
        tokens = query.to(dtype) * query.shape[-1] ** -0.5, key.to(dtype), value.to(dtype), sources
        stride = min(self.stride, query.shape[2])  # a sequence shorter than a block is one block, without far sources
        summary = min(self.summary, stride)
        q, k, v, s = (split(x, stride) for x in tokens)  # (B, H, T, l, …)
        blocks = torch.arange(q.shape[2], device=query.device)
        other = blocks < blocks[:, None] if is_causal else blocks != blocks[:, None]  # (T, T)
        if self.pattern == "strided":
            before, after = 1, 0 if is_causal else 1
            score, mix = STRIDED
            far_k, far_v = k, v
            far_seen = s.permute(0, 1, 4, 3, 2) & other[:, None]  # (B, 1, T, l, T)
        else:
            before = after = 0
            score, mix = FIXED
            far_k, far_v, summaries = (x[:, :, :, -summary:].flatten(2, 3) for x in (k, v, s))  # (B, H, T·c, …)
            far_seen = summaries[:, :, None].mT & other.repeat_interleave(summary, 1)[:, None]
        near_k, near_v, near_s = (neighbours(x, before, after) for x in (k, v, s))
        offset = offsets(stride, before, after, query.device)
        near_seen = near_s.mT & (offset.abs() < stride)
        if is_causal:
            near_seen = near_seen & (offset <= 0)

        logits = torch.cat([q @ near_k.mT, torch.einsum(score, q, far_k)], -1)
        rows = q.shape[0], 1, *q.shape[2:4], -1
        seen = torch.cat([near_seen.expand(rows), far_seen.expand(rows)], -1)
        near, far = masked_softmax(logits, seen).split([near_seen.shape[-1], far_seen.shape[-1]], -1)
        result = near @ near_v + torch.einsum(mix, far, far_v)
        return join(result, query.shape[2]).to(query.dtype)
