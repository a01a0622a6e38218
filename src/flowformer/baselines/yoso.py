"""YOSO-E: attention weights are the collision probabilities of hashes. Quadratic in time, linear in memory.

Shapes: B batch, H heads, N queries, M keys, D features, C queries of a block.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._utils import check_positive
from .convolution import convolution_weight, convolve
from .registry import Mechanism, register
from .tokens import valid

BLOCK = 128  # queries per block


@register
class YosoAttention(Mechanism):
    """You Only Sample (Almost) Once (Zeng et al., 2021), in expectation: weights (1 − arccos(q̂·k̂)/π)^τ.

    The weight is the probability that τ hashes of the normalised query q̂ and key k̂ agree. The result is normalised to
    length 1.

    YOSO with sampled hashes is linear in time. The expectation is not: it computes the weights of all pairs, in blocks
    of queries that are recomputed in the backward pass.

    The derivative of arccos is infinite where q̂ = k̂. We therefore use the paper's lower bound τ/2·w for the gradient of
    a weight w with respect to its cosine.

    Args:
        hashes: τ, number of hashes.
        convolution: odd width of a depth-wise convolution of the values along the sequence that is added to the result,
            an option of the released code; None adds nothing. It includes later tokens and needs as many queries as
            keys, so it excludes causal attention and cross-attention.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> YosoAttention()(x, x, x).norm(dim=-1).allclose(torch.ones(1, 2, 5))
    True
    """

    name = "yoso"

    def __init__(
        self, *, num_heads: int | None = None, hashes: int = 9, convolution: int | None = None, **sizes: int | None
    ) -> None:
        super().__init__(**sizes)
        check_positive(hashes=hashes)
        self.hashes = hashes
        self.convolution = None
        if convolution is not None:
            self.convolution = convolution_weight(num_heads, convolution)
            self.causal = self.cross = False

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        result = F.normalize(self.weighted(query, key, value, is_causal, query_mask, key_mask), dim=-1)
        if self.convolution is not None:
            result = result + convolve(valid(value, key_mask), self.convolution, key_mask)
        return result.to(query.dtype)

    def weighted(
        self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Tensor:
        q, k = F.normalize(valid(query, query_mask), dim=-1), F.normalize(valid(key, key_mask), dim=-1)
        v = valid(value, key_mask)  # masked sources have value 0, so the weights need no mask
        blocks = [
            checkpoint(
                self._block,
                block,
                k[:, :, : start + BLOCK] if is_causal else k,
                v[:, :, : start + BLOCK] if is_causal else v,
                start if is_causal else None,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start, block in zip(range(0, max(q.shape[2], 1), BLOCK), q.split(BLOCK, 2), strict=True)
        ]
        return torch.cat(blocks, 2)

    def _block(self, q: Tensor, k: Tensor, v: Tensor, start: int | None) -> Tensor:
        cosine = q @ k.mT  # (B, H, C, M)
        with torch.no_grad():
            collision = (1 - cosine.clamp(-1, 1).arccos() / math.pi) ** self.hashes
            if start is not None:
                collision = collision.tril(start)
        return (collision * (1 + self.hashes / 2 * (cosine - cosine.detach()))) @ v
