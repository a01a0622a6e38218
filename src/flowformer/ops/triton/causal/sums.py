"""Sums of the causal kernels: the vectors, memories and scalars of a state and of the segments.

Shapes as in `forward_flows.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics import LOG_ZERO
from ..precision import dot_nn
from .columns import operand_columns, pick
from .planes import COUNT, STATE_LOG_INCOMING, STATE_LOG_OUTGOING


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
