"""The Linear Transformer: φ(Q) (φ(K)ᵀV) / φ(Q) Σφ(K) with φ = elu + 1; causal with running sums.

Shapes: B batch, H heads, N queries, M keys, D features, E values, T chunks of C tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..ops.common import sum_dtype
from .registry import Mechanism, register

CHUNK = 64


@register
class LinearAttention(Mechanism):
    """Linear attention (Katharopoulos et al., 2020).

    >>> import torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> LinearAttention()(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "linear"
    linear = True
    eps = 1e-6  # added to the normaliser, as published

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        dtype = sum_dtype(query)
        if query_mask is not None:
            # a NaN in a masked query would make the gradients of the keys NaN
            query = query.masked_fill(~query_mask[:, None, :, None], 0)
        padding = None if key_mask is None else ~key_mask[:, None, :, None]
        if padding is not None:
            key, value = key.masked_fill(padding, 0), value.masked_fill(padding, 0)
        q, k, v = F.elu(query.to(dtype)) + 1, F.elu(key.to(dtype)) + 1, value.to(dtype)
        if padding is not None:
            k = k.masked_fill(padding, 0)
        v = F.pad(v, (0, 1), value=1.0)  # the column of ones gives the normaliser
        product = causal_product(q, k, v) if is_causal else q @ (k.mT @ v)
        return (product[..., :-1] / (product[..., -1:] + self.eps)).to(query.dtype)


def causal_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return Σ_{s≤t} (q_t·k_s) v_s, (B, H, N, E), for q, k (B, H, N, D) and v (B, H, N, E).

    Computed in chunks, to avoid tensors of N × N or N × D × E.
    """
    length = q.shape[2]
    chunk = min(CHUNK, max(length, 1))
    q, k, v = (F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (q, k, v))  # (B, H, T, C, …)
    memory = k.mT @ v
    before = F.pad(memory.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))
    result = (q @ k.mT).tril() @ v + q @ before
    return result.flatten(2, 3)[:, :, :length]
