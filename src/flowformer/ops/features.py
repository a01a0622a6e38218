"""The feature map φ and its derivative, for the memory-linear backend."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .variant import FlowVariant


def sum_dtype(x: Tensor) -> torch.dtype:
    """What sums, flows and states are kept in, whatever the input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def valid_values(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (..., N, D) in the dtype of the sums, with the padding emptied: even a NaN there takes part in nothing."""
    x = x.to(sum_dtype(x))
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def features(x: Tensor, mask: Tensor | None, scale: float, variant: FlowVariant) -> Tensor:
    """φ(scale·x), contiguous, 0 where masked."""
    x = valid_values(x, mask)
    if scale != 1:
        x = x * scale
    match variant.feature_map:
        case "sigmoid":
            x = x.sigmoid()
        case "elu+1":
            x = F.elu(x) + 1
        case "relu":
            x = x.relu()
    x = x.contiguous()
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def feature_gradient_(grad: Tensor, feature: Tensor, scale: float, variant: FlowVariant) -> Tensor:
    """Turns the gradient of φ(scale·x) into that of x, in place. Each derivative is a function of φ, and 0 where φ was
    masked to 0."""
    match variant.feature_map:
        case "sigmoid":
            torch.ops.aten.sigmoid_backward.grad_input(grad, feature, grad_input=grad)
        case "elu+1":
            grad.mul_(feature.clamp_max(1))
        case "relu":
            grad.masked_fill_(feature <= 0, 0)
    return grad if scale == 1 else grad.mul_(scale)
