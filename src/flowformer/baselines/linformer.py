"""Linformer: softmax(Q (EᵀK)ᵀ/√d) EᵀV, with keys and values projected along the sequence. O(N·rank) time and memory.

Shapes: B batch, H heads, N queries, M keys, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._utils import check_positive
from .registry import Mechanism, register
from .tokens import check_length, packed, required_length, valid


@register
class LinformerAttention(Mechanism):
    """Linformer (Wang et al., 2020) with one projection E for all heads.

    The row of E for a token is its position among the tokens that take part, so that padding on either side does not
    change the result. There is no causal form, since the projection mixes all positions.

    Args:
        max_length: number of rows of E, the maximum number of keys.
        rank: number of columns of E; LRA's released code uses 16.
        shared: use the same E for keys and values, as in LRA.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> LinformerAttention(max_length=8)(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "linformer"
    linear = True
    causal = False

    def __init__(
        self, *, max_length: int | None = None, rank: int = 256, shared: bool = True, **sizes: int | None
    ) -> None:
        super().__init__(**sizes)
        check_positive(rank=rank)
        self.max_length = required_length(self.name, max_length)
        self.projection = nn.Parameter(torch.empty(1 if shared else 2, self.max_length, rank))
        for projection in self.projection:
            nn.init.xavier_uniform_(projection)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        check_length(self.name, self.max_length, key)
        q = valid(query, query_mask)
        projection = self.projection[:, : key.shape[2]].to(q.dtype)
        k = projection[0].mT @ packed(valid(key, key_mask), key_mask)  # (B, H, rank, D)
        v = projection[-1].mT @ packed(valid(value, key_mask), key_mask)
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).to(query.dtype)
