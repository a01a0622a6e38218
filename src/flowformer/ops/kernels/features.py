"""The feature map φ and its derivative, for use inside Triton kernels.

Everything here takes and returns float32. FAST selects the hardware's tanh, whose error of 2⁻¹¹ lies below the rounding
of bfloat16 but not of float32; `fast` says where it may be used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels may use the approximate sigmoid: half precision, on NVIDIA hardware that has a tanh."""
    if dtype == torch.float32 or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 5)


def float32_precision() -> str:
    """How float32 is multiplied: on tensor cores where torch may round its factors too, else with all bits."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def _half_sigmoid(x):
    """The sigmoid of 2x: one special-function instruction instead of two and a division."""
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 * tanh + 0.5


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return _half_sigmoid(0.5 * x)
    # exp of a negative number only, so that nothing overflows
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def feature(x, scale, MAP: tl.constexpr, FAST: tl.constexpr):
    """φ(scale·x), MAP being the `feature_map` of a FlowVariant; without a scale it is 1."""
    x = x.to(tl.float32)
    if MAP == "sigmoid" and FAST and scale is not None:
        return _half_sigmoid(x * (0.5 * scale))
    if scale is not None:
        x *= scale
    if MAP == "sigmoid":
        return sigmoid(x, FAST)
    elif MAP == "elu+1":
        return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    else:
        return tl.maximum(x, 0.0)


# Two bfloat16 in a register, from register to register: the conversions would cost more than the sigmoid. HALVE puts
# x/2 into two float32, and LAST makes the outputs of their tanh.
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
    LAST
}
"""
_SPLIT = "shl.b32 low, {0}, 16; and.b32 high, {0}, 0xffff0000; mov.b32 x, low; mov.b32 y, high;"
_RAISE = """
    fma.rn.f32 x, x, 0f3F000000, 0f3F000000;
    fma.rn.f32 y, y, 0f3F000000, 0f3F000000;
    cvt.rn.bf16x2.f32 $0, y, x;
    fma.rn.bf16x2 $1, $0, one, $3;
"""
_HALVE_TANH = """
    mul.f32 x, x, 0f3F000000;
    mul.f32 y, y, 0f3F000000;
    cvt.rn.bf16x2.f32 $0, y, x;
"""


def _pair(last: str, x: str, scales: tuple[str, str] | None) -> tl.constexpr:
    if scales is None:
        halve = f"fma.rn.bf16x2 half, {x}, half, minus_zero;" + _SPLIT.format("half")
    else:
        halve = _SPLIT.format(x) + f"mul.f32 x, x, {scales[0]}; mul.f32 y, y, {scales[1]};"
    return tl.constexpr(_FAST_PAIR.replace("HALVE", halve).replace("LAST", last))


_UNSCALED_PAIR, _SCALED_PAIR = _pair(_RAISE, "$2", None), _pair(_RAISE, "$2", ("$4", "$5"))
_UNSCALED_CENTRED, _SCALED_CENTRED = _pair(_HALVE_TANH, "$1", None), _pair(_HALVE_TANH, "$1", ("$2", "$3"))


@triton.jit
def rounded_features(x, scale, eps, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr):
    """φ(scale·x) and φ(scale·x) + ε, rounded to what the tensor cores take; without a scale it is 1."""
    if MAP == "sigmoid" and FAST and x.dtype == tl.bfloat16 and tl.bfloat16 == DOT:
        eps = tl.cast(eps, tl.bfloat16)
        outputs: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        if scale is None:
            return tl.inline_asm_elementwise(_UNSCALED_PAIR, "=r,=r,r,r", [x, eps], outputs, is_pure=True, pack=2)
        else:
            factors = [x, eps, 0.5 * scale]
            return tl.inline_asm_elementwise(_SCALED_PAIR, "=r,=r,r,r,f,f", factors, outputs, is_pure=True, pack=2)
    phi = feature(x, scale, MAP, FAST)
    return phi.to(DOT), (phi + eps).to(DOT)


# φ(0): what features of small inputs have in common
CENTRES = {"sigmoid": 0.5, "elu+1": 1.0, "relu": 0.0}


@triton.jit
def centred_features(x, scale, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, CENTRE: tl.constexpr):
    """φ(scale·x) − φ(0), rounded to what the tensor cores take: 0 where x is 0."""
    if MAP == "sigmoid" and FAST and x.dtype == tl.bfloat16 and tl.bfloat16 == DOT:
        if scale is None:
            return tl.inline_asm_elementwise(_UNSCALED_CENTRED, "=r,r", [x], tl.bfloat16, is_pure=True, pack=2)
        else:
            factors = [x, 0.5 * scale]
            return tl.inline_asm_elementwise(_SCALED_CENTRED, "=r,r,f,f", factors, tl.bfloat16, is_pure=True, pack=2)
    return (feature(x, scale, MAP, FAST) - CENTRE).to(DOT)


@triton.jit
def feature_gradient(grad, phi, MAP: tl.constexpr):
    """The gradient of scale·x from that of φ(scale·x), as a function of φ; 0 where φ was masked to 0."""
    if MAP == "sigmoid":
        return grad * tl.fma(-phi, phi, phi)
    elif MAP == "elu+1":
        return grad * tl.minimum(phi, 1.0)
    else:
        return tl.where(phi > 0, grad, 0.0)
