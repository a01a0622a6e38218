"""Kernels of dS and dV, the first of the causal backward pass.

With w = ⟨V, dV⟩ per token, and L the running log Σ exp(Ô):
    dÔ_t = w_t − exp(Ô_t − L_t) Z_t,   Z_t = Σ_{s≥t} w_s exp(L_t − L_s)
With RENORMALIZE, w = ⟨V, dV⟩ + c k·d(Σ c k). With powers, τ Ô replaces Ô.
L is non-decreasing, so no exponent is positive. With several segments, the part of Z from later segments reaches a
token with the factor exp(Ô − L_end): a segment stores Σ (k + ε) dÔ/D without it, and Σ (k + ε) exp(Ô − L_end)/D;
`flow_gradient_kernel` combines them.

Shapes as in `forward_flows.py`; `grads` are the planes of `planes.py`. dÎ and dÔ are linear in ⟨dR, R⟩ and w,
so each tile of E adds its part. Math: docs/kernels.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import kernel
from ..numerics import add_logs, clamped, decay, sigmoid
from ..powers import competing_flow, load_gamma, load_tau
from ..precision import dot, dot_nn, dot_nt, operand
from .columns import accumulator_columns, merge_columns, merged_operand, operand_columns, pick
from .gates import combine_decay, competing_gradient, load_weights
from .planes import COMPETING_SUM, CONSERVED_OUTGOING, DECLINED, GRAD_PLANES, LOG_OUTGOING
from .sums import load_count, load_memory, load_vector, store_memory, store_vector, sum_segments
from .tokens import (
    inside_of,
    load_features,
    load_rows,
    locate,
    locate_chunk,
    mask_triangle,
    materialize,
    store_rows,
    triangle,
)


@triton.jit
def _sum_and_least(sum, least, other_sum, other_least):
    return sum + other_sum, tl.minimum(least, other_least)


@triton.jit
def competition_gradient(weight, flow, log, later, log_later, tokens):
    """dÔ of a chunk before the clamp, and Z and L of its first token, from Z and L after the chunk."""
    _, sums = tl.associative_scan((log, weight), 0, combine_decay, reverse=True)
    sums += decay(log, log_later) * later
    # a masked token may have any Ô; the caller zeroes its gradient
    gradient = weight - decay(flow, log) * sums
    first, least = tl.reduce((tl.where(tokens == 0, sums, 0.0), log), 0, _sum_and_least)
    return gradient, first, least


@kernel
def grad_memory_kernel(
    p_query, p_grad, p_result, p_positions, p_bounds, p_powers, p_flows, p_grads, p_partial, p_conserved, p_competing,
    q_batch, q_head, q_token, g_batch, g_head, g_token, r_batch, r_head, r_token,
    plane, heads, shared, length, size, segments, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, RENORMALIZE: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dS = Σ qᵀ α/(I·D) dR and d(Σk/O) = Σ (q + ε) dÎ/D of each segment, and ⟨dR, R⟩ of each token.

    Grid:   (B·H, segments, tiles of E). Only where heads have several segments.
    Reads:  Q, dR, R; planes of `flows`.
    Writes: dS (B·H, T, D, E) into `partial`, for `scan_kernel`; d(Σk/O), the first vector of `conserved` (B·H, T,
            tiles, 2, D); ⟨dR, R⟩ of the tile, a plane of `grads`. If RENORMALIZE, d(Σ c k) = Σ (q + ε) dW of the tile
            (`competing`, tiles, B·H, T, D).
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    g_token = E if DENSE else g_token * ALIGN
    r_token = E if DENSE else r_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    p_query += (batch * q_batch + head * q_head) * ALIGN
    p_grad += (batch * g_batch + head * g_head) * ALIGN
    p_result += (batch * r_batch + head * r_head) * ALIGN
    p_flows += (batch * heads + head) * length
    p_grads += (batch * heads + head) * length
    tokens = tl.arange(0, C)
    b_memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    b_sums, all_in = tl.zeros([BLOCK_D, 16], tl.float32), tl.zeros([C], tl.float32)
    all_competing = tl.zeros([C], tl.float32)
    gamma = None
    if p_powers is not None:
        gamma = load_gamma(p_powers, head, heads)
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        base = first + chunk * C
        rows, keep, _ = locate_chunk(p_positions, batch, length, base, tokens, start, last, 0.0)
        b_query, _ = load_features(
            p_query, base, rows, q_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_grad = load_rows(p_grad, base, rows, g_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
        b_result = load_rows(p_result, base, rows, r_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
        p_flow, overlap = p_flows + base + tokens, tl.sum(b_grad * b_result, 1)
        tl.store(p_grads + base + tokens + (GRAD_PLANES + tile) * plane, overlap, mask=inside_of(tokens, base, last))
        conserved_in = overlap * tl.load(p_flow + DECLINED * plane, mask=keep, other=0.0)
        if gamma is not None:
            conserved_in *= gamma
        none = tl.zeros([C], tl.float32)
        grad_competing = none
        if RENORMALIZE:
            grad_competing = competing_gradient(p_flow, plane, keep, overlap)
            all_competing += grad_competing
        b_sums = dot(
            tl.trans(b_query), operand_columns(conserved_in, grad_competing, none, none, PRECISION), b_sums, PRECISION
        )
        all_in += conserved_in
        received, _ = load_weights(p_flow, plane, keep, RENORMALIZE)
        b_memory = dot(tl.trans(b_query), operand(b_grad * received[:, None], PRECISION), b_memory, PRECISION)
    index = row * segments + segment
    store_memory(p_partial + index * (D * E), tile, b_memory, D, BLOCK_D, E, BLOCK_E)
    total = pick(b_sums, 0) + eps * tl.sum(all_in, 0)
    store_vector(p_conserved, (index * TILES + tile) * 2, tl.arange(0, BLOCK_D), total, D)
    if RENORMALIZE:
        at = tile * tl.num_programs(0).to(tl.int64) * segments + index
        total = pick(b_sums, 1) + eps * tl.sum(all_competing, 0)
        store_vector(p_competing, at, tl.arange(0, BLOCK_D), total, D)


@kernel
def value_gradient_kernel(
    p_query, p_key, p_value, p_grad, p_result, p_grad_value, p_positions, p_bounds, p_powers, p_state_scalars,
    p_flows, p_grads, p_logs, p_memories, p_start_memory, p_carried, p_conserved, p_reaching, p_competing, p_grad_sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, g_batch, g_head, g_token,
    r_batch, r_head, r_token, dv_batch, dv_head, dv_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, RENORMALIZE: tl.constexpr, RAISED: tl.constexpr, TILES: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dV, from right to left with dS, and dÔ/D of each token without the part of later segments.

    Grid:   (B·H, segments, tiles of E). One program walks over one segment in chunks of C tokens.
    Reads:  Q, K, V, dR; planes of `flows`; dS after each segment (`memories`); L before each segment (`logs`).
            R, if the head is one segment. If RENORMALIZE, d(Σ c k) of the last state and of later segments
            (`competing`). RAISED: see `gradient_kernel`.
    Writes: dV for every query head (B, H, N, E); dÔ/D of the tile, a plane of `grads`, with powers d(τ Ô)/D instead,
            before the clamp, which the gradient of τ needs; Z before each segment
            (`carried`). SPLIT, several segments: d(Σq/I) = Σ (k + ε) dÔ/D, the second vector of `conserved` (B·H, T,
            tiles, 2, D), and Σ (k + ε) exp(Ô − L_end)/D (`reaching`). Otherwise ⟨dR, R⟩ of the tile, and dS before the
            first token.
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    g_token = E if DENSE else g_token * ALIGN
    r_token = E if DENSE else r_token * ALIGN
    dv_token = E if DENSE else dv_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    p_query += (batch * q_batch + head * q_head) * ALIGN
    p_key += (batch * k_batch + head // shared * k_head) * ALIGN
    p_value += (batch * v_batch + head // shared * v_head) * ALIGN
    p_grad += (batch * g_batch + head * g_head) * ALIGN
    p_grad_value += (batch * dv_batch + head * dv_head) * ALIGN
    p_flows += (batch * heads + head) * length
    p_grads += (batch * heads + head) * length
    count, tokens = load_count(p_state_scalars), tl.arange(0, C)
    tau = None
    if p_powers is not None:
        tau = load_tau(p_powers, head)
    p_logs += row * (segments + 1) + segment
    log_start, log_end = tl.load(p_logs), tl.load(p_logs + 1)
    later, log_later = 0.0, log_end
    if SPLIT:
        b_sums = tl.zeros([BLOCK_D, 16], tl.float32)
        all_out, all_reaching = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    else:
        p_result += (batch * r_batch + head * r_head) * ALIGN
    b_memory, b_upper = tl.zeros([BLOCK_D, BLOCK_E], tl.float32), triangle(C, True)
    if p_memories is not None:
        b_memory += load_memory(p_memories + (row * segments + segment) * (D * E), tile, D, BLOCK_D, E, BLOCK_E)
    COMPETES: tl.constexpr = RENORMALIZE and COMPETITION != "none"
    if COMPETES:
        columns, no_features = tl.arange(0, BLOCK_D), tl.zeros([BLOCK_D], tl.float32)
        # each tile of E adds its part of d(Σ c k); the first tile also adds the part from the last state
        competing_sum = load_vector(p_grad_sums, row * 5 + COMPETING_SUM, columns, D) * tl.where(tile == 0, 1.0, 0.0)
        if SPLIT:
            p_competing += tile * tl.num_programs(0).to(tl.int64) * segments * D
            competing_sum += sum_segments(p_competing, segment + 1, segments, segments, columns, 0, D, 1)
        b_competing_sums = accumulator_columns(competing_sum, no_features, no_features, no_features)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        base = first + (chunks - 1 - step) * C
        rows, keep, position = locate_chunk(p_positions, batch, length, base, tokens, start, last, count)
        b_query, b_query_eps = load_features(
            p_query, base, rows, q_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_key, _ = load_features(
            p_key, base, rows, k_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_grad = load_rows(p_grad, base, rows, g_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
        p_flow, p_grad_flow, inside = p_flows + base + tokens, p_grads + base + tokens, inside_of(tokens, base, last)
        received, competition = load_weights(p_flow, plane, keep, RENORMALIZE)
        if COMPETES:
            # before the wider products because of ptxas 12.8, see `flows_kernel`
            b_coming = merged_operand(merge_columns(b_competing_sums, b_competing_sums), PRECISION)
            b_share = dot_nn(b_key, b_coming, PRECISION)
        if COMPETITION != "none":
            flow, log = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
            # Always true. The branch keeps these two loads out of the software pipeline; with them in it, shared memory
            # allows only one program per SM (check: shared memory of the compiled kernel without the branch)
            if SPLIT or step < chunks:
                flow = tl.load(p_flow + CONSERVED_OUTGOING * plane, mask=inside, other=0.0)
                if COMPETITION == "softmax":
                    log = tl.load(p_flow + LOG_OUTGOING * plane, mask=inside, other=0.0)
        b_received_grad = operand(b_grad * received[:, None], PRECISION)
        b_products = mask_triangle(dot_nt(b_key, b_query, PRECISION), b_upper, FAST, PRECISION)
        if COMPETES:
            # dc through W; as early as possible, since only a vector stays live
            if SPLIT:
                overlap = tl.load(p_grad_flow + (GRAD_PLANES + tile) * plane, mask=inside, other=0.0)
            else:
                b_result = load_rows(p_result, base, rows, r_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
                overlap = tl.sum(b_grad * b_result, 1)
                tl.store(p_grad_flow + (GRAD_PLANES + tile) * plane, overlap, mask=inside)
            grad_competing, none = competing_gradient(p_flow, plane, keep, overlap), tl.zeros([C], tl.float32)
            b_weights = operand_columns(grad_competing, none, none, none, PRECISION)
            grad_share = pick(dot(b_products, b_weights, b_share, PRECISION), 0)
            if RAISED:
                total = tl.cumsum(grad_competing, 0, reverse=True)
                grad_share += eps * tl.sum(b_key.to(tl.float32), 1) * total
            b_competing_sums = dot(tl.trans(b_query_eps), b_weights, b_competing_sums, PRECISION)
        b_gradient = dot_nn(b_key, operand(b_memory, PRECISION), PRECISION)
        b_gradient = dot(b_products, b_received_grad, b_gradient, PRECISION) * competition[:, None]
        store_rows(p_grad_value, base, tokens, dv_token, inside, tile, b_gradient, E, BLOCK_E, PRECISION)
        b_memory = dot(tl.trans(b_query), b_received_grad, b_memory, PRECISION)
        b_value = load_rows(p_value, base, rows, v_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
        if not SPLIT and not COMPETES:
            b_result = load_rows(p_result, base, rows, r_token, keep, p_positions, tile, E, BLOCK_E).to(tl.float32)
            tl.store(p_grad_flow + (GRAD_PLANES + tile) * plane, tl.sum(b_grad * b_result, 1), mask=inside)
        if COMPETITION != "none":
            weight = tl.sum(b_value * b_gradient, 1)
            if RENORMALIZE:
                weight += competition * grad_share
            weight = materialize(weight)
            exponent = flow
            if tau is not None:
                exponent = competing_flow(flow, clamp, tau)
            if COMPETITION == "softmax":
                log = tl.where(inside, add_logs(log_start, log, FAST), log_later)
                outgoing, later, log_later = competition_gradient(weight, exponent, log, later, log_later, tokens)
            else:
                outgoing = weight * sigmoid(-clamped(flow, -clamp, clamp), False)
            unclamped = keep & (tl.abs(flow) <= clamp)
            if tau is not None:
                outgoing = tl.where(keep, outgoing / position, 0.0)
                tl.store(p_grad_flow + (GRAD_PLANES + TILES + tile) * plane, outgoing, mask=inside)
                outgoing = tl.where(unclamped, tau * outgoing, 0.0)
            else:
                outgoing = tl.where(unclamped, outgoing / position, 0.0)
                tl.store(p_grad_flow + (GRAD_PLANES + TILES + tile) * plane, outgoing, mask=inside)
            if SPLIT:
                none = tl.zeros([C], tl.float32)
                share = none
                if COMPETITION == "softmax":
                    share = tl.where(unclamped, decay(exponent, log_end) / position, 0.0)
                    if tau is not None:
                        share *= tau
                b_weights = operand_columns(outgoing, share, none, none, PRECISION)
                b_sums = dot(tl.trans(b_key), b_weights, b_sums, PRECISION)
                all_out, all_reaching = all_out + outgoing, all_reaching + share
    index, columns = row * segments + segment, tl.arange(0, BLOCK_D)
    if COMPETITION == "softmax":
        tl.store(p_carried + index * TILES + tile, decay(log_start, log_later) * later)
    if SPLIT:
        total = pick(b_sums, 0) + eps * tl.sum(all_out, 0)
        store_vector(p_conserved, (index * TILES + tile) * 2 + 1, columns, total, D)
        if tile == 0:
            store_vector(p_reaching, index, columns, pick(b_sums, 1) + eps * tl.sum(all_reaching, 0), D)
    else:
        store_memory(p_start_memory + row * (D * E), tile, b_memory, D, BLOCK_D, E, BLOCK_E)
