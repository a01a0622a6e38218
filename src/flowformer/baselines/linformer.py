"""Linformer: softmax(Q (EᵀK)ᵀ/√d) EᵀV, with keys and values projected along the sequence. O(N·rank) time and memory.

Shapes: B batch, H heads, N queries, M keys, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .registry import Mechanism, register
from .tokens import check_length, packed, required_length, valid


@register
class LinformerAttention(Mechanism):
    """Linformer (Wang et al., 2020), its projection shared by all heads.

    A token is projected by the row of its position among those that take part, so padding on either side changes
    nothing. A projection mixes all positions: there is no causal form.

    Args:
        max_length: rows of E, the most keys that can be attended to.
        rank: columns of E; LRA's released code has 16.
        shared: whether keys and values share E, as in LRA.

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
