"""SOFT: attention with a Gaussian kernel instead of softmax, approximated with landmarks. Linear in time and memory.

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
    """SOFT (Lu et al., 2021): κ(Q, Q̃) κ(Q̃, Q̃)⁻¹ κ(Q̃, Q) V with κ(x, y) = exp(−‖x − y‖²/2√d), without normalisation.

    The keys passed are not used: as in the paper, keys are the queries, which makes the kernel matrix symmetric.
    Landmarks Q̃ are the means of consecutive segments, where the released code, written for images, uses a strided
    convolution. The other parts of the released code are available as options.

    Args:
        landmarks: L; a sequence of fewer tokens has one landmark per token.
        steps: number of Newton iterations for the inverse.
        landmark_norm: apply LayerNorm and GELU to the landmarks, as in the released code.
        convolution: odd width of a depth-wise convolution of the values along the sequence that is added to the result,
            as in the released code; None adds nothing.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> SoftAttention()(x, x, x).shape
    torch.Size([1, 2, 5, 4])
    """

    name = "soft"
    linear = True
    causal = False
    cross = False
    reads = ("query",)
    ridge = 0.01  # added to the diagonal before inversion, as in the released code

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
        check_positive(landmarks=landmarks, steps=steps)
        self.landmarks = landmarks
        self.steps = steps
        self.landmark_norm = None
        if landmark_norm:
            if head_dim is None:
                raise ValueError("landmark_norm has a weight for each feature of a head; pass head_dim.")
            self.landmark_norm = nn.LayerNorm(head_dim)
        self.convolution = None if convolution is None else convolution_weight(num_heads, convolution)

    def attend(self, query, key, value, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
        # a query is also the key of its token: it is used if the token is a sink or a source
        present = None if query_mask is None or key_mask is None else query_mask | key_mask
        q, v = valid(query, present) * query.shape[-1] ** -0.25, valid(value, key_mask)
        landmarks, is_landmark = segment_means(q, key_mask, self.landmarks)
        if self.landmark_norm is not None:
            norm = self.landmark_norm
            weight, bias = norm.weight.to(q.dtype), norm.bias.to(q.dtype)
            landmarks = F.gelu(F.layer_norm(landmarks, norm.normalized_shape, weight, bias, norm.eps))
        landmark_mask = is_landmark[:, None, None].to(q.dtype)
        kernel = gaussian(q, landmarks) * landmark_mask  # (B, H, N, L)
        between = gaussian(landmarks, landmarks) * landmark_mask * landmark_mask.mT  # (B, H, L, L)
        result = kernel @ (self._inverse(between) @ (kernel.mT @ v))
        if self.convolution is not None:
            result = result + convolve(v, self.convolution, key_mask)
        return result.to(query.dtype)

    def _inverse(self, matrix: Tensor) -> Tensor:
        # κ(x, x) = 1, so row sums are at least 1; clamp_min matters only for a matrix without landmarks, which is 0
        bound = matrix.sum(-1).amax(-1).clamp_min(1)[..., None, None]
        matrix = matrix + self.ridge * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        inverse = 1.8 / bound.square() * matrix
        for _ in range(self.steps):
            inverse = 2 * inverse - inverse @ matrix @ inverse
        return inverse


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """Return exp(−‖x_i − y_j‖²/2), (…, N, L), for x (…, N, D) and y (…, L, D)."""
    distance = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :] - 2 * x @ y.mT
    return (-distance.clamp_min(0) / 2).exp()
