"""Nyströmformer: softmax attention approximated with landmarks. Linear in time and memory.

Shapes: B batch, H heads, N queries, M keys, D features, L landmarks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._utils import check_positive
from .convolution import convolution_weight, convolve
from .registry import Mechanism, register
from .tokens import masked_softmax, segment_means, valid


@register
class NystromformerAttention(Mechanism):
    """Nyströmformer (Xiong et al., 2021): softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V, all logits divided by √d.

    Landmarks Q̃ and K̃ are the means of consecutive segments of the valid tokens. The pseudo-inverse is approximated by
    a few Newton–Schulz steps. With as many landmarks as tokens and enough steps, this is softmax attention.

    Args:
        landmarks: L; a sequence of fewer tokens has one landmark per token.
        steps: number of iterations for the pseudo-inverse.
        convolution: odd width of a depth-wise convolution of the values along the sequence that is added to the result;
            None adds nothing.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> NystromformerAttention(num_heads=2)(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "nystromformer"
    linear = True
    causal = False
    cross = False

    def __init__(
        self, *, num_heads: int, landmarks: int = 64, steps: int = 6, convolution: int | None = 35, **sizes: int | None
    ) -> None:
        super().__init__(**sizes)
        check_positive(landmarks=landmarks, steps=steps)
        self.landmarks = landmarks
        self.steps = steps
        self.convolution = None if convolution is None else convolution_weight(num_heads, convolution)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        q, k, v = valid(query, query_mask) * query.shape[-1] ** -0.5, valid(key, key_mask), valid(value, key_mask)
        q_landmarks, sinks = segment_means(q, query_mask, self.landmarks)
        k_landmarks, sources = segment_means(k, key_mask, self.landmarks)
        sources = sources[:, None, None]
        from_landmarks = masked_softmax(q @ k_landmarks.mT, sources)  # (B, H, N, L)
        between = masked_softmax(q_landmarks @ k_landmarks.mT, sources & sinks[:, None, :, None])  # (B, H, L, L)
        to_landmarks = masked_softmax(q_landmarks @ k.mT, None if key_mask is None else key_mask[:, None, None])
        result = from_landmarks @ (pseudo_inverse(between, self.steps) @ (to_landmarks @ v))
        if self.convolution is not None:
            result = result + convolve(v, self.convolution, key_mask)
        return result.to(query.dtype)


def pseudo_inverse(matrix: Tensor, steps: int) -> Tensor:
    """Approximate the pseudo-inverse of (…, L, L) by a third-order Newton–Schulz iteration.

    Rows and columns of zeros, which empty landmarks have, remain zero.
    """
    absolute = matrix.abs()
    # ‖A‖∞ ‖A‖₁ of each matrix, not of the batch: a result must not depend on the other sequences
    bound = absolute.sum(-1).amax(-1) * absolute.sum(-2).amax(-1)
    inverse = matrix.mT / bound.clamp_min(torch.finfo(matrix.dtype).tiny)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(steps):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse
