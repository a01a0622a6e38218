"""The feature map φ and its derivative, for use inside Triton kernels.

FAST selects the hardware's tanh, whose error of 2⁻¹¹ is below the rounding error of bfloat16 but not of float32; `fast`
decides where it may be used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .numerics import half_sigmoid, sigmoid
from .precision import operand


def fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels may use the approximate sigmoid: half precision, on NVIDIA hardware that has a tanh."""
    if dtype == torch.float32 or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 5)


@triton.jit
def feature(x, scale, MAP: tl.constexpr, FAST: tl.constexpr):
    """φ(scale·x), where MAP is the `feature_map` of a FlowVariant; a scale of None is 1."""
    x = x.to(tl.float32)
    if MAP == "sigmoid" and FAST and scale is not None:
        return half_sigmoid(x * (0.5 * scale))
    if scale is not None:
        x *= scale
    if MAP == "sigmoid":
        return sigmoid(x, FAST)
    elif MAP == "elu+1":
        return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        return tl.maximum(x, 0.0)


# PTX for two bfloat16 packed in a register: HALVE computes x/2 of each, the rest φ and φ + ε
_FAST_PAIR = """
{
    .reg .b32 half, one, minus_zero, low, high;
    .reg .f32 x, y;
    mov.b32 half, 0x3F003F00;
    mov.b32 one, 0x3F803F80;
    mov.b32 minus_zero, 0x80008000;
    HALVE
    tanh.approx.f32 x, x;
    tanh.approx.f32 y, y;
    fma.rn.f32 x, x, 0f3F000000, 0f3F000000;
    fma.rn.f32 y, y, 0f3F000000, 0f3F000000;
    cvt.rn.bf16x2.f32 $0, y, x;
    fma.rn.bf16x2 $1, $0, one, $3;
}
"""
_SPLIT = "shl.b32 low, {0}, 16; and.b32 high, {0}, 0xffff0000; mov.b32 x, low; mov.b32 y, high;"
_UNSCALED_PAIR = tl.constexpr(
    _FAST_PAIR.replace("HALVE", "fma.rn.bf16x2 half, $2, half, minus_zero;" + _SPLIT.format("half"))
)
_SCALED_PAIR = tl.constexpr(_FAST_PAIR.replace("HALVE", _SPLIT.format("$2") + "mul.f32 x, x, $4; mul.f32 y, y, $5;"))


@triton.jit
def rounded_features(x, scale, eps, MAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr):
    """φ(scale·x) and φ(scale·x) + ε, as operands of a product; a scale of None is 1."""
    if MAP == "sigmoid" and FAST and x.dtype == tl.bfloat16 and PRECISION == "bf16":
        # two numbers at a time, packed in a register: converting to float32 and back costs more than the sigmoid
        eps = tl.cast(eps, tl.bfloat16)
        if scale is None:
            return tl.inline_asm_elementwise(
                _UNSCALED_PAIR, "=r,=r,r,r", [x, eps], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                _SCALED_PAIR, "=r,=r,r,r,f,f", [x, eps, 0.5 * scale], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
    phi = feature(x, scale, MAP, FAST)
    return operand(phi, PRECISION), operand(phi + eps, PRECISION)


# φ(0), the value that features of small inputs are close to
CENTRES = {"sigmoid": 0.5, "elu+1": 1.0, "relu": 0.0}


@triton.jit
def centred_feature(x, scale, MAP: tl.constexpr):
    """φ(scale·x) − φ(0) without cancellation, for "sigmoid" and "elu+1"; a scale of None is 1."""
    x = x.to(tl.float32)
    if scale is not None:
        x *= scale
    if MAP == "sigmoid":
        # tanh(x/2)/2; by its series where exp(−x) is too close to 1
        e = tl.exp(-tl.abs(x))
        large = tl.where(x >= 0, 0.5, -0.5) * (1.0 - e) / (1.0 + e)
        return tl.where(tl.abs(x) < 0.03, x * (0.25 - x * x * (1.0 / 48.0)), large)
    else:
        small = x * (1.0 + x * (0.5 + x * (1.0 / 6.0)))
        return tl.where(x > 0, x, tl.where(x > -0.01, small, tl.exp(tl.minimum(x, 0.0)) - 1.0))


@triton.jit
def feature_gradient(grad, phi, MAP: tl.constexpr):
    """The gradient of scale·x from the gradient of φ(scale·x), as a function of φ; 0 where φ was masked to 0."""
    if MAP == "sigmoid":
        return grad * tl.fma(-phi, phi, phi)
    elif MAP == "elu+1":
        return grad * tl.minimum(phi, 1.0)
    else:
        return tl.where(phi > 0, grad, 0.0)
