"""Vectors as columns of a matrix: one product on tensor cores then gives several sums over tokens or features.

Products need at least sixteen columns, so four vectors fit, each as two columns: its value rounded to the precision of
the product, and the remainder.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..precision import operand


@triton.jit
def remainder(x, PRECISION: tl.constexpr):
    """x minus its value as an operand of a product."""
    return x - operand(x, PRECISION).to(tl.float32)


@triton.jit
def _repeat(a, b, c, d):
    """Four vectors (X,) as (X, 16): columns 2i and 2i + 1 are vector i, the last eight are 0."""
    pair = tl.arange(0, 16)[None, :] // 2
    low = tl.where(pair == 0, a[:, None], tl.where(pair == 1, b[:, None], 0.0))
    return tl.where(pair == 2, c[:, None], tl.where(pair == 3, d[:, None], low))


@triton.jit
def operand_columns(a, b, c, d, PRECISION: tl.constexpr):
    """Four vectors (X,) as an operand (X, 16): vector i in column 2i, its remainder in column 2i + 1."""
    whole = _repeat(a, b, c, d)
    rest = _repeat(remainder(a, PRECISION), remainder(b, PRECISION), remainder(c, PRECISION), remainder(d, PRECISION))
    return operand(tl.where((tl.arange(0, 16) % 2 == 0)[None, :], whole, rest), PRECISION)


@triton.jit
def accumulator_columns(a, b, c, d):
    """Four vectors (X,) as (X, 16), to which products with `operand_columns` are added."""
    return tl.where((tl.arange(0, 16) % 2 == 0)[None, :], _repeat(a, b, c, d), 0.0)


@triton.jit
def pick(b_x, WHICH: tl.constexpr):
    """One of the vectors of `operand_columns` or `accumulator_columns`, or of a product with them."""
    return tl.sum(tl.where((tl.arange(0, 16) // 2 == WHICH)[None, :], b_x, 0.0), 1)


@triton.jit
def merge_columns(b_x, b_y):
    """The first two vectors of x (X, 16) and the next two of y (X, 16) as (X, 8); four columns are used.

    The data stays in the threads that hold x and y, and all four need one store.
    """
    pair = tl.arange(0, 8)[None, :]
    return tl.where(pair < 2, tl.sum(b_x.reshape(b_x.shape[0], 8, 2), 2), tl.sum(b_y.reshape(b_y.shape[0], 8, 2), 2))


@triton.jit
def merged_operand(b_x, PRECISION: tl.constexpr):
    """The result of `merge_columns` in the form of `operand_columns` (X, 16)."""
    pair = tl.join(operand(b_x, PRECISION), operand(remainder(b_x, PRECISION), PRECISION))
    return pair.reshape(b_x.shape[0], 16)


@triton.jit
def stack4(a, b, c, d):
    """Four vectors (X,) as columns (X, 4), to be stored at once."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4)


@triton.jit
def stack8(a, b, c, d, e, f, g, h):
    """Eight vectors (X,) as columns (X, 8)."""
    return tl.join(stack4(a, c, e, g), stack4(b, d, f, h)).reshape(a.shape[0], 8)
