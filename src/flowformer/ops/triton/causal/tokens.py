"""Tokens of the causal kernels: which ones a program has, given padding and packed bounds, and how they are loaded.

Shapes as in `forward_flows.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..features import rounded_features
from ..precision import cast_for, operand


@triton.jit
def locate(p_bounds, heads, length, size):
    """The batch and head of this program, the first token of its sequence, and the first and last of its segment."""
    row, segment = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    start, stop = tl.zeros_like(batch), tl.zeros_like(batch) + length
    if p_bounds is not None:
        start = tl.minimum(tl.maximum(tl.load(p_bounds + batch).to(tl.int64), 0), length)
        stop = tl.minimum(tl.maximum(tl.load(p_bounds + batch + 1).to(tl.int64), start), length)
        batch = tl.zeros_like(batch)
    first = tl.minimum(start + segment * size, stop)
    return batch, head, start, first, tl.minimum(first + size, stop)


@triton.jit
def inside_of(tokens, base, last):
    """Which tokens of the chunk at `base` are in the segment."""
    # the rest of the segment may need 64 bits; limited to the chunk it fits 32
    return tokens < tl.minimum(last - base, tokens.shape[0]).to(tl.int32)


@triton.jit
def locate_chunk(p_positions, batch, length, base, tokens, start, last, count):
    """The rows of a chunk to load, which of its tokens are valid, and D, the number of valid tokens up to each.

    After the last token of the segment, its row is loaded again. A masked load would set its registers to zero
    first, which makes the second half of the loads wait for the first (check: time flows_kernel with mask=).
    """
    left = tl.minimum(last - base, tokens.shape[0]).to(tl.int32)
    inside, rows = tokens < left, tl.minimum(tokens, left - 1)
    if p_positions is not None:
        signed = tl.load(p_positions + batch * length + base + tokens, mask=inside, other=0).to(tl.float32)
        return rows, signed > 0, tl.maximum(count + tl.abs(signed), 1.0)
    return rows, inside, count + (base - start + 1 + tokens).to(tl.float32)


@triton.jit
def _rows_at(p_x, base, tokens, stride, columns):
    # the start of the chunk in 64 bits, offsets inside it in 32
    return p_x + base * stride + (tokens[:, None] * stride + columns[None, :])


@triton.jit
def load_rows(p_x, base, rows, stride, keep, p_positions, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of the rows, 0 where masked, since padding may hold NaN."""
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    p_rows = _rows_at(p_x, base, rows, stride, columns)
    if p_positions is not None:
        return tl.load(p_rows, mask=keep[:, None] & (columns < WIDTH)[None, :], other=0.0)
    if WIDTH % BLOCK:
        return tl.load(p_rows, mask=(columns < WIDTH)[None, :], other=0.0)
    return tl.load(p_rows)


@triton.jit
def store_rows(
    p_x, base, tokens, stride, keep, tile, b_x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
):
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = keep[:, None]
    if WIDTH % BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(_rows_at(p_x, base, tokens, stride, columns), cast_for(p_x, b_x, PRECISION), mask=mask)


@triton.jit
def load_features(
    p_x, base, rows, stride, keep, p_positions, tile, scale, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """φ and φ + ε as operands of a product, so that sums and products use the same rounded numbers.

    A masked token has φ(0); its weights are 0, which costs less than setting every feature to 0.
    """
    b_phi, b_phi_eps = rounded_features(
        load_rows(p_x, base, rows, stride, keep, p_positions, tile, WIDTH, BLOCK), scale, eps, MAP, FAST, PRECISION
    )
    if WIDTH % BLOCK:
        inner = (tile * BLOCK + tl.arange(0, BLOCK) < WIDTH)[None, :]
        b_phi = tl.where(inner, b_phi, 0.0).to(b_phi.dtype)
        b_phi_eps = tl.where(inner, b_phi_eps, 0.0).to(b_phi_eps.dtype)
    return b_phi, b_phi_eps


@triton.jit
def materialize(x):
    """x, by a no-op reduction.

    Without it Triton reloads x from global memory for every layout it is needed in (check: LDG count in the SASS).
    """
    return tl.max(tl.broadcast_to(x[:, None], x.shape[0], 2), 1)


@triton.jit
def triangle(C: tl.constexpr, UPPER: tl.constexpr):
    """All bits set where the column's token is not later than the row's token; if UPPER, not earlier."""
    tokens = tl.arange(0, C)
    seen = tokens[:, None] <= tokens[None, :] if UPPER else tokens[:, None] >= tokens[None, :]
    return tl.where(seen, -1, 0).to(tl.int16)


@triton.jit
def mask_triangle(b_x, b_triangle, FAST: tl.constexpr, PRECISION: tl.constexpr):
    """x as an operand of a product, 0 outside the triangle."""
    if FAST and PRECISION == "bf16":
        # two numbers at a time
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [b_x.to(tl.bfloat16), b_triangle], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return operand(tl.where(b_triangle != 0, b_x, 0.0), PRECISION)
