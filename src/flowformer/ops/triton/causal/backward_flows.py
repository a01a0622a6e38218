"""The kernel of the gradients of the flows, the second of the causal backward pass.

`backward_v.py` stores ⟨dR, R⟩, which gives dÎ/D, and dÔ/D without the part of later segments. From these come the
gradients of I·D and O·D, and their sums after each chunk; `backward_qk.py` propagates them to q and k.

Shapes as in `forward_flows.py`; `grads` are the planes of `planes.py`. Math: docs/kernels.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import kernel
from ..numerics import clamped, decay
from ..powers import competing_flow, load_gamma, load_tau
from ..precision import dot, dot_nn, dot_nt
from .columns import accumulator_columns, merge_columns, merged_operand, operand_columns, pick, stack4
from .gates import combine_decay, competing_gradient, load_tiles
from .planes import (
    AFTER_COMPETING_SUM,
    COMPETING_SUM,
    CONSERVED_KEY_SUM,
    CONSERVED_OUTGOING,
    CONSERVED_QUERY_SUM,
    COUNT,
    DECLINED,
    GRAD_PLANES,
    INVERSE_INCOMING,
    INVERSE_OUTGOING,
    QUERY_SUM,
    STATE_LOG_INCOMING,
    STATE_LOG_OUTGOING,
)
from .sums import load_count, load_vector, store_vector, sum_segments
from .tokens import inside_of, load_features, locate, locate_chunk, materialize


@triton.jit
def _load_end(p_grad_scalars, log_end):
    """Z after the last token, and the gradient of log Σ exp(Î), which passes through the kernels unchanged.

    The logarithm in the last state acts as one more token.
    """
    later, rest = 0.0, 0.0
    if p_grad_scalars is not None:
        p_grad_scalars += tl.program_id(0).to(tl.int64) * 3
        later = -tl.where(log_end > -1e37, tl.load(p_grad_scalars + STATE_LOG_OUTGOING), 0.0)
        rest = tl.load(p_grad_scalars + STATE_LOG_INCOMING)
    return later, rest


@triton.jit
def _store_start(p_start_scalars, log_first, later, rest):
    """The gradient of the scalars of the first state."""
    p_start_scalars += tl.program_id(0).to(tl.int64) * 3
    tl.store(p_start_scalars + COUNT, 0.0)
    tl.store(p_start_scalars + STATE_LOG_OUTGOING, tl.where(log_first > -1e37, -later, 0.0))
    tl.store(p_start_scalars + STATE_LOG_INCOMING, rest)


@triton.jit
def _later_segments(
    p_carried, p_reaching, p_logs, end, segment, segments, columns, TILES: tl.constexpr, WIDTH: tl.constexpr
):
    """Z after this segment, and the correction by Z of Σ (k + ε) dÔ/D of the segments after it.

    p_logs and p_carried point to the data of this head; `end` is Z after the last segment.
    """
    row = tl.program_id(0).to(tl.int64)
    later, log_later, own, taken = 0.0, 0.0, 0.0, tl.zeros(columns.shape, tl.float32)
    for begin in range(0, segments - segment, 16):
        # segments from right to left
        each = segments - 1 - begin - tl.arange(0, 16)
        log = tl.load(p_logs + each + 1, mask=each >= segment, other=0.0)
        after = tl.where(each == segments - 1, end, 0.0)
        for tile in range(TILES):
            inner = (each >= segment) & (each < segments - 1)
            after += tl.load(p_carried + (each + 1) * TILES + tile, mask=inner, other=0.0)
        _, after = tl.associative_scan((log, after), 0, combine_decay)
        after += decay(log, log_later) * later
        own += tl.sum(tl.where(each == segment, after, 0.0), 0)
        p_each = p_reaching + (row * segments + each)[:, None] * WIDTH + columns[None, :]
        mask = (each > segment)[:, None] & (columns < WIDTH)[None, :]
        taken += tl.sum(tl.load(p_each, mask=mask, other=0.0) * after[:, None], 0)
        final = tl.arange(0, 16) == 15
        later, log_later = tl.sum(tl.where(final, after, 0.0), 0), tl.sum(tl.where(final, log, 0.0), 0)
    return own, taken


@kernel
def flow_gradient_kernel(
    p_query, p_key, p_positions, p_bounds, p_powers, p_state_scalars, p_grad_sums, p_grad_scalars, p_flows, p_grads,
    p_logs, p_carried, p_conserved, p_reaching, p_partial, p_after, p_start_sums, p_start_scalars, p_competing,
    p_grad_powers,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, COMPETITION: tl.constexpr, RENORMALIZE: tl.constexpr, TILES: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The gradients of Î·D, Ô·D, I·D and O·D of each token, from right to left.

    Grid:   (B·H, segments). One program walks over one segment in chunks of C tokens.
    Reads:  Q, K; planes of `flows` and, per tile of E, of `grads`; sums of later segments (`conserved`,
            `carried`, `reaching`, if RENORMALIZE `competing`); the gradient of the last state.
    Writes: the first four planes of `grads`; dΣk and dΣq of each segment (`partial`); the gradients of the sums after
            each chunk (`after`, B·H, T, chunks, 4, D; 5 if RENORMALIZE), where dΣk and dΣq count later chunks of this
            segment only; the gradient of the first state; with powers, the segment's part of dτ = Σ d(τ Ô) Ô and
            dγ = Σ ⟨dR, R⟩ log σ(Î) (`grad_powers`, B·H, T, 2).
    """
    batch, head, start, first, last = locate(p_bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p_query += (batch * q_batch + head * q_head) * ALIGN
    p_key += (batch * k_batch + head // shared * k_head) * ALIGN
    p_flows += (batch * heads + head) * length
    p_grads += (batch * heads + head) * length
    count = load_count(p_state_scalars)
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    b_upper = tokens[:, None] <= tokens[None, :]
    index = row * segments + segment
    tau = None
    gamma = None
    if p_powers is not None:
        tau, gamma = load_tau(p_powers, head), load_gamma(p_powers, head, heads)
    SUMS: tl.constexpr = 5 if RENORMALIZE else 4
    p_after += index * (size // C) * (SUMS * D)
    none = tl.zeros([BLOCK_D], tl.float32)
    conserved_key = load_vector(p_grad_sums, row * SUMS + CONSERVED_KEY_SUM, columns, D)
    conserved_query = load_vector(p_grad_sums, row * SUMS + CONSERVED_QUERY_SUM, columns, D)
    p_logs += row * (segments + 1)
    log_first, log_next = tl.load(p_logs), tl.load(p_logs + segment + 1)
    later, rest = _load_end(p_grad_scalars, tl.load(p_logs + segments))
    if SPLIT:
        shares = segments * TILES
        conserved_key += sum_segments(p_conserved, (segment + 1) * TILES, shares, shares, columns, 0, D)
        if COMPETITION != "none":
            conserved_query += sum_segments(p_conserved, (segment + 1) * TILES, shares, shares, columns, 1, D)
    if COMPETITION == "softmax":
        p_carried += row * segments * TILES
        if SPLIT:
            later, taken = _later_segments(p_carried, p_reaching, p_logs, later, segment, segments, columns, TILES, D)
            conserved_query -= taken
    if segment == 0:
        reached = later
        if COMPETITION == "softmax":
            reached *= decay(log_first, log_next)
            for tile in range(TILES):
                reached += tl.load(p_carried + tile)
        _store_start(p_start_scalars, log_first, reached, rest)
    b_key_grads = accumulator_columns(none, conserved_key, none, none)
    b_query_grads = accumulator_columns(none, none, none, conserved_query)
    if RENORMALIZE:
        competing_sum = load_vector(p_grad_sums, row * SUMS + COMPETING_SUM, columns, D)
        if SPLIT:
            for tile in range(TILES):
                p_tile = p_competing + tile * tl.num_programs(0).to(tl.int64) * segments * D
                competing_sum += sum_segments(p_tile, segment + 1, segments, segments, columns, 0, D, 1)
        b_competing_sums = accumulator_columns(competing_sum, none, none, none)
    grad_tau, grad_gamma = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step
        base = first + chunk * C
        rows, keep, position = locate_chunk(p_positions, batch, length, base, tokens, start, last, count)
        b_query, b_query_eps = load_features(
            p_query, base, rows, q_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        b_key, b_key_eps = load_features(
            p_key, base, rows, k_token, keep, p_positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, PRECISION
        )
        p_flow, p_grad_flow, inside = p_flows + base + tokens, p_grads + base + tokens, inside_of(tokens, base, last)
        inverse_in = tl.load(p_flow + INVERSE_INCOMING * plane, mask=inside, other=0.0)
        inverse_out = tl.load(p_flow + INVERSE_OUTGOING * plane, mask=inside, other=0.0)
        overlap = load_tiles(p_grad_flow + GRAD_PLANES * plane, plane, keep, TILES)
        declined = tl.load(p_flow + DECLINED * plane, mask=keep, other=0.0)
        conserved_in = overlap * declined
        if gamma is not None:
            # σ(Î) ≥ 1/2, since Î ≥ 0
            grad_gamma += overlap * tl.log(1.0 - declined * position)
            conserved_in *= gamma
        conserved_out = tl.zeros([C], tl.float32)
        if COMPETITION != "none":
            conserved_out += load_tiles(p_grad_flow + (GRAD_PLANES + TILES) * plane, plane, inside, TILES)
            if COMPETITION == "softmax" and (SPLIT or p_grad_scalars is not None):
                flow = tl.load(p_flow + CONSERVED_OUTGOING * plane, mask=inside, other=0.0)
                if tau is not None:
                    share = tl.where(keep, decay(competing_flow(flow, clamp, tau), log_next) / position, 0.0)
                else:
                    share = tl.where(keep & (tl.abs(flow) <= clamp), decay(flow, log_next) / position, 0.0)
                conserved_out -= share * later
            if tau is not None:
                flow = tl.load(p_flow + CONSERVED_OUTGOING * plane, mask=inside, other=0.0)
                grad_tau += conserved_out * position * clamped(flow, -clamp, clamp)
                conserved_out = tl.where(tl.abs(flow) <= clamp, tau * conserved_out, 0.0)
        conserved_in, conserved_out = materialize(conserved_in), materialize(conserved_out)
        # before the wider products because of ptxas 12.8, see `flows_kernel`
        b_all_grads = merge_columns(b_key_grads, b_query_grads)
        b_coming = merged_operand(b_all_grads, PRECISION)
        if RENORMALIZE:
            store_vector(p_after, chunk * SUMS + AFTER_COMPETING_SUM, columns, pick(b_competing_sums, 0), D)
            grad_competing, no_tokens = competing_gradient(p_flow, plane, keep, overlap), tl.zeros([C], tl.float32)
            b_competing = operand_columns(grad_competing, no_tokens, no_tokens, no_tokens, PRECISION)
            b_competing_sums = dot(tl.trans(b_query_eps), b_competing, b_competing_sums, PRECISION)
        b_from_sinks = tl.where(b_upper, dot_nt(b_key, b_query_eps, PRECISION), 0.0)
        b_from_sources = tl.where(b_upper, dot_nt(b_query, b_key_eps, PRECISION), 0.0)
        b_sinks_after = dot_nn(b_key, b_coming, PRECISION)
        b_sources_after = dot_nn(b_query, b_coming, PRECISION)
        grad_out = tl.sum(b_from_sinks * conserved_in[None, :], 1) + pick(b_sinks_after, 1)
        grad_in = tl.sum(b_from_sources * conserved_out[None, :], 1) + pick(b_sources_after, 3)
        flow_out = -grad_out * inverse_out * inverse_out / position
        if RENORMALIZE:
            # I then only appears in Σq/I
            flow_in = -grad_in * inverse_in * inverse_in / position
        else:
            flow_in = -(overlap + grad_in * inverse_in) * inverse_in / position
        # in the order of the planes
        b_planes, which = stack4(flow_in, flow_out, conserved_in, conserved_out), tl.arange(0, 4)[None, :]
        tl.store(p_grad_flow[:, None] + which * plane, b_planes, mask=inside[:, None])
        pair = tl.arange(0, 8)[None, :]
        # columns are Σk, Σk/O, Σq, Σq/I; `after` begins with Σq
        p_to = p_after + (chunk * SUMS + (pair + 2) % 4) * D + columns[:, None]
        tl.store(p_to, b_all_grads, mask=(columns < D)[:, None] & (pair < 4))
        b_weights = operand_columns(flow_in, conserved_in, flow_out, conserved_out, PRECISION)
        b_key_grads = dot(tl.trans(b_query_eps), b_weights, b_key_grads, PRECISION)
        b_query_grads = dot(tl.trans(b_key_eps), b_weights, b_query_grads, PRECISION)
    store_vector(p_partial, index * 2, columns, pick(b_key_grads, 0), D)
    store_vector(p_partial, index * 2 + QUERY_SUM, columns, pick(b_query_grads, 2), D)
    if segment == 0:
        store_vector(p_start_sums, row * SUMS + CONSERVED_KEY_SUM, columns, pick(b_key_grads, 1), D)
        store_vector(p_start_sums, row * SUMS + CONSERVED_QUERY_SUM, columns, pick(b_query_grads, 3), D)
        if RENORMALIZE:
            store_vector(p_start_sums, row * SUMS + COMPETING_SUM, columns, pick(b_competing_sums, 0), D)
    if p_powers is not None:
        tl.store(p_grad_powers + index * 2, tl.sum(grad_tau, 0))
        tl.store(p_grad_powers + index * 2 + 1, tl.sum(grad_gamma, 0))
