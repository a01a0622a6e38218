"""What the bidirectional kernels share: where a program works, how it reads blocks of tokens, how it multiplies them.

MULTIPLY says how matrices are multiplied: "bf16" on tensor cores; "bf16x3" likewise, but with all bits of a float16 and
more range than it has; "ieee" in float32, and "tf32" on tensor cores where torch may do so too; and "rounded", which is
what "bf16" computes, for Triton's interpreter, which has no arithmetic in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .features import feature


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def place(segments, heads, PACKED: tl.constexpr, REVERSE: tl.constexpr):
    """Which segment of which head of which sequence; its record; its row in the arrays of numbers per token."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    record = (program // segments).to(tl.int64)
    sequence, head = record // heads, record % heads
    row = head if PACKED else record
    return program % segments, sequence, head, record, row


@triton.jit
def span(bounds, sequence, tokens, segment, segments, BLOCK: tl.constexpr):
    """The first token of a segment and how many it has, within the tensor whatever the bounds are."""
    start = tl.zeros((), tl.int64)
    stop = start + tokens
    if bounds is not None:
        start = clamped(tl.load(bounds + sequence).to(tl.int64), 0, tokens)
        stop = clamped(tl.load(bounds + sequence + 1).to(tl.int64), start, tokens)
    size = tl.cdiv(tl.cdiv(stop - start, segments), BLOCK) * BLOCK
    first = tl.minimum(start + segment * size, stop)
    return first, (tl.minimum(first + size, stop) - first).to(tl.int32)


@triton.jit
def moved(x, sequence, head, first, batch_stride, head_stride, row_stride, bounds):
    """The pointer to the first token of a segment; packed sequences have no axis of their own."""
    if bounds is None:
        x += sequence * batch_stride
    return x + head * head_stride + first * row_stride


@triton.jit
def valid_tokens(mask, first, start, offset, count):
    """Which tokens of a block are there, `first` being the place of the segment's first token in the mask."""
    valid = offset < count - start
    if mask is not None:
        valid = tl.load(mask + first + start + offset, mask=valid, other=0) != 0
    return valid


@triton.jit
def rows(x, stride, start, offset, valid, columns, DIM: tl.constexpr):
    """(BLOCK, DIM), 0 for a token that is not valid, so that nothing of it remains."""
    kept = valid[:, None]
    if columns.shape[0] != DIM:
        kept = kept & (columns < DIM)[None, :]
    # the tile in 32 bits, where it starts in 64
    return tl.load(
        x + tl.cast(start, tl.int64) * stride + (offset[:, None] * stride + columns[None, :]), mask=kept, other=0
    )


@triton.jit
def identity(x, columns, EYE: tl.constexpr):
    """What `features` multiplies by."""
    if EYE:
        return (columns[:, None] == columns[None, :]).to(x.dtype.element_ty)
    else:
        return 0


@triton.jit
def features(
    x, stride, start, offset, valid, columns, eye, scale,
    DIM: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr,
):  # fmt: skip
    """φ of a block of tokens, (BLOCK, DIM)."""
    x = rows(x, stride, start, offset, valid, columns, DIM)
    if EYE:
        # exact, and it puts φ into the same registers as other products: otherwise it would be computed once for each
        x = tl.dot(x, eye)
    return feature(x, scale, MAP, FAST)


@triton.jit
def total(records, segments, size, columns, DIM: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of a vector over the records of a head, always in the same order."""
    result = tl.zeros((columns.shape[0],), tl.float32)
    for start in range(0, segments, AT_ONCE):
        segment = start + tl.arange(0, AT_ONCE)
        kept = (segment < segments)[:, None] & (columns < DIM)[None, :]
        result += tl.sum(tl.load(records + segment[:, None] * size + columns[None, :], mask=kept, other=0.0), 0)
    return result


@triton.jit
def raised(vector, columns, eps, DIM: tl.constexpr):
    """vector + ε in the columns that exist, 0 in the others."""
    return tl.where(columns < DIM, vector + eps, 0.0)


@triton.jit
def memory_tile(memory, d, e, D: tl.constexpr, E: tl.constexpr, MULTIPLY: tl.constexpr):
    """The part of S, or of its transpose, at the indices d and e, one of them a column and the other a row."""
    return parts(tl.load(memory + d * E + e, mask=(d < D) & (e < E), other=0.0), MULTIPLY)


@triton.jit
def nearest(x):
    """x rounded to bfloat16, still as float32: the interpreter's own conversion cuts the last bits off."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x, pointer, MULTIPLY: tl.constexpr):
    """x as what the pointer points to."""
    if pointer.dtype.element_ty == tl.bfloat16 and (MULTIPLY == "rounded" or MULTIPLY == "ieee"):
        x = nearest(x)
    return x.to(pointer.dtype.element_ty)


@triton.jit
def parts(x, MULTIPLY: tl.constexpr):
    """x as the sum of two factors of a matrix product: one bfloat16 alone would cost the gradients two bits."""
    x = x.to(tl.float32)
    high = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    if MULTIPLY == "bf16" or MULTIPLY == "bf16x3":
        return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)
    elif MULTIPLY == "rounded":
        return high, nearest(x - high)
    else:
        return x, x


@triton.jit
def factor(x, MULTIPLY: tl.constexpr):
    if MULTIPLY == "bf16":
        return x.to(tl.bfloat16)
    elif MULTIPLY == "rounded":
        return nearest(x.to(tl.float32))
    else:
        return x.to(tl.float32)


@triton.jit
def dot(a, b, addend, MULTIPLY: tl.constexpr):
    if MULTIPLY == "bf16" or MULTIPLY == "bf16x3":
        return tl.dot(a, b, addend)
    elif MULTIPLY == "rounded":
        return tl.dot(a, b, addend, input_precision="ieee")
    else:
        return tl.dot(a, b, addend, input_precision=MULTIPLY)


@triton.jit
def dot_transposed(a, b, addend, MULTIPLY: tl.constexpr):
    """aᵀ b + addend, for a computed and b as it was loaded."""
    high, low = parts(a, MULTIPLY)
    if MULTIPLY == "bf16x3":
        b, b_low = parts(b, MULTIPLY)
        addend = dot(tl.trans(high), b_low, addend, MULTIPLY)
    else:
        b = factor(b, MULTIPLY)
    if MULTIPLY == "bf16" or MULTIPLY == "bf16x3" or MULTIPLY == "rounded":
        addend = dot(tl.trans(low), b, addend, MULTIPLY)
    return dot(tl.trans(high), b, addend, MULTIPLY)


@triton.jit
def dot_parts(a, high, low, addend, MULTIPLY: tl.constexpr):
    """a b + addend, for b in two parts."""
    if MULTIPLY == "bf16x3":
        a, a_low = parts(a, MULTIPLY)
        addend = dot(a_low, high, addend, MULTIPLY)
    else:
        a = factor(a, MULTIPLY)
    if MULTIPLY == "bf16" or MULTIPLY == "bf16x3" or MULTIPLY == "rounded":
        addend = dot(a, low, addend, MULTIPLY)
    return dot(a, high, addend, MULTIPLY)
