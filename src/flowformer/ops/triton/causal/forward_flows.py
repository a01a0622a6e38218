"""Kernels of the causal forward pass, first part: the flows; the memory and the result are in `forward_output.py`.

A program processes one segment of one head in chunks of C tokens. Within a chunk all flows come from P = q kᵀ (C × C);
earlier tokens enter as sums. If heads have several segments (SPLIT), the sums before each segment are computed in
dependent levels: Σk and Σq (`sums_kernel`), which I and O need; Σk/O and Σq/I (`flows_kernel`), whose part from earlier
segments is one more product for Ô (`conserve_kernel`) and Î (`output_kernel`); log Σ exp(Ô) (`conserve_kernel`) and S
(`memory_kernel`, `scan_kernel`).

Shapes: B sequences, H query heads, N tokens, T segments, D features, E values. Per token, (B, H, N): the planes of
`flows` (`planes.py`). Per segment, (B·H, T, ...); per chunk, (B·H, T, chunks, ...). `positions` (B, N) counts the valid
tokens up to each, negative where masked; `bounds` are the cu_seqlens of packed sequences, which are one row of N
tokens. Math: docs/kernels.md.
"""

from __future__ import annotations

import triton.language as tl

from ..launch import kernel
from ..numerics import LOG_ZERO, log_add
from ..powers import load_gamma, load_tau
from ..precision import dot, dot_nn, dot_nt, operand
from .columns import accumulator_columns, merge_columns, merged_operand, operand_columns, pick, stack4, stack8
from .gates import allocation_weights, running_log_sum
from .planes import (
    COMPETITION_WEIGHT,
    CONSERVED_KEY_COLUMN,
    CONSERVED_KEY_SUM,
    CONSERVED_OUTGOING,
    CONSERVED_QUERY_COLUMN,
    CONSERVED_QUERY_SUM,
    FORWARD_PLANES,
    INVERSE_INCOMING,
    INVERSE_OUTGOING,
    KEY_COLUMN,
    KEY_SUM,
    LOG_OUTGOING,
    QUERY_COLUMN,
    QUERY_SUM,
    STATE_LOG_OUTGOING,
)
from .sums import carried_flow, load_count, load_log, load_vector, store_end, store_vector, sum_segments
from .tokens import inside_of, load_features, locate, locate_chunk


@kernel
def sums_kernel(
    p_query, p_key, p_positions, p_bounds, p_partial,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    heads, shared, length, size, segments, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Σk and Σq of each segment.

    Grid:   (B·H, segments). Only if heads have several segments. From right to left, since the next kernel starts with
            the tokens that are then in the L2 cache.
    Reads:  Q, K.
    Writes: `partial` (B·H, T, 2, D).
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    p_query += (batch * q_batch + head * q_head) * ALIGN
    p_key += (batch * k_batch + head // shared * k_head) * ALIGN
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    b_key_sums, b_query_sums = tl.zeros([BLOCK_D, 16], tl.float32), tl.zeros([BLOCK_D, 16], tl.float32)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        base = first + (chunks - 1 - step) * C
        rows, keep, _ = locate_chunk(p_positions, batch, length, base, tokens, start, last, 0.0)
        b_key, _ = load_features(
            p_key, base, rows, k_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_query, _ = load_features(
            p_query, base, rows, q_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_one = operand(tl.where(keep[:, None] & (tl.arange(0, 16) == 0)[None, :], 1.0, 0.0), PRECISION)
        b_key_sums = dot(tl.trans(b_key), b_one, b_key_sums, PRECISION)
        b_query_sums = dot(tl.trans(b_query), b_one, b_query_sums, PRECISION)
    index = (tl.program_id(0).to(tl.int64) * segments + tl.program_id(1)) * 2
    store_vector(p_partial, index + KEY_SUM, columns, pick(b_key_sums, 0), D)
    store_vector(p_partial, index + QUERY_SUM, columns, pick(b_query_sums, 0), D)


@kernel
def flows_kernel(
    p_query, p_key, p_positions, p_bounds, p_powers, p_state_sums, p_state_scalars, p_partial, p_conserved, p_flows,
    p_sums, p_local_flows, p_local_sums, p_logs, p_end_sums, p_end_scalars,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    plane, heads, shared, length, size, segments, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, RENORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The flows I, O, Î, Ô of each token.

    Grid:   (B·H, segments). One program walks over one segment in chunks of C tokens.
    Reads:  Q, K; Σk and Σq of earlier segments (`partial`); the state before the first token.
    Writes: planes of `flows`; if a backward pass is to KEEP them, the sums before each chunk, with ε (`sums`, B·H, T,
            chunks, 4, D; the fifth, if RENORMALIZE, is left to `output_kernel`); sums and scalars of the last state;
            log Σ exp(Ô) before the head (`logs`).
            SPLIT: Î, Ô, Σk/O and Σq/I count this segment only, and go to `local_flows` (2, B, H, N) and `local_sums`
            (B·H, T, chunks, 2, D); what the segment adds to Σk/O and Σq/I goes to `conserved` (B·H, T, 2, D).
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_query += (batch * q_batch + head * q_head) * ALIGN
    p_key += (batch * k_batch + head // shared * k_head) * ALIGN
    p_flows += (batch * heads + head) * length
    count = load_count(p_state_scalars)
    tau = None
    gamma = None
    if p_powers is not None:
        tau, gamma = load_tau(p_powers, head), load_gamma(p_powers, head, heads)
    SUMS: tl.constexpr = 5 if RENORMALIZE else 4
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    b_lower = tokens[:, None] >= tokens[None, :]

    key_sum = load_vector(p_state_sums, row * SUMS + KEY_SUM, columns, D)
    query_sum = load_vector(p_state_sums, row * SUMS + QUERY_SUM, columns, D)
    if SPLIT:
        p_local_flows += (batch * heads + head) * length
        key_sum += sum_segments(p_partial, 0, segment, segments, columns, KEY_SUM, D)
        query_sum += sum_segments(p_partial, 0, segment, segments, columns, QUERY_SUM, D)
    # (φ + ε)·(Σ + ε): ε is added to the sum here, and to each token when it is loaded
    eps_row = tl.where(columns < D, eps, 0.0)
    conserved_key, conserved_query = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    if not SPLIT:
        conserved_key += load_vector(p_state_sums, row * SUMS + CONSERVED_KEY_SUM, columns, D) + eps_row
        conserved_query += load_vector(p_state_sums, row * SUMS + CONSERVED_QUERY_SUM, columns, D) + eps_row
    none = tl.zeros([BLOCK_D], tl.float32)
    b_key_sums = accumulator_columns(key_sum + eps_row, conserved_key, none, none)
    b_query_sums = accumulator_columns(none, none, query_sum + eps_row, conserved_query)
    first_chunk = (row * segments + segment) * (size // C)
    log_sum = LOG_ZERO

    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        base = first + chunk * C
        rows, keep, position = locate_chunk(p_positions, batch, length, base, tokens, start, last, count)
        b_query, b_query_eps = load_features(
            p_query, base, rows, q_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_key, b_key_eps = load_features(
            p_key, base, rows, k_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_seen = b_lower
        if p_positions is not None:
            b_seen = b_lower & keep[None, :]
        # Before the wider products: they reuse this operand's shared memory, and ptxas 12.8 then reads uniform
        # registers that were never written (check: move it down and run tests/machine_code.py)
        b_all_sums = merge_columns(b_key_sums, b_query_sums)
        b_before = merged_operand(b_all_sums, PRECISION)
        # one product per direction, so that every sum runs along a row, inside a warp
        b_to_sinks = tl.where(b_seen, dot_nt(b_query_eps, b_key, PRECISION), 0.0)
        b_to_sources = tl.where(b_seen, dot_nt(b_key_eps, b_query, PRECISION), 0.0)
        b_sinks_before = dot_nn(b_query_eps, b_before, PRECISION)
        b_sources_before = dot_nn(b_key_eps, b_before, PRECISION)
        incoming = tl.sum(b_to_sinks, 1) + pick(b_sinks_before, KEY_COLUMN) + flow_eps
        outgoing = tl.sum(b_to_sources, 1) + pick(b_sources_before, QUERY_COLUMN) + flow_eps
        inverse_in = tl.where(keep, position / incoming, 0.0)
        inverse_out = tl.where(keep, position / outgoing, 0.0)
        conserved_in = (
            tl.sum(b_to_sinks * inverse_out[None, :], 1) + pick(b_sinks_before, CONSERVED_KEY_COLUMN) + flow_eps
        )
        conserved_out = (
            tl.sum(b_to_sources * inverse_in[None, :], 1) + pick(b_sources_before, CONSERVED_QUERY_COLUMN) + flow_eps
        )
        inverse_position = 1.0 / position
        conserved_in, conserved_out = conserved_in * inverse_position, conserved_out * inverse_position
        inside, here = inside_of(tokens, base, last), first_chunk + chunk
        p_flow = (p_flows + base + tokens)[:, None]
        if SPLIT:
            which, p_local = tl.arange(0, 4)[None, :], (p_local_flows + base + tokens)[:, None]
            b_planes = stack4(inverse_in, inverse_out, conserved_in, conserved_out)
            p_to = tl.where(which == 0, p_flow + INVERSE_INCOMING * plane, p_flow + INVERSE_OUTGOING * plane)
            p_to = tl.where(which < 2, p_to, p_local + (which - 2) * plane)
            tl.store(p_to, b_planes, mask=inside[:, None] & (KEEP | (which != 1)))
        else:
            received, declined = allocation_weights(
                inverse_in, conserved_in, keep, inverse_position, gamma, FAST, ALLOCATION, RENORMALIZE
            )
            which = tl.arange(0, 8)[None, :]
            # in the order of the planes; 1/D where nothing is stored
            b_planes = stack8(
                inverse_in,
                conserved_out,
                inverse_position,
                received,
                inverse_out,
                declined,
                inverse_position,
                inverse_position,
            )
            written = (which != LOG_OUTGOING) & (which < (COMPETITION_WEIGHT if KEEP else FORWARD_PLANES))
            tl.store(p_flow + which * plane, b_planes, mask=inside[:, None] & written)
            if COMPETITION == "softmax":
                log, log_sum = running_log_sum(conserved_out, keep, log_sum, clamp, tau, FAST)
                tl.store(p_flows + base + tokens + LOG_OUTGOING * plane, log, mask=inside)
        if KEEP:
            # columns are Σk, Σk/O, Σq, Σq/I; `sums` has Σk, Σq, Σk/O, Σq/I
            pair = tl.arange(0, 8)[None, :]
            p_to = p_sums + here * (SUMS * D) + (pair % 2 * 2 + pair // 2) * D
            if SPLIT:
                p_local = p_local_sums + here * (2 * D) + pair // 2 * D
                p_to = tl.where(pair % 2 == 0, p_sums + here * (SUMS * D) + pair // 2 * D, p_local)
            tl.store(p_to + columns[:, None], b_all_sums, mask=(columns < D)[:, None] & (pair < 4))
        one = tl.where(keep, 1.0, 0.0)
        b_weights = operand_columns(one, inverse_out, one, inverse_in, PRECISION)
        b_key_sums = dot(tl.trans(b_key), b_weights, b_key_sums, PRECISION)
        b_query_sums = dot(tl.trans(b_query), b_weights, b_query_sums, PRECISION)

    if segment == segments - 1:
        store_vector(p_end_sums, row * SUMS + KEY_SUM, columns, pick(b_key_sums, KEY_COLUMN) - eps_row, D)
        store_vector(p_end_sums, row * SUMS + QUERY_SUM, columns, pick(b_query_sums, QUERY_COLUMN) - eps_row, D)
    conserved_key, conserved_query = pick(b_key_sums, CONSERVED_KEY_COLUMN), pick(b_query_sums, CONSERVED_QUERY_COLUMN)
    if SPLIT:
        index = (row * segments + segment) * 2
        store_vector(p_conserved, index + KEY_SUM, columns, conserved_key, D)
        store_vector(p_conserved, index + QUERY_SUM, columns, conserved_query, D)
    else:
        store_vector(p_end_sums, row * SUMS + CONSERVED_KEY_SUM, columns, conserved_key - eps_row, D)
        store_vector(p_end_sums, row * SUMS + CONSERVED_QUERY_SUM, columns, conserved_query - eps_row, D)
        log_start = load_log(p_state_scalars, STATE_LOG_OUTGOING)
        tl.store(p_logs + row * 2, log_start)
        store_end(
            p_positions, p_state_scalars, p_logs, p_end_scalars, batch, length, start, last,
            log_add(log_start, log_sum), segments, COMPETITION,
        )  # fmt: skip


@kernel
def conserve_kernel(
    p_key, p_positions, p_bounds, p_powers, p_state_sums, p_state_scalars, p_conserved, p_flows, p_sums, p_local_flows,
    p_local_sums, p_totals, p_end_sums,
    k_batch, k_head, k_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, COMPETITION: tl.constexpr, RENORMALIZE: tl.constexpr, KEEP: tl.constexpr,
    STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Ô including earlier segments, and log Σ exp(Ô) of each segment.

    Grid:   (B·H, segments). Only where heads have several segments.
    Reads:  K; Ô, Σk/O and Σq/I of this segment only (`local_flows`, `local_sums`); Σk/O and Σq/I of earlier segments
            (`conserved`); the state before the first token.
    Writes: Ô and the running log Σ exp(Ô), planes of `flows`; log Σ exp(Ô) of each segment (`totals`, B·H, T); sums of
            the last state; if a backward pass is to KEEP them, Σk/O and Σq/I before each chunk (`sums`).
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    k_token = D if DENSE else k_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_key += (batch * k_batch + head // shared * k_head) * ALIGN
    p_flows += (batch * heads + head) * length
    p_local_flows += (batch * heads + head) * length + plane
    count = load_count(p_state_scalars)
    tau = None
    if p_powers is not None:
        tau = load_tau(p_powers, head)
    SUMS: tl.constexpr = 5 if RENORMALIZE else 4
    # two chunks at a time: there is little work per token besides the scan
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, 2 * C)
    conserved_key = load_vector(p_state_sums, row * SUMS + CONSERVED_KEY_SUM, columns, D)
    conserved_query = load_vector(p_state_sums, row * SUMS + CONSERVED_QUERY_SUM, columns, D)
    conserved_key += sum_segments(p_conserved, 0, segment, segments, columns, KEY_SUM, D)
    conserved_query += sum_segments(p_conserved, 0, segment, segments, columns, QUERY_SUM, D)
    index, chunks = row * segments + segment, size // C
    if segment == segments - 1:
        own_key = load_vector(p_conserved, index * 2 + KEY_SUM, columns, D)
        own_query = load_vector(p_conserved, index * 2 + QUERY_SUM, columns, D)
        store_vector(p_end_sums, row * SUMS + CONSERVED_KEY_SUM, columns, conserved_key + own_key, D)
        store_vector(p_end_sums, row * SUMS + CONSERVED_QUERY_SUM, columns, conserved_query + own_query, D)
    eps_row = tl.where(columns < D, eps, 0.0)
    conserved_query += eps_row
    which = tl.arange(0, 4)[None, :]
    b_before = tl.where(which % 2 == 0, (conserved_key + eps_row)[:, None], conserved_query[:, None])
    log_sum = LOG_ZERO
    for step in tl.range(0, tl.cdiv(last - first, 2 * C).to(tl.int32), num_stages=STAGES):
        base, here = first + step * (2 * C), index * chunks + step * 2
        rows, keep, position = locate_chunk(p_positions, batch, length, base, tokens, start, last, count)
        b_key, _ = load_features(
            p_key, base, rows, k_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        p_flow, inside = p_flows + base + tokens, inside_of(tokens, base, last)
        conserved_out = tl.load(p_local_flows + base + tokens, mask=inside, other=0.0)
        conserved_out += carried_flow(b_key, conserved_query, eps, PRECISION) / position
        tl.store(p_flow + CONSERVED_OUTGOING * plane, conserved_out, mask=inside)
        if COMPETITION == "softmax":
            log, log_sum = running_log_sum(conserved_out, keep, log_sum, clamp, tau, FAST)
            tl.store(p_flow + LOG_OUTGOING * plane, log, mask=inside)
        if KEEP:
            # columns are Σk/O and Σq/I of the first chunk, then of the second
            inner = (columns < D)[:, None] & (step * 2 + which // 2 < chunks)
            b_local = tl.load(p_local_sums + (here * 2 + which) * D + columns[:, None], mask=inner, other=0.0)
            p_to = p_sums + (here * SUMS + which // 2 * SUMS + CONSERVED_KEY_SUM + which % 2) * D
            tl.store(p_to + columns[:, None], b_before + b_local, mask=inner)
    tl.store(p_totals + index, log_sum)
