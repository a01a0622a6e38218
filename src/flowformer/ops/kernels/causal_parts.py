"""What the causal kernels share: where a program's tokens lie, how they are loaded, and how their sums are kept.

Shapes are those of `causal_forward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .features import feature, sigmoid

# in place of −∞, so that no difference of logarithms is NaN
NOTHING = tl.constexpr(-1e38)

# the planes of `flows`
INVERSE_INCOMING = tl.constexpr(0)
INVERSE_OUTGOING = tl.constexpr(1)
CONSERVED_INCOMING = tl.constexpr(2)
CONSERVED_OUTGOING = tl.constexpr(3)
LOG_OUTGOING = tl.constexpr(4)  # log Σ exp(Ô) from the start of the segment on
PLANES = 5

# lengths are never part of what is compiled for
RUNTIME = ("heads", "shared", "length", "size", "segments")


@triton.jit
def locate(bounds, heads, length, size):
    """The batch and head of this program, the first token of its sequence, and the tokens of its segment."""
    row, segment = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    start, stop = tl.zeros_like(batch), tl.zeros_like(batch) + length
    if bounds is not None:
        start = tl.minimum(tl.maximum(tl.load(bounds + batch).to(tl.int64), 0), length)
        stop = tl.minimum(tl.maximum(tl.load(bounds + batch + 1).to(tl.int64), start), length)
        batch = tl.zeros_like(batch)
    first = tl.minimum(start + segment * size, stop)
    return batch, head, start, first, tl.minimum(first + size, stop)


@triton.jit
def load_count(scalars):
    """How many tokens the state of this head has seen."""
    count = 0.0
    if scalars is not None:
        count = tl.load(scalars + tl.program_id(0).to(tl.int64) * 3)
    return count


@triton.jit
def load_log(scalars, index: tl.constexpr):
    """A logarithm of the state of this head, finite where nothing came yet."""
    log = NOTHING
    if scalars is not None:
        scalars += tl.program_id(0).to(tl.int64) * 3
        log = tl.where(tl.load(scalars) > 0, tl.load(scalars + index), NOTHING)
    return log


@triton.jit
def place(positions, batch, length, rows, start, last, count):
    """Which tokens are valid, and D, how many there are up to each."""
    inside = rows < last
    if positions is not None:
        signed = tl.load(positions + batch * length + rows, mask=inside, other=0).to(tl.float32)
        return signed > 0, tl.maximum(count + tl.abs(signed), 1.0)
    return inside, count + (rows - start + 1).to(tl.float32)


@triton.jit
def load_rows(x, rows, stride, keep, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = keep[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x, rows, stride, keep, tile, tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = keep[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * stride + columns[None, :], tensor.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_features(
    x, rows, stride, keep, tile, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """φ, 0 where masked, rounded to what the tensor cores take, so that sums and products see the same numbers."""
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    phi = feature(load_rows(x, rows, stride, keep, tile, WIDTH, BLOCK), scale, MAP, FAST)
    return tl.where(keep[:, None] & (columns < WIDTH)[None, :], phi, 0.0).to(DOT)


@triton.jit
def load_vector(x, index, columns, WIDTH: tl.constexpr):
    """Row `index` of (..., WIDTH), 0 if there is no x."""
    vector = tl.zeros(columns.shape, tl.float32)
    if x is not None:
        vector += tl.load(x + index * WIDTH + columns, mask=columns < WIDTH, other=0.0)
    return vector


@triton.jit
def store_vector(x, index, columns, vector, WIDTH: tl.constexpr):
    tl.store(x + index * WIDTH + columns, vector, mask=columns < WIDTH)


@triton.jit
def sum_segments(partial, first, stop, segments, columns, which: tl.constexpr, WIDTH: tl.constexpr):
    """Σ of the vectors `which` of the segments first … stop − 1 of this head, partial being (B·H, T, 2, WIDTH)."""
    total = tl.zeros(columns.shape, tl.float32)
    base = partial + (tl.program_id(0).to(tl.int64) * segments * 2 + which) * WIDTH
    for begin in range(first, stop, 16):
        each = begin + tl.arange(0, 16)
        mask = (each < stop)[:, None] & (columns < WIDTH)[None, :]
        total += tl.sum(tl.load(base + each[:, None] * (2 * WIDTH) + columns[None, :], mask=mask, other=0.0), 0)
    return total


@triton.jit
def pairs(first, second, DOT: tl.constexpr):
    """Two vectors as rows (16, C), each as what DOT holds of it and the rest: 0 and 1, 2 and 3.

    Sixteen rows are the least that tensor cores take, and one product then gives several sums over tokens.
    """
    row = tl.arange(0, 16)[:, None]
    rest = first - first.to(DOT).to(tl.float32), second - second.to(DOT).to(tl.float32)
    low = tl.where(row == 0, first[None, :], tl.where(row == 1, rest[0][None, :], 0.0))
    return tl.where(row == 2, second[None, :], tl.where(row == 3, rest[1][None, :], low)).to(DOT)


@triton.jit
def place_pair(first, second):
    """Two vectors (D,) as what a sum of `pairs` begins with, (16, D)."""
    row = tl.arange(0, 16)[:, None]
    return tl.where(row == 0, first[None, :], tl.where(row == 2, second[None, :], 0.0))


@triton.jit
def pick(x, which: tl.constexpr):
    """One of the two vectors that `pairs` put into x (16, C), or into a product of it."""
    return tl.sum(tl.where((tl.arange(0, 16) // 2 == which)[:, None], x, 0.0), 0)


@triton.jit
def exact_dot(x, y, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x y, where the float32 of x is kept by a second product with what DOT loses of it."""
    high = x.to(DOT)
    product = tl.dot(high, y, input_precision=PRECISION)
    if DOT != tl.float32:  # noqa: SIM300
        product = tl.dot((x - high.to(tl.float32)).to(DOT), y, product)
    return product


@triton.jit
def log_add(a, b):
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def bounded(flow, clamp):
    return tl.minimum(tl.maximum(flow, -clamp), clamp)


@triton.jit
def running_log_sum(conserved_outgoing, keep, log_sum, clamp):
    """log Σ exp(Ô) from the start of the segment up to each token, and up to the last."""
    flow = tl.where(keep, bounded(conserved_outgoing, clamp), NOTHING)
    log = log_add(tl.associative_scan(flow, 0, log_add), log_sum)
    # it never falls, so the largest is the last
    return log, tl.max(log, 0)


@triton.jit
def load_weights(
    flows, plane, at, keep, position, log_start, clamp, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr
):
    """α/(I·D), what a sink receives with, and c, what a source gives with; 0 where masked."""
    received = tl.load(flows + INVERSE_INCOMING * plane + at, mask=keep, other=0.0) / position
    if ALLOCATION:
        conserved = tl.load(flows + CONSERVED_INCOMING * plane + at, mask=keep, other=0.0)
        received = received * sigmoid(conserved, False)
    competition = tl.where(keep, 1.0, 0.0)
    if COMPETITION:
        flow = bounded(tl.load(flows + CONSERVED_OUTGOING * plane + at, mask=keep, other=0.0), clamp)
        log = log_add(log_start, tl.load(flows + LOG_OUTGOING * plane + at, mask=keep, other=0.0))
        competition = tl.where(keep, position * tl.exp(flow - log), 0.0)
    return received, competition
