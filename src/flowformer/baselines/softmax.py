"""Softmax attention: softmax(QKᵀ/√d) V. Quadratic in time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .registry import Mechanism, register


@register
class SoftmaxAttention(Mechanism):
    """`F.scaled_dot_product_attention` with the masks of this package.

    Args:
        weight_dropout: dropout probability of the attention weights, in training.

    >>> import torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> torch.equal(SoftmaxAttention()(x, x, x), F.scaled_dot_product_attention(x, x, x))
    True
    """

    name = "softmax"

    def __init__(self, *, weight_dropout: float = 0.0, **sizes: int | None) -> None:
        super().__init__(**sizes)
        if not 0 <= weight_dropout < 1:
            raise ValueError(f"weight_dropout must be at least 0 and below 1, got {weight_dropout!r}.")
        self.weight_dropout = weight_dropout

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        dropout = self.weight_dropout if self.training else 0.0
        if query_mask is not None:
            # a NaN in a masked query would make the gradients of the keys NaN
            query = query.masked_fill(~query_mask[:, None, :, None], 0)
        if key_mask is None:
            return F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal)
        seen = key_mask[:, None, None, :].expand(-1, 1, query.shape[2], -1)
        if is_causal:
            seen = seen.tril()
        # the softmax of an empty row is NaN: let it attend to all sources and set its result to 0
        empty = ~seen.any(-1, keepdim=True)
        key, value = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, seen | empty, dropout).masked_fill(empty, 0)
