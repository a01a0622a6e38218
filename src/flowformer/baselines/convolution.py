"""Depth-wise convolution of the values along the sequence, which some mechanisms add to their result.

Shapes: B batch, H heads, N tokens, E values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokens import packed, unpacked, valid


def convolution_weight(num_heads: int | None, width: int) -> nn.Parameter:
    """Return a parameter with one convolution kernel per head, (H, 1, width, 1)."""
    if num_heads is None:
        raise ValueError("a convolution has a kernel for each head; pass num_heads.")
    if width < 1 or width % 2 == 0:
        raise ValueError(f"convolution must be a positive odd width or None, got {width}.")
    weight = nn.Parameter(torch.empty(num_heads, 1, width, 1))
    nn.init.uniform_(weight, -(width**-0.5), width**-0.5)
    return weight


def convolve(value: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """Convolve values (B, H, N, E) along the sequence, skipping masked tokens.

    Args:
        value: 0 where masked.
        weight: see `convolution_weight`.
        mask: (B, N) bool, True = takes part.

    Returns:
        (B, H, N, E), 0 where masked.
    """
    weight = weight.to(value.dtype)
    convolved = F.conv2d(packed(value, mask), weight, padding=(weight.shape[2] // 2, 0), groups=value.shape[1])
    return valid(unpacked(convolved, mask), mask)
