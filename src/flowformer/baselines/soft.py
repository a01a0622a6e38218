"""SOFT: attention with a Gaussian kernel in place of softmax, through landmarks. Linear in time and memory.

Shapes: B batch, H heads, N tokens, D features, L landmarks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils import check_positive
from .convolution import convolution_weight, convolve
from .registry import Mechanism, register
from .tokens import segment_means, valid


@register
class SoftAttention(Mechanism):
    """SOFT (Lu et al., 2021): κ(Q, Q̃) κ(Q̃, Q̃)⁻¹ κ(Q̃, Q) V with κ(x, y) = exp(−‖x − y‖²/2√d), and nothing normalised.

    The kernel is symmetric only where keys are the queries, as the paper has them: the keys passed are not used.
    Landmarks Q̃ are the means of consecutive segments; the released code, made for images, has a strided convolution
    instead. Its other parts are options.

    Args:
        landmarks: L. A shorter sequence has a landmark for each token.
        steps: of Newton's iteration for the inverse.
        landmark_norm: whether landmarks go through LayerNorm and GELU, as in the released code.
        convolution: the odd width of a depth-wise convolution of the values along the sequence, added to the result, as
            in the released code; None is none.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> SoftAttention()(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "soft"
    linear = True
    causal = False
    cross = False
    reads = ("query",)
    ridge = 0.01  # added to the diagonal before the inverse, as in the released code

    def __init__(
        self,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        landmarks: int = 49,
        steps: int = 20,
        landmark_norm: bool = False,
        convolution: int | None = None,
        **sizes: int | None,
    ) -> None:
        super().__init__(**sizes)
        check_positive(landmarks=landmarks)
        self.landmarks = landmarks
        self.steps = steps
        self.landmark_norm = None
        if landmark_norm:
            if head_dim is None:
                raise ValueError("landmark_norm has a weight for each feature of a head; pass head_dim.")
            self.landmark_norm = nn.LayerNorm(head_dim)
        self.convolution = None if convolution is None else convolution_weight(num_heads, convolution)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        # a token is here as sink, as source, or as both
        either = None if query_mask is None or key_mask is None else query_mask | key_mask
        q, v = valid(query, either) * query.shape[-1] ** -0.25, valid(value, key_mask)
        landmarks, there = segment_means(q, key_mask, self.landmarks)
        if self.landmark_norm is not None:
            norm = self.landmark_norm
            weight, bias = norm.weight.to(q.dtype), norm.bias.to(q.dtype)
            landmarks = F.gelu(F.layer_norm(landmarks, norm.normalized_shape, weight, bias, norm.eps))
        there = there[:, None, None].to(q.dtype)
        kernel = gaussian(q, landmarks) * there  # (B, H, N, L)
        between = gaussian(landmarks, landmarks) * there * there.mT  # (B, H, L, L)
        result = kernel @ (self._inverse(between) @ (kernel.mT @ v))
        if self.convolution is not None:
            result = result + convolve(v, self.convolution, key_mask)
        return result.to(query.dtype)

    def _inverse(self, matrix: Tensor) -> Tensor:
        # a landmark has kernel 1 with itself, so only a matrix without landmarks has less
        bound = matrix.sum(-1).amax(-1).clamp_min(1)[..., None, None]
        matrix = matrix + self.ridge * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        inverse = 1.8 / bound.square() * matrix
        for _ in range(self.steps):
            inverse = 2 * inverse - inverse @ matrix @ inverse
        return inverse


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """exp(−‖x_i − y_j‖²/2), (…, N, L)."""
    distance = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :] - 2 * x @ y.mT
    return (-distance.clamp_min(0) / 2).exp()
