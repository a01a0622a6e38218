"""Kernels of the causal forward pass, second part: the memory S and the result.

Programs, shapes and launch order are described in `forward_flows.py`. Math: docs/kernels.md.
"""

from __future__ import annotations

import triton.language as tl

from ..features import centred_feature
from ..launch import kernel
from ..numerics import LOG_ZERO, log_add
from ..powers import load_gamma, load_tau
from ..precision import dot, dot_nn, dot_nt, operand
from .columns import accumulator_columns, merge_columns, merged_operand, operand_columns, pick
from .gates import allocation_weights, compute_competition
from .planes import (
    COMPETING_SUM,
    COMPETITION_WEIGHT,
    CONSERVED_KEY_SUM,
    DECLINED,
    INVERSE_COMPETING,
    INVERSE_INCOMING,
    KEY_SUM,
    RECEIVED,
    RENORMALIZED_RECEIVED,
    STATE_LOG_OUTGOING,
)
from .sums import (
    carried_flow,
    load_count,
    load_log,
    load_memory,
    load_vector,
    store_end,
    store_memory,
    store_vector,
    sum_segments,
)
from .tokens import inside_of, load_features, load_rows, locate, locate_chunk, mask_triangle, store_rows, triangle


@kernel
def memory_kernel(
    p_key, p_value, p_positions, p_bounds, p_powers, p_state_scalars, p_flows, p_totals, p_logs, p_end_scalars,
    p_partial, p_competing,
    k_batch, k_head, k_token, v_batch, v_head, v_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, RENORMALIZE: tl.constexpr, CENTRE: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Σ kᵀ c V of each segment, and log Σ exp(Ô) before it.

    Grid:   (B·H, segments, tiles of E). Only where heads have several segments. From right to left, since
            `conserve_kernel` left the last tokens in the L2 cache.
    Reads:  K, V; planes of `flows`; log Σ exp(Ô) of each segment (`totals`).
    Writes: Σ kᵀ c V (B·H, T, D, E) into `partial`, for `scan_kernel`; `logs` (B·H, T + 1); scalars of the last state;
            if RENORMALIZE, Σ c k of each segment (`competing`, B·H, T, D).

    CENTRE is φ(0) where the backward pass needs the differences between features, see `gradient_kernel`, otherwise 0.
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    p_key += (batch * k_batch + head // shared * k_head) * ALIGN
    p_value += (batch * v_batch + head // shared * v_head) * ALIGN
    p_flows += (batch * heads + head) * length
    log_start = load_log(p_state_scalars, STATE_LOG_OUTGOING)
    for begin in range(0, segment, 16):
        each = begin + tl.arange(0, 16)
        log = tl.load(p_totals + row * segments + each, mask=each < segment, other=LOG_ZERO)
        high = tl.max(log, 0)
        log_start = log_add(log_start, high + tl.log(tl.sum(tl.exp(log - high), 0)))
    if tile == 0:
        tl.store(p_logs + row * (segments + 1) + segment, log_start)
        if segment == segments - 1:
            log_end = log_add(log_start, tl.load(p_totals + row * segments + segment))
            store_end(
                p_positions, p_state_scalars, p_logs, p_end_scalars, batch, length, start, last, log_end, segments,
                COMPETITION,
            )  # fmt: skip
    count, tokens = load_count(p_state_scalars), tl.arange(0, C)
    tau = None
    if p_powers is not None:
        tau = load_tau(p_powers, head)
    b_memory, common_row = tl.zeros([BLOCK_D, BLOCK_E], tl.float32), tl.zeros([BLOCK_E], tl.float32)
    if RENORMALIZE:
        b_sums, common, none = tl.zeros([BLOCK_D, 16], tl.float32), tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        base = first + (chunks - 1 - step) * C
        rows, keep, position = locate_chunk(p_positions, batch, length, base, tokens, start, last, count)
        if CENTRE != 0:
            b_key = load_rows(p_key, base, rows, k_token, keep, p_positions, 0, D, BLOCK_D)
            b_key = operand(centred_feature(b_key, scale, MAP), PRECISION)
        else:
            b_key, _ = load_features(
                p_key, base, rows, k_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
            )
        b_value = load_rows(p_value, base, rows, v_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
        p_flow = p_flows + base + tokens
        competition = compute_competition(p_flow, plane, keep, position, log_start, clamp, tau, FAST, COMPETITION)
        if RENORMALIZE:
            b_weights = operand_columns(competition, none, none, none, PRECISION)
            b_sums = dot(tl.trans(b_key), b_weights, b_sums, PRECISION)
            common += CENTRE * competition
        b_competing = b_value * competition[:, None]
        b_memory = dot(tl.trans(b_key), operand(b_competing, PRECISION), b_memory, PRECISION)
        if CENTRE != 0:
            common_row += CENTRE * tl.sum(b_competing, 0)
    if CENTRE != 0:
        b_memory += common_row[None, :]
    store_memory(p_partial + (row * segments + segment) * (D * E), tile, b_memory, D, BLOCK_D, E, BLOCK_E)
    if RENORMALIZE and tile == 0:
        competing_sum = pick(b_sums, 0) + tl.sum(common, 0)
        store_vector(p_competing, row * segments + segment, tl.arange(0, BLOCK_D), competing_sum, D)


@kernel
def scan_kernel(
    p_partial, p_begin, p_before, p_end, segments,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The sum of the memories of the segments before each segment (in REVERSE: after it), in a fixed order.

    Grid:   (B·H, blocks of D·E).
    Reads:  `partial` (B·H, T, WIDTH), one memory for each segment; `begin` (B·H, WIDTH), of the state, if there is one.
    Writes: `before` (B·H, T, WIDTH); `end` (B·H, WIDTH), the sum of all.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = load_vector(p_begin, row, columns, WIDTH)
    for start in range(0, segments, 16):
        each = start + tl.arange(0, 16)
        segment = segments - 1 - each if REVERSE else each
        previous = segment + 1 if REVERSE else segment - 1
        inner = (columns < WIDTH)[None, :]
        at = (row * segments + previous)[:, None] * WIDTH + columns[None, :]
        b_shifted = tl.load(p_partial + at, mask=((each > start) & (each < segments))[:, None] & inner, other=0.0)
        at = (row * segments + segment)[:, None] * WIDTH + columns[None, :]
        tl.store(p_before + at, total[None, :] + tl.cumsum(b_shifted, 0), mask=(each < segments)[:, None] & inner)
        total += tl.sum(tl.load(p_partial + at, mask=(each < segments)[:, None] & inner, other=0.0), 0)
    store_vector(p_end, row, columns, total, WIDTH)


@kernel
def output_kernel(
    p_query, p_key, p_value, p_out, p_positions, p_bounds, p_powers, p_state_sums, p_state_scalars, p_state_memory,
    p_conserved, p_flows, p_local_flows, p_logs, p_memories, p_end_memory, p_competing, p_sums, p_end_sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, r_batch, r_head, r_token,
    plane, heads, shared, length, size, segments, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, RENORMALIZE: tl.constexpr, RAISED: tl.constexpr,
    SPLIT: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """R = α/(I·D) · q S, if RENORMALIZE α/W · q S with W = ⟨q, Σ c k⟩.

    Grid:   (B·H, segments, tiles of E). One program walks over one segment in chunks of C tokens.
    Reads:  Q, K, V; planes of `flows`; log Σ exp(Ô) before each segment (`logs`); the state before the first token.
            SPLIT: S before each segment (`memories`), and Î of this segment only (`local_flows`), to which is added
            what comes from earlier segments (`conserved`); if RENORMALIZE, Σ c k of earlier segments (`competing`).
    Writes: R (B, H, N, E); the planes of `flows` that only a backward pass KEEPs; S after the last token, unless SPLIT.
            If RENORMALIZE: Σ c k after the last token; Σ c k + ε before each chunk (`sums`, B·H, T, chunks, 5, D), if a
            backward pass is to KEEP it. RAISED: see `gradient_kernel`.
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    r_token = E if DENSE else r_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    p_query += (batch * q_batch + head * q_head) * ALIGN
    p_key += (batch * k_batch + head // shared * k_head) * ALIGN
    p_value += (batch * v_batch + head // shared * v_head) * ALIGN
    p_out += (batch * r_batch + head * r_head) * ALIGN
    p_flows += (batch * heads + head) * length
    p_memories += (row * segments + segment) * (D * E)
    count, tokens = load_count(p_state_scalars), tl.arange(0, C)
    log_start = tl.load(p_logs + row * (segments + 1) + segment)
    tau = None
    gamma = None
    if p_powers is not None:
        tau, gamma = load_tau(p_powers, head), load_gamma(p_powers, head, heads)
    SUMS: tl.constexpr = 5 if RENORMALIZE else 4
    columns = tl.arange(0, BLOCK_D)
    if SPLIT:
        b_memory = load_memory(p_memories, tile, D, BLOCK_D, E, BLOCK_E)
        p_local_flows += (batch * heads + head) * length
        conserved_key = load_vector(p_state_sums, row * SUMS + CONSERVED_KEY_SUM, columns, D) + tl.where(
            columns < D, eps, 0.0
        )
        conserved_key += sum_segments(p_conserved, 0, segment, segments, columns, KEY_SUM, D)
    else:
        b_memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
        if p_state_memory is not None:
            b_memory += load_memory(p_state_memory + row * (D * E), tile, D, BLOCK_D, E, BLOCK_E)
        if KEEP:
            store_memory(p_memories, tile, b_memory, D, BLOCK_D, E, BLOCK_E)
    if RENORMALIZE:
        eps_row, no_features = tl.where(columns < D, eps, 0.0), tl.zeros([BLOCK_D], tl.float32)
        competing_sum = load_vector(p_state_sums, row * SUMS + COMPETING_SUM, columns, D) + eps_row
        if SPLIT:
            competing_sum += sum_segments(p_competing, 0, segment, segments, columns, 0, D, 1)
        b_sums = accumulator_columns(competing_sum, no_features, no_features, no_features)

    b_lower = triangle(C, False)
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        base = first + chunk * C
        rows, keep, position = locate_chunk(p_positions, batch, length, base, tokens, start, last, count)
        b_query, b_query_eps = load_features(
            p_query, base, rows, q_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_key, _ = load_features(
            p_key, base, rows, k_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_value = load_rows(p_value, base, rows, v_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
        p_flow, inside = p_flows + base + tokens, inside_of(tokens, base, last)
        if SPLIT:
            inverse_in = None
            if not RENORMALIZE:
                inverse_in = tl.load(p_flow + INVERSE_INCOMING * plane, mask=keep, other=0.0)
            conserved_in = tl.load(p_local_flows + base + tokens, mask=keep, other=0.0)
            inverse_position = 1.0 / position
            conserved_in += carried_flow(b_query, conserved_key, eps, PRECISION) * inverse_position
            received, declined = allocation_weights(
                inverse_in, conserved_in, keep, inverse_position, gamma, FAST, ALLOCATION, RENORMALIZE
            )
            if KEEP and tile == 0:
                tl.store(p_flow + DECLINED * plane, declined, mask=inside)
                if not RENORMALIZE:
                    tl.store(p_flow + RECEIVED * plane, received, mask=inside)
        else:
            received = tl.load(p_flow + RECEIVED * plane, mask=keep, other=0.0)
        competition = compute_competition(p_flow, plane, keep, position, log_start, clamp, tau, FAST, COMPETITION)
        if KEEP and tile == 0:
            tl.store(p_flow + COMPETITION_WEIGHT * plane, competition, mask=inside)
        if RENORMALIZE:
            # before the wider products because of ptxas 12.8, see `flows_kernel`
            b_competing_sum = merge_columns(b_sums, b_sums)
            b_before = merged_operand(b_competing_sum, PRECISION)
            b_competing_flow = dot_nn(b_query_eps, b_before, PRECISION)
            none = tl.zeros([C], tl.float32)
            b_weights = operand_columns(competition, none, none, none, PRECISION)
            b_sums = dot(tl.trans(b_key), b_weights, b_sums, PRECISION)
            if KEEP and tile == 0:
                here, pair = (row * segments + segment) * (size // C) + chunk, tl.arange(0, 8)[None, :]
                p_to = p_sums + (here * SUMS + COMPETING_SUM) * D + columns[:, None] + pair
                tl.store(p_to, b_competing_sum, mask=(columns < D)[:, None] & (pair == 0))
        b_competing = operand(b_value * competition[:, None], PRECISION)
        b_products = mask_triangle(dot_nt(b_query, b_key, PRECISION), b_lower, FAST, PRECISION)
        if RENORMALIZE:
            # with the same rounded products as the result, so that the weights sum to α
            competing = pick(dot(b_products, b_weights, b_competing_flow, PRECISION), 0) + flow_eps
            if RAISED:
                competing += eps * tl.cumsum(tl.sum(b_key.to(tl.float32), 1) * competition, 0)
            inverse_competing = tl.where(keep, 1.0 / competing, 0.0)
            received *= inverse_competing
            if KEEP and tile == 0:
                tl.store(p_flow + RENORMALIZED_RECEIVED * plane, received, mask=inside)
                tl.store(p_flow + INVERSE_COMPETING * plane, inverse_competing, mask=inside)
        b_result = dot_nn(b_query, operand(b_memory, PRECISION), PRECISION)
        b_result = dot(b_products, b_competing, b_result, PRECISION) * received[:, None]
        store_rows(p_out, base, tokens, r_token, inside, tile, b_result, E, BLOCK_E, PRECISION)
        b_memory = dot(tl.trans(b_key), b_competing, b_memory, PRECISION)
    if not SPLIT:
        store_memory(p_end_memory + row * (D * E), tile, b_memory, D, BLOCK_D, E, BLOCK_E)
    if RENORMALIZE and (segment == segments - 1) & (tile == 0):
        store_vector(p_end_sums, row * SUMS + COMPETING_SUM, columns, pick(b_sums, 0) - eps_row, D)
