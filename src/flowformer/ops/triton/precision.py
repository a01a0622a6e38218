"""How kernels multiply matrices.

PRECISION is one of
    bf16     bfloat16 on tensor cores
    bf16x3   three bfloat16 products: all bits of a float16, and more range
    tf32     tf32 on tensor cores, if torch may use it too
    tf32x3   three tf32 products, nearly as accurate as float32
    ieee     float32
    rounded  emulates bf16 in Triton's interpreter, which has no bfloat16 arithmetic
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def float32_precision() -> str:
    """How float32 is multiplied: as tf32 if torch may do so too, else in full precision."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 and torch.version.hip is None else "ieee"


@triton.jit
def truncate(x):
    """x truncated to bfloat16: cheaper than rounding, and the remainder is still exact."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bfloat16(x):
    """x rounded to bfloat16, as float32: the interpreter's own conversion truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def round_to_tf32(x):
    """x rounded to tf32, as float32: tensor cores truncate, which makes sums of positive features too small."""
    bits = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def cast_for(p, x, PRECISION: tl.constexpr):
    """x in the dtype that p points to."""
    if p.dtype.element_ty == tl.bfloat16 and (PRECISION == "rounded" or PRECISION == "ieee"):
        x = round_to_bfloat16(x)
    return x.to(p.dtype.element_ty)


@triton.jit
def split(x, PRECISION: tl.constexpr):
    """x as the sum of two operands of a product: a single bfloat16 would cost the gradients two bits.

    With float32 products the second operand is not used.
    """
    x = x.to(tl.float32)
    high = truncate(x)
    if PRECISION == "bf16" or PRECISION == "bf16x3":
        return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)
    elif PRECISION == "rounded":
        return high, round_to_bfloat16(x - high)
    elif PRECISION == "tf32":
        x = round_to_tf32(x)
        return x, x
    else:
        return x, x


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x as one operand of a product."""
    if PRECISION == "bf16":
        return x.to(tl.bfloat16)
    elif PRECISION == "rounded":
        return round_to_bfloat16(x.to(tl.float32))
    elif PRECISION == "tf32":
        return round_to_tf32(x.to(tl.float32))
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, addend, PRECISION: tl.constexpr):
    """a b + addend, for operands; an addend of None is 0."""
    if PRECISION == "bf16" or PRECISION == "bf16x3":
        return tl.dot(a, b, addend)
    elif PRECISION == "rounded":
        return tl.dot(a, b, addend, input_precision="ieee")
    else:
        return tl.dot(a, b, addend, input_precision=PRECISION)


@triton.jit
def dot_tn(a, b, addend, PRECISION: tl.constexpr):
    """aᵀ b + addend; a is float32 and is split, b is in the dtype of the inputs."""
    high, low = split(a, PRECISION)
    if PRECISION == "bf16x3":
        b, b_low = split(b, PRECISION)
        addend = dot(tl.trans(high), b_low, addend, PRECISION)
    else:
        b = operand(b, PRECISION)
    if PRECISION == "bf16" or PRECISION == "bf16x3" or PRECISION == "rounded":
        addend = dot(tl.trans(low), b, addend, PRECISION)
    return dot(tl.trans(high), b, addend, PRECISION)


@triton.jit
def dot_nt(a, b, PRECISION: tl.constexpr, LONGEST: tl.constexpr = 128):
    """a bᵀ, for operands.

    tf32 accumulation truncates, so the error of a float32 product grows with its number of terms: for more than
    LONGEST, partial products of even and odd terms are added.
    """
    if a.dtype == tl.float32 and a.shape[1] > LONGEST:
        HALF: tl.constexpr = a.shape[1] // 2
        a_even, a_odd = tl.split(a.reshape(a.shape[0], HALF, 2))
        b_even, b_odd = tl.split(b.reshape(b.shape[0], HALF, 2))
        return dot_nt(a_even, b_even, PRECISION, 64) + dot_nt(a_odd, b_odd, PRECISION, 64)
    else:
        return dot(a, tl.trans(b), None, PRECISION)


@triton.jit
def dot_nn(a, b, PRECISION: tl.constexpr):
    """a b, for operands; as accurate as `dot_nt`."""
    if a.dtype == tl.float32 and a.shape[1] > 128:
        return dot_nt(a, tl.trans(b), PRECISION)
    else:
        return dot(a, b, None, PRECISION)


@triton.jit
def dot_split(a, high, low, addend, PRECISION: tl.constexpr):
    """a b + addend, for b that was split."""
    if PRECISION == "bf16x3":
        a, a_low = split(a, PRECISION)
        addend = dot(a_low, high, addend, PRECISION)
    else:
        a = operand(a, PRECISION)
    if PRECISION == "bf16" or PRECISION == "bf16x3" or PRECISION == "rounded":
        addend = dot(a, low, addend, PRECISION)
    return dot(a, high, addend, PRECISION)
