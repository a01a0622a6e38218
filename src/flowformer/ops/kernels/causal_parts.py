"""What the causal kernels share: where a program's tokens lie, how they are loaded, and how their sums are kept.

Shapes are those of `causal_forward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .features import rounded_features, sigmoid

# in place of −∞, so that no difference of logarithms is NaN
NOTHING = tl.constexpr(-1e38)

# the planes of `flows`
INVERSE_INCOMING = tl.constexpr(0)
CONSERVED_OUTGOING = tl.constexpr(1)
LOG_OUTGOING = tl.constexpr(2)  # log Σ exp(Ô) from the start of the segment on
RECEIVED = tl.constexpr(3)  # α/(I·D)
FORWARD_PLANES = tl.constexpr(4)  # the others are for the backward pass
INVERSE_OUTGOING = tl.constexpr(4)
DECLINED = tl.constexpr(5)  # (1 − α)/D, what dÎ/D is of ⟨dR, R⟩
COMPETITION_WEIGHT = tl.constexpr(6)  # c
PLANES = tl.constexpr(7)

# the planes of `grads`; from GRAD_PLANES on the tiles of ⟨dR, R⟩, then those of dÔ/D without later segments: apart from
# the whole, since no kernel may write what threads of its own program read; then what `gradient` measures
GRAD_INCOMING = tl.constexpr(0)  # of I·D
GRAD_OUTGOING = tl.constexpr(1)  # of O·D
GRAD_CONSERVED_INCOMING = tl.constexpr(2)  # of Î·D
GRAD_CONSERVED_OUTGOING = tl.constexpr(3)  # of Ô·D
GRAD_PLANES = tl.constexpr(4)

# Lengths and strides are never part of what is compiled for; `launch.Strides` says what is known of strides.
_TENSORS = ("q", "k", "v", "g", "r", "dv", "a", "b", "u", "m")
_STRIDES = [f"{tensor}_{axis}" for tensor in _TENSORS for axis in ("batch", "head", "token")]
RUNTIME = ("heads", "shared", "length", "size", "segments", "plane", *_STRIDES)


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
def inside_of(tokens, base, last):
    # what is left of the segment fits 32 bits once the chunk bounds it
    return tokens < tl.minimum(last - base, tokens.shape[0]).to(tl.int32)


@triton.jit
def place(positions, batch, length, base, tokens, start, last, count):
    """Where the tokens of a chunk lie, which of them are valid, and D, how many there are up to each.

    Behind the last token lies the last once more: a mask would cost every load its registers set to zero before, and
    loads that wait for them.
    """
    left = tl.minimum(last - base, tokens.shape[0]).to(tl.int32)
    inside, rows = tokens < left, tl.minimum(tokens, left - 1)
    if positions is not None:
        signed = tl.load(positions + batch * length + base + tokens, mask=inside, other=0).to(tl.float32)
        return rows, signed > 0, tl.maximum(count + tl.abs(signed), 1.0)
    return rows, inside, count + (base - start + 1 + tokens).to(tl.float32)


@triton.jit
def at_rows(x, base, tokens, stride, columns):
    # where the chunk begins in 64 bits, what lies in it in 32
    return x + base * stride + (tokens[:, None] * stride + columns[None, :])


@triton.jit
def load_rows(x, base, rows, stride, keep, positions, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """What lies at `rows`; 0 where masked, since padding may hold anything."""
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    at = at_rows(x, base, rows, stride, columns)
    if positions is not None:
        return tl.load(at, mask=keep[:, None] & (columns < WIDTH)[None, :], other=0.0)
    if WIDTH % BLOCK:
        return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store_rows(x, base, tokens, stride, keep, tile, tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = keep[:, None]
    if WIDTH % BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(at_rows(x, base, tokens, stride, columns), tensor.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_features(
    x, base, rows, stride, keep, positions, tile, scale, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """φ and φ + ε, rounded to what the tensor cores take, so that sums and products see the same numbers.

    A masked token has φ(0): whoever uses it gives it the weight 0, which costs less than a zero in every feature.
    """
    phi, raised = rounded_features(
        load_rows(x, base, rows, stride, keep, positions, tile, WIDTH, BLOCK), scale, eps, MAP, FAST, DOT
    )
    if WIDTH % BLOCK:
        inner = (tile * BLOCK + tl.arange(0, BLOCK) < WIDTH)[None, :]
        phi, raised = tl.where(inner, phi, 0.0).to(DOT), tl.where(inner, raised, 0.0).to(DOT)
    return phi, raised


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
def settled(x):
    """x, loaded once: threads that need it in another order get it from one another instead of from memory, since the
    compiler does not repeat a reduction."""
    return tl.max(tl.broadcast_to(x[:, None], x.shape[0], 2), 1)


@triton.jit
def across(a, b, PRECISION: tl.constexpr, LONGEST: tl.constexpr = 128):
    """a bᵀ. A tensor core rounds every step toward zero: what sums of float32 lose grows with their length, and longer
    ones are put together from those of even and odd terms."""
    if a.dtype == tl.float32 and a.shape[1] > LONGEST:
        HALF: tl.constexpr = a.shape[1] // 2
        a_even, a_odd = tl.split(a.reshape(a.shape[0], HALF, 2))
        b_even, b_odd = tl.split(b.reshape(b.shape[0], HALF, 2))
        return across(a_even, b_even, PRECISION, 64) + across(a_odd, b_odd, PRECISION, 64)
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def project(a, b, PRECISION: tl.constexpr):
    """a b, a sum over features as long as those of `across`."""
    if a.dtype == tl.float32 and a.shape[1] > 128:
        return across(a, tl.trans(b), PRECISION)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def triangle(C: tl.constexpr, UPPER: tl.constexpr):
    """All bits set where the token of the column came no later than that of the row, or no earlier if UPPER."""
    tokens = tl.arange(0, C)
    seen = tokens[:, None] <= tokens[None, :] if UPPER else tokens[:, None] >= tokens[None, :]
    return tl.where(seen, -1, 0).to(tl.int16)


@triton.jit
def within(x, triangle, FAST: tl.constexpr, DOT: tl.constexpr):
    """x rounded to what the tensor cores take, 0 outside of the triangle."""
    if FAST and tl.bfloat16 == DOT:
        # two numbers at a time
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [x.to(DOT), triangle], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return tl.where(triangle != 0, x, 0.0).to(DOT)


@triton.jit
def pairs(a, b, c, d):
    """Four vectors (X,) as pairs of equal columns (X, 16)."""
    pair = tl.arange(0, 16)[None, :] // 2
    low = tl.where(pair == 0, a[:, None], tl.where(pair == 1, b[:, None], 0.0))
    return tl.where(pair == 2, c[:, None], tl.where(pair == 3, d[:, None], low))


@triton.jit
def halves(a, b, c, d, DOT: tl.constexpr):
    """Four vectors (X,) as columns (X, 16), each as what DOT holds of it and the rest: 0 and 1, 2 and 3, and so on.

    Sixteen columns are few for tensor cores, and one product then gives several sums.
    """
    whole = pairs(a, b, c, d)
    rest = pairs(remainder(a, DOT), remainder(b, DOT), remainder(c, DOT), remainder(d, DOT))
    return tl.where((tl.arange(0, 16) % 2 == 0)[None, :], whole, rest).to(DOT)


@triton.jit
def totals(x, y):
    """The first two of the vectors that `halves` put into x (X, 16), or into a product of it, and the next two of y,
    (X, 8): without leaving the threads that have them, and only one store for all."""
    pair = tl.arange(0, 8)[None, :]
    return tl.where(pair < 2, tl.sum(x.reshape(x.shape[0], 8, 2), 2), tl.sum(y.reshape(y.shape[0], 8, 2), 2))


@triton.jit
def folded(x, DOT: tl.constexpr):
    """`halves` of what `totals` returned."""
    return tl.join(x.to(DOT), remainder(x, DOT).to(DOT)).reshape(x.shape[0], 16)


@triton.jit
def four(a, b, c, d):
    """Four vectors (X,) side by side (X, 4), to be stored at once."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4)


@triton.jit
def eight(a, b, c, d, e, f, g, h):
    """Likewise eight, (X, 8)."""
    return tl.join(four(a, c, e, g), four(b, d, f, h)).reshape(a.shape[0], 8)


@triton.jit
def remainder(x, DOT: tl.constexpr):
    """What DOT does not hold of x."""
    return x - x.to(DOT).to(tl.float32)


@triton.jit
def truncated(x):
    """x without the bits that bfloat16 does not hold: cheaper than rounding, and the rest is as exact."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def beside(a, b, c, d):
    """Four vectors as what a sum of products with `halves` begins with, (X, 16)."""
    return tl.where((tl.arange(0, 16) % 2 == 0)[None, :], pairs(a, b, c, d), 0.0)


@triton.jit
def pick(x, which: tl.constexpr):
    """One of the vectors that `halves` put into x (X, 16), or into a product of it."""
    return tl.sum(tl.where((tl.arange(0, 16) // 2 == which)[None, :], x, 0.0), 1)


@triton.jit
def log_add(a, b):
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def fast_log_add(a, b):
    """log_add by the hardware's logarithm, which is exact to 2⁻²²."""
    x = 1.0 + tl.exp(-tl.abs(a - b))
    log = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.maximum(a, b) + 0.6931471805599453 * log


@triton.jit
def add_logs(a, b, FAST: tl.constexpr):
    if FAST:
        return fast_log_add(a, b)
    return log_add(a, b)


@triton.jit
def bounded(flow, clamp):
    return tl.minimum(tl.maximum(flow, -clamp), clamp)


@triton.jit
def running_log_sum(conserved_outgoing, keep, log_sum, clamp, FAST: tl.constexpr):
    """log Σ exp(Ô) from the start of the segment up to each token, and up to the last."""
    flow = tl.where(keep, bounded(conserved_outgoing, clamp), NOTHING)
    log = tl.associative_scan(flow, 0, fast_log_add) if FAST else tl.associative_scan(flow, 0, log_add)
    log = add_logs(log, log_sum, FAST)
    # it never falls, so the largest is the last
    return log, tl.max(log, 0)


@triton.jit
def make_competition(at, plane, keep, position, log_start, clamp, FAST: tl.constexpr, COMPETITION: tl.constexpr):
    """c, what a source gives with; 0 where masked."""
    competition = tl.zeros(keep.shape, tl.float32) + 1.0
    if COMPETITION != "none":
        flow = bounded(tl.load(at + CONSERVED_OUTGOING * plane, mask=keep, other=0.0), clamp)
        if COMPETITION == "softmax":
            log = tl.load(at + LOG_OUTGOING * plane, mask=keep, other=0.0)
            competition = position * tl.exp(flow - add_logs(log_start, log, FAST))
        else:
            competition = sigmoid(flow, False)
    return tl.where(keep, competition, 0.0)


@triton.jit
def load_tiles(at, plane, mask, TILES: tl.constexpr):
    """The sum of what the programs of several tiles left for a token."""
    total = tl.zeros(at.shape, tl.float32)
    for tile in range(TILES):
        total += tl.load(at + tile * plane, mask=mask, other=0.0)
    return total


@triton.jit
def load_weights(at, plane, keep):
    """α/(I·D), what a sink receives with, and c, as the forward pass has kept them; 0 where masked."""
    received = tl.load(at + RECEIVED * plane, mask=keep, other=0.0)
    return received, tl.load(at + COMPETITION_WEIGHT * plane, mask=keep, other=0.0)
