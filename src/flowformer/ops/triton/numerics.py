"""Scalar functions inside kernels: sigmoid, clamp and log-sum-exp, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

# log 0: finite, so that no difference of logarithms is NaN
LOG_ZERO = tl.constexpr(-1e38)


@triton.jit
def half_sigmoid(x):
    """The sigmoid of 2x by the hardware's tanh: one special-function instruction instead of two and a division."""
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 * tanh + 0.5


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """FAST has an error of 2⁻¹¹, below the rounding error of bfloat16."""
    if FAST:
        return half_sigmoid(0.5 * x)
    # exp of a negative number only, so that nothing overflows
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def log_add(a, b):
    """log(exp(a) + exp(b))"""
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def fast_log_add(a, b):
    """`log_add` with the hardware's logarithm, whose error is 2⁻²²."""
    x = 1.0 + tl.exp(-tl.abs(a - b))
    log = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.maximum(a, b) + 0.6931471805599453 * log


@triton.jit
def add_logs(a, b, FAST: tl.constexpr):
    if FAST:
        return fast_log_add(a, b)
    return log_add(a, b)


@triton.jit
def decay(log, later):
    """exp(log − later), at most 1: over 10⁶ tokens a running logarithm may decrease by rounding."""
    return tl.exp(tl.minimum(log - later, 0.0))
