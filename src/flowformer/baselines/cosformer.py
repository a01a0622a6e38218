"""cosFormer: ReLU features with weights that decrease with the distance of tokens. Linear in time and memory.

Shapes: B batch, H heads, N queries, M keys, D features.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import causal_product
from .registry import Mechanism, register
from .tokens import check_length, positions, required_length, valid


@register
class CosformerAttention(Mechanism):
    """cosFormer (Qin et al., 2022): weights ReLU(q_i)·ReLU(k_j) cos(π/2 · (i − j)/L), normalised by their sum.

    Since cos(a − b) = cos a cos b + sin a sin b, this is linear attention with 2·D features. Positions i and j count
    only the tokens that take part.

    Args:
        max_length: L, for which the paper uses the longest sequence. It is fixed here, so that results for the first
            tokens of a causal sequence do not depend on its final length.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> CosformerAttention(max_length=8)(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "cosformer"
    linear = True
    eps = 1e-6  # lower bound of the normaliser, as published

    def __init__(self, *, max_length: int | None = None, **sizes: int | None) -> None:
        super().__init__(**sizes)
        self.max_length = required_length(self.name, max_length)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        check_length(self.name, self.max_length, query, key)
        # in causal attention, queries and keys are the same tokens: positions count the valid keys
        q = self._features(valid(query, query_mask), key_mask if is_causal else query_mask)
        k, v = self._features(key, key_mask), F.pad(valid(value, key_mask), (0, 1), value=1.0)
        product = causal_product(q, k, v) if is_causal else q @ (k.mT @ v)
        return (product[..., :-1] / product[..., -1:].clamp_min(self.eps)).to(query.dtype)

    def _features(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = valid(x, mask).relu()
        angle = positions(x, mask)[:, None, :, None].to(x.dtype) * (math.pi / 2 / self.max_length)
        return torch.cat([x * angle.cos(), x * angle.sin()], -1)
