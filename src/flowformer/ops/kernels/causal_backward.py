"""Kernels of the causal backward pass up to the gradients of the flows; `causal_gradient.py` takes those on to q and k.

With o_t = ⟨dR_t, R_t⟩ and w_t = ⟨V_t, dV_t⟩ per token, and L the running log Σ exp(Ô):
    dÎ_t = o_t (1 − α_t),   dÔ_t = w_t − exp(Ô_t − L_t) Z_t,   Z_t = Σ_{s≥t} w_s exp(L_t − L_s)
L never falls, so no exponent is positive. From dÎ/D and dÔ/D come the gradients of I·D and O·D.

Two kernels do it, `value_gradient` and `flow_gradient`. Where a head has several segments, `grad_memory` comes first,
for the dS after each. What later segments add to Z reaches a token by exp(Ô − L_end): so a segment leaves
Σ (k + ε) dÔ/D without it and Σ (k + ε) exp(Ô − L_end)/D, which `flow_gradient` puts together. Both dÎ and dÔ are linear
in o and w: the tiles of a token's values each add their share.

Shapes are those of `causal_forward.py`; per token also the planes of `grads`, of `causal_parts.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .causal_forward import load_memory, store_memory
from .causal_parts import (
    CONSERVED_OUTGOING,
    DECLINED,
    GRAD_PLANES,
    INVERSE_INCOMING,
    INVERSE_OUTGOING,
    LOG_OUTGOING,
    RUNTIME,
    across,
    add_logs,
    beside,
    bounded,
    folded,
    four,
    halves,
    inside_of,
    load_count,
    load_features,
    load_rows,
    load_tiles,
    load_vector,
    load_weights,
    locate,
    pick,
    place,
    project,
    settled,
    store_rows,
    store_vector,
    sum_segments,
    totals,
    triangle,
    within,
)
from .features import sigmoid


@triton.jit
def decay(log, later):
    """exp(log − later), at most 1: a running logarithm of 10⁶ falls by its own rounding."""
    return tl.exp(tl.minimum(log - later, 0.0))


@triton.jit
def earlier(later_log, later_sum, log, sum):
    """L and Z of the first of two neighbouring runs of tokens, the later one given first."""
    return log, sum + decay(log, later_log) * later_sum


@triton.jit
def sum_and_least(sum, least, other_sum, other_least):
    return sum + other_sum, tl.minimum(least, other_least)


@triton.jit
def competition_gradient(weight, flow, log, later, log_later, tokens):
    """dÔ of a chunk before the clamp, and Z and L of its first token, from those after it."""
    _, sums = tl.associative_scan((log, weight), 0, earlier, reverse=True)
    sums += decay(log, log_later) * later
    # a masked token may have any Ô, but the masked are zeroed where the gradient is used
    gradient = weight - decay(flow, log) * sums
    first, least = tl.reduce((tl.where(tokens == 0, sums, 0.0), log), 0, sum_and_least)
    return gradient, first, least


@triton.jit
def load_end(grad_scalars, log_end):
    """Z after the last token: the logarithm that the state ends with acts as one more token; and what passes by."""
    later, rest = 0.0, 0.0
    if grad_scalars is not None:
        grad_scalars += tl.program_id(0).to(tl.int64) * 3
        later = -tl.where(log_end > -1e37, tl.load(grad_scalars + 1), 0.0)
        rest = tl.load(grad_scalars + 2)
    return later, rest


@triton.jit
def store_start(start_scalars, log_first, later, rest):
    """The gradient of the scalars that the sequence begins with."""
    start_scalars += tl.program_id(0).to(tl.int64) * 3
    tl.store(start_scalars, 0.0)
    tl.store(start_scalars + 1, tl.where(log_first > -1e37, -later, 0.0))
    tl.store(start_scalars + 2, rest)


@triton.jit
def later_segments(carried, reaching, logs, end, segment, segments, columns, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """Z after this segment, and what Z takes from Σ (k + ε) dÔ/D of the segments after it.

    `logs` and `carried` are those of this head, `end` is Z after the last segment.
    """
    row = tl.program_id(0).to(tl.int64)
    later, log_later, own, taken = 0.0, 0.0, 0.0, tl.zeros(columns.shape, tl.float32)
    for begin in range(0, segments - segment, 16):
        # the last comes first
        each = segments - 1 - begin - tl.arange(0, 16)
        log = tl.load(logs + each + 1, mask=each >= segment, other=0.0)
        after = tl.where(each == segments - 1, end, 0.0)
        for tile in range(TILES):
            inner = (each >= segment) & (each < segments - 1)
            after += tl.load(carried + (each + 1) * TILES + tile, mask=inner, other=0.0)
        _, after = tl.associative_scan((log, after), 0, earlier)
        after += decay(log, log_later) * later
        own += tl.sum(tl.where(each == segment, after, 0.0), 0)
        at = reaching + (row * segments + each)[:, None] * WIDTH + columns[None, :]
        mask = (each > segment)[:, None] & (columns < WIDTH)[None, :]
        taken += tl.sum(tl.load(at, mask=mask, other=0.0) * after[:, None], 0)
        final = tl.arange(0, 16) == 15
        later, log_later = tl.sum(tl.where(final, after, 0.0), 0), tl.sum(tl.where(final, log, 0.0), 0)
    return own, taken


@triton.jit(do_not_specialize=RUNTIME)
def grad_memory_kernel(
    query, grad, result, positions, bounds, flows, grads, partial, conserved,
    q_batch, q_head, q_token, g_batch, g_head, g_token, r_batch, r_head, r_token,
    plane, heads, shared, length, size, segments, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Σ qᵀ α/(I·D) dR and Σ (q + ε) dÎ/D of each segment, and ⟨dR, R⟩ of each token."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    g_token = E if DENSE else g_token * ALIGN
    r_token = E if DENSE else r_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    query += (batch * q_batch + head * q_head) * ALIGN
    grad += (batch * g_batch + head * g_head) * ALIGN
    result += (batch * r_batch + head * r_head) * ALIGN
    flows += (batch * heads + head) * length
    grads += (batch * heads + head) * length
    tokens = tl.arange(0, C)
    memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    sums, all_in = tl.zeros([BLOCK_D, 16], tl.float32), tl.zeros([C], tl.float32)
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        base = first + chunk * C
        rows, keep, _ = place(positions, batch, length, base, tokens, start, last, 0.0)
        q, _ = load_features(query, base, rows, q_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        g = load_rows(grad, base, rows, g_token, keep, positions, tile, E, BLOCK_E).to(tl.float32)
        r = load_rows(result, base, rows, r_token, keep, positions, tile, E, BLOCK_E).to(tl.float32)
        at, overlap = flows + base + tokens, tl.sum(g * r, 1)
        tl.store(grads + base + tokens + (GRAD_PLANES + tile) * plane, overlap, mask=inside_of(tokens, base, last))
        conserved_in = overlap * tl.load(at + DECLINED * plane, mask=keep, other=0.0)
        none = tl.zeros([C], tl.float32)
        sums = tl.dot(tl.trans(q), halves(conserved_in, none, none, none, DOT), sums, input_precision=PRECISION)
        all_in += conserved_in
        received, _ = load_weights(at, plane, keep)
        memory = tl.dot(tl.trans(q), (g * received[:, None]).to(DOT), memory, input_precision=PRECISION)
    index = row * segments + segment
    store_memory(partial + index * (D * E), tile, memory, D, BLOCK_D, E, BLOCK_E)
    total = pick(sums, 0) + eps * tl.sum(all_in, 0)
    store_vector(conserved, (index * TILES + tile) * 2, tl.arange(0, BLOCK_D), total, D)


@triton.jit(do_not_specialize=RUNTIME)
def value_gradient_kernel(
    query, key, value, grad, result, grad_value, positions, bounds, state_scalars, flows, grads, logs, memories,
    start_memory, carried, conserved, reaching,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, g_batch, g_head, g_token, r_batch,
    r_head, r_token, dv_batch, dv_head, dv_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dV, from right to left with dS, and dÔ/D of each token without what later segments add; `carried` gets Z.

    Where SPLIT, also Σ (k + ε) dÔ/D of each segment and Σ (k + ε) exp(Ô − L_end)/D, into `reaching`. Otherwise ⟨dR, R⟩.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    g_token = E if DENSE else g_token * ALIGN
    r_token = E if DENSE else r_token * ALIGN
    dv_token = E if DENSE else dv_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    query += (batch * q_batch + head * q_head) * ALIGN
    key += (batch * k_batch + head // shared * k_head) * ALIGN
    value += (batch * v_batch + head // shared * v_head) * ALIGN
    grad += (batch * g_batch + head * g_head) * ALIGN
    grad_value += (batch * dv_batch + head * dv_head) * ALIGN
    flows += (batch * heads + head) * length
    grads += (batch * heads + head) * length
    count, tokens = load_count(state_scalars), tl.arange(0, C)
    logs += row * (segments + 1) + segment
    log_start, log_end = tl.load(logs), tl.load(logs + 1)
    later, log_later = 0.0, log_end
    if SPLIT:
        sums = tl.zeros([BLOCK_D, 16], tl.float32)
        all_out, all_reaching = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    else:
        result += (batch * r_batch + head * r_head) * ALIGN
    memory, upper = tl.zeros([BLOCK_D, BLOCK_E], tl.float32), triangle(C, True)
    if memories is not None:
        memory += load_memory(memories + (row * segments + segment) * (D * E), tile, D, BLOCK_D, E, BLOCK_E)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        base = first + (chunks - 1 - step) * C
        rows, keep, position = place(positions, batch, length, base, tokens, start, last, count)
        q, _ = load_features(query, base, rows, q_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        k, _ = load_features(key, base, rows, k_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        g = load_rows(grad, base, rows, g_token, keep, positions, tile, E, BLOCK_E).to(tl.float32)
        at, grads_at, inside = flows + base + tokens, grads + base + tokens, inside_of(tokens, base, last)
        received, competition = load_weights(at, plane, keep)
        if COMPETITION != "none":
            flow, log = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
            # always so; but where the pipeline holds one tensor more, a branch keeps these two, which are needed last,
            # out of it: with them, a processor would have room for one program
            if SPLIT or step < chunks:
                flow = tl.load(at + CONSERVED_OUTGOING * plane, mask=inside, other=0.0)
                if COMPETITION == "softmax":
                    log = tl.load(at + LOG_OUTGOING * plane, mask=inside, other=0.0)
        received_grad = (g * received[:, None]).to(DOT)
        met = within(across(k, q, PRECISION), upper, FAST, DOT)
        gradient = project(k, memory.to(DOT), PRECISION)
        gradient = tl.dot(met, received_grad, gradient, input_precision=PRECISION) * competition[:, None]
        store_rows(grad_value, base, tokens, dv_token, inside, tile, gradient, E, BLOCK_E)
        memory = tl.dot(tl.trans(q), received_grad, memory, input_precision=PRECISION)
        v = load_rows(value, base, rows, v_token, keep, positions, tile, E, BLOCK_E).to(tl.float32)
        if not SPLIT:
            r = load_rows(result, base, rows, r_token, keep, positions, tile, E, BLOCK_E).to(tl.float32)
            tl.store(grads_at + (GRAD_PLANES + tile) * plane, tl.sum(g * r, 1), mask=inside)
        if COMPETITION != "none":
            weight = settled(tl.sum(v * gradient, 1))
            if COMPETITION == "softmax":
                log = tl.where(inside, add_logs(log_start, log, FAST), log_later)
                outgoing, later, log_later = competition_gradient(weight, flow, log, later, log_later, tokens)
            else:
                outgoing = weight * sigmoid(-bounded(flow, clamp), False)
            free = keep & (tl.abs(flow) <= clamp)
            outgoing = tl.where(free, outgoing / position, 0.0)
            tl.store(grads_at + (GRAD_PLANES + TILES + tile) * plane, outgoing, mask=inside)
            if SPLIT:
                none = tl.zeros([C], tl.float32)
                share = none
                if COMPETITION == "softmax":
                    share = tl.where(free, decay(flow, log_end) / position, 0.0)
                weights = halves(outgoing, share, none, none, DOT)
                sums = tl.dot(tl.trans(k), weights, sums, input_precision=PRECISION)
                all_out, all_reaching = all_out + outgoing, all_reaching + share
    index, columns = row * segments + segment, tl.arange(0, BLOCK_D)
    if COMPETITION == "softmax":
        tl.store(carried + index * TILES + tile, decay(log_start, log_later) * later)
    if SPLIT:
        total = pick(sums, 0) + eps * tl.sum(all_out, 0)
        store_vector(conserved, (index * TILES + tile) * 2 + 1, columns, total, D)
        if tile == 0:
            store_vector(reaching, index, columns, pick(sums, 1) + eps * tl.sum(all_reaching, 0), D)
    else:
        store_memory(start_memory + row * (D * E), tile, memory, D, BLOCK_D, E, BLOCK_E)


@triton.jit(do_not_specialize=RUNTIME)
def flow_gradient_kernel(
    query, key, positions, bounds, state_scalars, grad_sums, grad_scalars, flows, grads, logs, carried, conserved,
    reaching, partial, after, start_sums, start_scalars,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, COMPETITION: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The gradients of Î·D and Ô·D; those of I·D and O·D, from right to left, and their sums over each segment.

    `after` (B·H, T, chunks, 4, D) gets what the tokens of a chunk receive from later ones, those of this segment only
    where it comes from the flows: queries from keys, by Σq and Σq/I, then keys from queries, by Σk and Σk/O.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query += (batch * q_batch + head * q_head) * ALIGN
    key += (batch * k_batch + head // shared * k_head) * ALIGN
    flows += (batch * heads + head) * length
    grads += (batch * heads + head) * length
    count = load_count(state_scalars)
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    upper = tokens[:, None] <= tokens[None, :]
    index = row * segments + segment
    after += index * (size // C) * (4 * D)
    none = tl.zeros([BLOCK_D], tl.float32)
    conserved_key = load_vector(grad_sums, row * 4 + 2, columns, D)
    conserved_query = load_vector(grad_sums, row * 4 + 3, columns, D)
    logs += row * (segments + 1)
    log_first, log_next = tl.load(logs), tl.load(logs + segment + 1)
    later, rest = load_end(grad_scalars, tl.load(logs + segments))
    if SPLIT:
        shares = segments * TILES
        conserved_key += sum_segments(conserved, (segment + 1) * TILES, shares, shares, columns, 0, D)
        if COMPETITION != "none":
            conserved_query += sum_segments(conserved, (segment + 1) * TILES, shares, shares, columns, 1, D)
    if COMPETITION == "softmax":
        carried += row * segments * TILES
        if SPLIT:
            later, taken = later_segments(carried, reaching, logs, later, segment, segments, columns, TILES, D)
            conserved_query -= taken
    if segment == 0:
        reached = later
        if COMPETITION == "softmax":
            reached *= decay(log_first, log_next)
            for tile in range(TILES):
                reached += tl.load(carried + tile)
        store_start(start_scalars, log_first, reached, rest)
    key_grads = beside(none, conserved_key, none, none)
    query_grads = beside(none, none, none, conserved_query)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step
        base = first + chunk * C
        rows, keep, position = place(positions, batch, length, base, tokens, start, last, count)
        q, query_eps = load_features(
            query, base, rows, q_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT
        )
        k, key_eps = load_features(key, base, rows, k_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        at, grads_at, inside = flows + base + tokens, grads + base + tokens, inside_of(tokens, base, last)
        inverse_in = tl.load(at + INVERSE_INCOMING * plane, mask=inside, other=0.0)
        inverse_out = tl.load(at + INVERSE_OUTGOING * plane, mask=inside, other=0.0)
        overlap = load_tiles(grads_at + GRAD_PLANES * plane, plane, keep, TILES)
        conserved_in = overlap * tl.load(at + DECLINED * plane, mask=keep, other=0.0)
        conserved_out = tl.zeros([C], tl.float32)
        if COMPETITION != "none":
            conserved_out += load_tiles(grads_at + (GRAD_PLANES + TILES) * plane, plane, inside, TILES)
            if COMPETITION == "softmax" and (SPLIT or grad_scalars is not None):
                flow = tl.load(at + CONSERVED_OUTGOING * plane, mask=inside, other=0.0)
                share = tl.where(keep & (tl.abs(flow) <= clamp), decay(flow, log_next) / position, 0.0)
                conserved_out -= share * later
        conserved_in, conserved_out = settled(conserved_in), settled(conserved_out)
        # before the wider products, as in the forward pass
        all_grads = totals(key_grads, query_grads)
        coming = folded(all_grads, DOT)
        from_sinks = tl.where(upper, across(k, query_eps, PRECISION), 0.0)
        from_sources = tl.where(upper, across(q, key_eps, PRECISION), 0.0)
        sinks_after = project(k, coming, PRECISION)
        sources_after = project(q, coming, PRECISION)
        grad_out = tl.sum(from_sinks * conserved_in[None, :], 1) + pick(sinks_after, 1)
        grad_in = tl.sum(from_sources * conserved_out[None, :], 1) + pick(sources_after, 3)
        flow_out = -grad_out * inverse_out * inverse_out / position
        flow_in = -(overlap + grad_in * inverse_in) * inverse_in / position
        # in the order of the planes
        planes, which = four(flow_in, flow_out, conserved_in, conserved_out), tl.arange(0, 4)[None, :]
        tl.store(grads_at[:, None] + which * plane, planes, mask=inside[:, None])
        pair = tl.arange(0, 8)[None, :]
        to = after + (chunk * 4 + (pair + 2) % 4) * D + columns[:, None]
        tl.store(to, all_grads, mask=(columns < D)[:, None] & (pair < 4))
        weights = halves(flow_in, conserved_in, flow_out, conserved_out, DOT)
        key_grads = tl.dot(tl.trans(query_eps), weights, key_grads, input_precision=PRECISION)
        query_grads = tl.dot(tl.trans(key_eps), weights, query_grads, input_precision=PRECISION)
    store_vector(partial, index * 2, columns, pick(key_grads, 0), D)
    store_vector(partial, index * 2 + 1, columns, pick(query_grads, 2), D)
    if segment == 0:
        store_vector(start_sums, row * 4 + 2, columns, pick(key_grads, 1), D)
        store_vector(start_sums, row * 4 + 3, columns, pick(query_grads, 3), D)
