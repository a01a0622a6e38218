"""Softmax attention: softmax(QKᵀ/√d) V. Quadratic in time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

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

    def attends_packed(self, query: Tensor, value: Tensor, lengths: list[int]) -> bool:
        # what flash attention reads; other kernels need a padded batch, and its mask of N × N entries
        width = query.shape[-1]
        fits = query.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
        return fits and value.shape[-1] == width and min(lengths, default=0) > 0 and _has_flash(query)

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, lengths: list[int], *, is_causal: bool
    ) -> Tensor:
        def nested(x: Tensor) -> Tensor:  # (B, H, N, D), with N that differs between sequences
            return nested_tensor_from_jagged(
                x.contiguous(), cu_seqlens, min_seqlen=min(lengths), max_seqlen=max(lengths)
            ).transpose(1, 2)

        dropout = self.weight_dropout if self.training else 0.0
        # without autocast, as in `attend`
        with torch.autocast(query.device.type, enabled=False):
            result = F.scaled_dot_product_attention(
                nested(query), nested(key), nested(value), dropout_p=dropout, is_causal=is_causal
            )
        packed: Tensor = result.transpose(1, 2).values()
        return packed


def _has_flash(x: Tensor) -> bool:
    """Whether the device of x has flash attention, and the user has not turned it off."""
    has = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return has and torch.backends.cuda.flash_sdp_enabled()
