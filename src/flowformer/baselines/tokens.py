"""Helpers of several rivals: masked tokens, their positions, and checks of lengths.

Shapes: B batch (positions and segments have batch size 1 without a mask), H heads, N tokens, D features, L segments.
Masks are (B, N) bool, True = takes part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.common import valid_values


def required_length(name: str, max_length: int | None) -> int:
    """Return `max_length`; raise if it is None or not positive."""
    if max_length is None or max_length < 1:
        raise ValueError(
            f"{name} attention depends on the position of a token and needs the longest sequence as a positive "
            f"max_length, got {max_length}."
        )
    return max_length


def check_length(name: str, max_length: int, *tokens: Tensor) -> None:
    """Raise if a tensor (B, H, N, D) has more than `max_length` tokens."""
    longest = max(x.shape[2] for x in tokens)
    if longest > max_length:
        raise ValueError(
            f"{name} attention was built for at most {max_length} tokens, got {longest}. Build it with a larger "
            "max_length."
        )


def valid(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, H, N, D) in the accumulation dtype (see `ops.common.sum_dtype`), 0 where masked."""
    return valid_values(x, None if mask is None else mask[:, None])


def positions(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the position of each token among the valid ones, counted from 0, (B, N)."""
    if mask is None:
        return torch.arange(x.shape[2], device=x.device)[None]
    return (mask.cumsum(-1) - 1).clamp_min(0)


def packed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Move the valid tokens of x (B, H, N, D) to the front, in their order, and masked tokens to the end."""
    if mask is None:
        return x
    return x.gather(2, _order(mask)[:, None, :, None].expand_as(x))


def unpacked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Undo `packed`."""
    if mask is None:
        return x
    return x.gather(2, _order(mask).argsort(-1)[:, None, :, None].expand_as(x))


def _order(mask: Tensor) -> Tensor:
    return (~mask).to(torch.uint8).argsort(dim=-1, stable=True)


def segment_means(x: Tensor, mask: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Return the means of consecutive segments of valid tokens, (B, H, L, D), and which are not empty, (B, L).

    There are L = `count` segments, or N if that is less. Segment sizes differ by at most one token. With fewer valid
    tokens than segments, some segments are empty.
    """
    count = min(count, x.shape[2])
    total = max(x.shape[2], 1) if mask is None else mask.sum(-1, keepdim=True).clamp_min(1)
    segment = positions(x, mask) * count // total
    member = segment[:, None] == torch.arange(count, device=x.device)[:, None]  # (B, L, N)
    if mask is not None:
        member = member & mask[:, None]
    size = member.sum(-1)
    weights = member.to(x.dtype) / size.clamp_min(1)[..., None]
    return weights[:, None] @ x, size > 0


def masked_softmax(logits: Tensor, seen: Tensor | None) -> Tensor:
    """Return the softmax over those entries of the last axis that are `seen`, 0 elsewhere; an empty row is 0."""
    if seen is None:
        return logits.softmax(-1)
    return logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(~seen, 0)
