"""Helpers of the causal kernels: which tokens a program works on, how it loads them, competition and allocation.

Shapes as in `forward_flows.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..features import rounded_features
from ..numerics import LOG_ZERO, add_logs, decay, fast_log_add, log_add, sigmoid
from ..powers import competing_flow, raised_allocation
from ..precision import cast_for, dot_nn, operand
from .columns import operand_columns, pick
from .planes import (
    COMPETITION_WEIGHT,
    CONSERVED_OUTGOING,
    COUNT,
    INVERSE_COMPETING,
    LOG_OUTGOING,
    RECEIVED,
    RENORMALIZED_RECEIVED,
    STATE_LOG_INCOMING,
    STATE_LOG_OUTGOING,
)


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
def load_count(p_scalars):
    """How many tokens the state of this head has seen."""
    count = 0.0
    if p_scalars is not None:
        count = tl.load(p_scalars + tl.program_id(0).to(tl.int64) * 3 + COUNT)
    return count


@triton.jit
def load_log(p_scalars, WHICH: tl.constexpr):
    """A logarithm of the state of this head, finite before the first token."""
    log = LOG_ZERO
    if p_scalars is not None:
        p_scalars += tl.program_id(0).to(tl.int64) * 3
        log = tl.where(tl.load(p_scalars + COUNT) > 0, tl.load(p_scalars + WHICH), LOG_ZERO)
    return log


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
def load_vector(p_x, index, columns, WIDTH: tl.constexpr):
    """Row `index` of x (..., WIDTH); 0 if x is None."""
    vector = tl.zeros(columns.shape, tl.float32)
    if p_x is not None:
        vector += tl.load(p_x + index * WIDTH + columns, mask=columns < WIDTH, other=0.0)
    return vector


@triton.jit
def store_vector(p_x, index, columns, vector, WIDTH: tl.constexpr):
    tl.store(p_x + index * WIDTH + columns, vector, mask=columns < WIDTH)


@triton.jit
def sum_segments(
    p_partial, first, stop, segments, columns, WHICH: tl.constexpr, WIDTH: tl.constexpr, VECTORS: tl.constexpr = 2
):
    """Σ of the vectors WHICH of the segments first … stop − 1 of this head; partial is (B·H, T, VECTORS, WIDTH)."""
    total = tl.zeros(columns.shape, tl.float32)
    p_first = p_partial + (tl.program_id(0).to(tl.int64) * segments * VECTORS + WHICH) * WIDTH
    for begin in range(first, stop, 16):
        each = begin + tl.arange(0, 16)
        mask = (each < stop)[:, None] & (columns < WIDTH)[None, :]
        total += tl.sum(
            tl.load(p_first + each[:, None] * (VECTORS * WIDTH) + columns[None, :], mask=mask, other=0.0), 0
        )
    return total


@triton.jit
def load_memory(
    p_memory, tile, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, feature_tile=0
):
    """One tile of a memory (D, E)."""
    features = (feature_tile * BLOCK_D + tl.arange(0, BLOCK_D))[:, None]
    values = (tile * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    return tl.load(p_memory + features * E + values, mask=(features < D) & (values < E), other=0.0)


@triton.jit
def store_memory(
    p_memory, tile, b_memory, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr
):
    features, values = tl.arange(0, BLOCK_D)[:, None], (tile * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    tl.store(p_memory + features * E + values, b_memory, mask=(features < D) & (values < E))


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


@triton.jit
def running_log_sum(conserved_outgoing, keep, log_sum, clamp, tau, FAST: tl.constexpr):
    """log Σ exp(τ Ô) from the start of the segment up to each token, and up to the last."""
    flow = tl.where(keep, competing_flow(conserved_outgoing, clamp, tau), LOG_ZERO)
    log = tl.associative_scan(flow, 0, fast_log_add) if FAST else tl.associative_scan(flow, 0, log_add)
    log = add_logs(log, log_sum, FAST)
    # non-decreasing, so the maximum is the last
    return log, tl.max(log, 0)


@triton.jit
def compute_competition(
    p_flow, plane, keep, position, log_start, clamp, tau, FAST: tl.constexpr, COMPETITION: tl.constexpr
):
    """c of each source, 0 where masked; p_flow points to the tokens in the first plane of `flows`."""
    competition = tl.zeros(keep.shape, tl.float32) + 1.0
    if COMPETITION != "none":
        flow = competing_flow(tl.load(p_flow + CONSERVED_OUTGOING * plane, mask=keep, other=0.0), clamp, tau)
        if COMPETITION == "softmax":
            log = tl.load(p_flow + LOG_OUTGOING * plane, mask=keep, other=0.0)
            competition = position * tl.exp(flow - add_logs(log_start, log, FAST))
        else:
            competition = sigmoid(flow, False)
    return tl.where(keep, competition, 0.0)


@triton.jit
def load_tiles(p_plane, plane, mask, TILES: tl.constexpr):
    """The sum of the planes of several tiles, consecutive from p_plane on."""
    total = tl.zeros(p_plane.shape, tl.float32)
    for tile in range(TILES):
        total += tl.load(p_plane + tile * plane, mask=mask, other=0.0)
    return total


@triton.jit
def load_weights(p_flow, plane, keep, RENORMALIZE: tl.constexpr):
    """α/(I·D), or α/W, and c, as the forward pass has stored them; 0 where masked."""
    WHICH: tl.constexpr = RENORMALIZED_RECEIVED if RENORMALIZE else RECEIVED
    received = tl.load(p_flow + WHICH * plane, mask=keep, other=0.0)
    return received, tl.load(p_flow + COMPETITION_WEIGHT * plane, mask=keep, other=0.0)


@triton.jit
def competing_gradient(p_flow, plane, keep, overlap):
    """dW = −⟨dR, R⟩/W, 0 where masked."""
    return -overlap * tl.load(p_flow + INVERSE_COMPETING * plane, mask=keep, other=0.0)


@triton.jit
def combine_decay(later_log, later_sum, log, sum):
    """L and Z of the first of two neighbouring runs of tokens, the later one given first."""
    return log, sum + decay(log, later_log) * later_sum


@triton.jit
def allocation_weights(
    inverse_in, conserved_in, keep, inverse_position, gamma,
    FAST: tl.constexpr, ALLOCATION: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """α/(I·D), to RENORMALIZE α alone, and (1 − σ(Î))/D, 0 where masked; `inverse_position` is 1/D."""
    declined = tl.zeros(inverse_position.shape, tl.float32)
    received = tl.where(keep, 1.0, 0.0) if RENORMALIZE else inverse_in * inverse_position
    if ALLOCATION:
        received *= raised_allocation(sigmoid(conserved_in, FAST), gamma)
        declined += tl.where(keep, sigmoid(-conserved_in, FAST) * inverse_position, 0.0)
    return received, declined


@triton.jit
def store_end(
    p_positions, p_state_scalars, p_logs, p_end_scalars, batch, length, start, last, log_end, segments,
    COMPETITION: tl.constexpr,
):  # fmt: skip
    """Stores the count and the logarithms after the last token of this head."""
    row = tl.program_id(0).to(tl.int64)
    count = load_count(p_state_scalars) + (last - start).to(tl.float32)
    if p_positions is not None:
        count = load_count(p_state_scalars) + tl.abs(tl.load(p_positions + batch * length + length - 1)).to(tl.float32)
    tl.store(p_logs + row * (segments + 1) + segments, log_end)
    log_outgoing, log_incoming = (
        load_log(p_state_scalars, STATE_LOG_OUTGOING),
        load_log(p_state_scalars, STATE_LOG_INCOMING),
    )
    if COMPETITION == "softmax":
        log_outgoing = log_end
    tl.store(p_end_scalars + row * 3 + COUNT, count)
    tl.store(
        p_end_scalars + row * 3 + STATE_LOG_OUTGOING, tl.where(log_outgoing > LOG_ZERO, log_outgoing, -float("inf"))
    )
    tl.store(
        p_end_scalars + row * 3 + STATE_LOG_INCOMING, tl.where(log_incoming > LOG_ZERO, log_incoming, -float("inf"))
    )


@triton.jit
def carried_flow(b_phi, conserved, eps, PRECISION: tl.constexpr):
    """(φ + ε)·a, for a sum a over earlier segments."""
    none = tl.zeros(conserved.shape, tl.float32)
    b_flow = dot_nn(b_phi, operand_columns(conserved, none, none, none, PRECISION), PRECISION)
    return pick(b_flow, 0) + eps * tl.sum(conserved, 0)
