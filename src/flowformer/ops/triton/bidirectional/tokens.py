"""Tokens of the bidirectional kernels: which ones a program has, with padding and packed bounds, and their loads.

Shapes: BLOCK tokens of a tile, D features, E values. A segment is a run of tokens of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..features import feature
from ..numerics import clamped
from ..precision import cast_for, split


@triton.jit
def locate_head(segments, heads, PACKED: tl.constexpr, REVERSE: tl.constexpr):
    """The segment, sequence and head of this program; the index of the head's record; its row in arrays (rows, tokens).

    Programs are numbered by head, then by segment; in REVERSE to start with data that the previous kernel left in
    the L2 cache.
    """
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    record = (program // segments).to(tl.int64)
    sequence, head = record // heads, record % heads
    row = head if PACKED else record
    return program % segments, sequence, head, record, row


@triton.jit
def locate_tokens(p_bounds, sequence, tokens, segment, segments, BLOCK: tl.constexpr):
    """The first token of a segment and its number of tokens, limited to the tensor whatever the bounds say."""
    start = tl.zeros((), tl.int64)
    stop = start + tokens
    if p_bounds is not None:
        start = clamped(tl.load(p_bounds + sequence).to(tl.int64), 0, tokens)
        stop = clamped(tl.load(p_bounds + sequence + 1).to(tl.int64), start, tokens)
    size = tl.cdiv(tl.cdiv(stop - start, segments), BLOCK) * BLOCK
    first = tl.minimum(start + segment * size, stop)
    return first, (tl.minimum(first + size, stop) - first).to(tl.int32)


@triton.jit
def token_at(p_x, sequence, head, first, batch_stride, head_stride, token_stride, p_bounds):
    """A pointer to the first token of a segment; packed sequences have no batch axis."""
    if p_bounds is None:
        p_x += sequence * batch_stride
    return p_x + head * head_stride + first * token_stride


@triton.jit
def load_valid(p_mask, first, start, offset, count):
    """Which tokens of a block are valid; `first` is the index of the segment's first token in the mask."""
    valid = offset < count - start
    if p_mask is not None:
        valid = tl.load(p_mask + first + start + offset, mask=valid, other=0) != 0
    return valid


@triton.jit
def load_rows(p_x, stride, start, offset, valid, columns, WIDTH: tl.constexpr):
    """(BLOCK, columns), 0 for invalid tokens, since padding may hold NaN."""
    keep = valid[:, None]
    if columns.shape[0] != WIDTH:
        keep = keep & (columns < WIDTH)[None, :]
    # the start of the tile in 64 bits, offsets inside it in 32
    return tl.load(
        p_x + tl.cast(start, tl.int64) * stride + (offset[:, None] * stride + columns[None, :]), mask=keep, other=0
    )


@triton.jit
def store_rows(p_x, stride, start, offset, inside, columns, b_x, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    tl.store(
        p_x + tl.cast(start, tl.int64) * stride + (offset[:, None] * stride + columns[None, :]),
        cast_for(p_x, b_x, PRECISION),
        mask=inside[:, None] & (columns < WIDTH)[None, :],
    )


@triton.jit
def identity(p_x, columns, EYE: tl.constexpr):
    """The identity matrix that `load_features` multiplies by; None without EYE."""
    if EYE:
        return (columns[:, None] == columns[None, :]).to(p_x.dtype.element_ty)
    else:
        return 0


@triton.jit
def load_features(
    p_x, stride, start, offset, valid, columns, b_eye, scale,
    WIDTH: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr,
):  # fmt: skip
    """φ of a block of tokens, (BLOCK, D)."""
    b_x = load_rows(p_x, stride, start, offset, valid, columns, WIDTH)
    if EYE:
        # exact, and leaves φ in the layout of the other products. Without it φ is computed once for each layout it is
        # needed in (check: MUFU count in the SASS)
        b_x = tl.dot(b_x, b_eye)
    return feature(b_x, scale, MAP, FAST)


@triton.jit
def add_eps(vector, columns, eps, WIDTH: tl.constexpr):
    """vector + ε in the columns that exist, 0 in the others."""
    return tl.where(columns < WIDTH, vector + eps, 0.0)


@triton.jit
def load_memory(p_memory, d, e, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of S or its transpose, split for a product; of the indices d and e, one is a column and one a row."""
    return split(tl.load(p_memory + d * E + e, mask=(d < D) & (e < E), other=0.0), PRECISION)
