"""The feature map φ and its derivative."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common import Mask, Options, valid_values


def features(x: Tensor, mask: Mask, options: Options, out: Tensor | None = None) -> Tensor:
    """φ(scale·x), contiguous, 0 where masked; written to `out` if given."""
    x = valid_values(x, mask)
    if options.scale != 1:
        x = x * options.scale
    match options.variant.feature_map:
        case "sigmoid":
            x = torch.sigmoid(x, out=out)
        case "elu+1":
            x = torch.add(F.elu(x), 1, out=out)
        case "relu":
            x = torch.clamp_min(x, 0, out=out)
        case "relu+eps":
            x = torch.clamp_min(x, 0, out=out).add_(options.variant.eps)
    x = x.contiguous()
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def feature_gradient(grad: Tensor, feature: Tensor, options: Options, out: Tensor | None = None) -> Tensor:
    """The gradient of x from the gradient of φ(scale·x), written to `out` if given.

    Each derivative is a function of φ, and 0 where φ was masked to 0.
    """
    match options.variant.feature_map:
        case "sigmoid" if out is None:
            grad = torch.ops.aten.sigmoid_backward(grad, feature)
        case "sigmoid":
            grad = torch.ops.aten.sigmoid_backward.grad_input(grad, feature, grad_input=out)
        case "elu+1":
            grad = torch.mul(grad, feature.clamp_max(1), out=out)
        case "relu":
            grad = torch.mul(grad, feature > 0, out=out)
        case "relu+eps":
            grad = torch.mul(grad, feature > options.variant.eps, out=out)
    return grad if options.scale == 1 else grad.mul_(options.scale)
