"""Kernels of the causal backward pass that are not a forward kernel run from right to left.

With o_t = ⟨dR_t, R_t⟩ and w_t = ⟨V_t, dV_t⟩, which those kernels leave per token, and L the running log Σ exp(Ô):
    dÎ_t = o_t (1 − α_t),   dÔ_t = w_t − exp(Ô_t − L_t) Z_t,   Z_t = Σ_{s≥t} w_s exp(L_t − L_s)
L never falls, so no exponent is positive. From dÎ/D and dÔ/D come the gradients of I·D and O·D, and from all four those
of q and k, as sums over what came before a token and over what comes after it.

Shapes are those of `causal_forward.py`; per token also the planes of `grads`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .causal_parts import (
    CONSERVED_INCOMING,
    CONSERVED_OUTGOING,
    INVERSE_INCOMING,
    INVERSE_OUTGOING,
    LOG_OUTGOING,
    RUNTIME,
    bounded,
    exact_dot,
    load_count,
    load_features,
    load_rows,
    load_vector,
    load_weights,
    locate,
    log_add,
    pairs,
    pick,
    place,
    place_pair,
    store_rows,
    store_vector,
    sum_segments,
)
from .features import feature_gradient, sigmoid

# the planes of `grads`; the tiles of ⟨dR, R⟩ follow from GRAD_PLANES on, then those of ⟨V, dV⟩
GRAD_INCOMING = tl.constexpr(0)  # of I·D
GRAD_OUTGOING = tl.constexpr(1)  # of O·D
GRAD_CONSERVED_INCOMING = tl.constexpr(2)  # of Î·D
GRAD_CONSERVED_OUTGOING = tl.constexpr(3)  # of Ô·D
GRAD_PLANES = tl.constexpr(4)


@triton.jit
def decay(log, later):
    """exp(log − later), at most 1: a running logarithm of 10⁶ falls by its own rounding."""
    return tl.exp(tl.minimum(log - later, 0.0))


@triton.jit(do_not_specialize=RUNTIME)
def competition_gradient_kernel(
    bounds, flows, grads, plane, logs, carried, heads, length, size, segments, clamp,
    TILES: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dÔ without what later segments add, and Σ w exp(L_start − L) of each segment, which reaches the earlier ones."""
    batch, head, _, first, last = locate(bounds, heads, length, size)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = (batch * heads + head) * length
    tokens = tl.arange(0, C)
    log_start = tl.load(logs + row * (segments + 1) + segment)
    later, log_later = 0.0, tl.load(logs + row * (segments + 1) + segment + 1)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        rows = first + (chunks - 1 - step) * C + tokens
        at, inside = offset + rows, rows < last
        weight = tl.zeros([C], tl.float32)
        for tile in range(TILES):
            weight += tl.load(grads + (GRAD_PLANES + TILES + tile) * plane + at, mask=inside, other=0.0)
        flow = bounded(tl.load(flows + CONSERVED_OUTGOING * plane + at, mask=inside, other=0.0), clamp)
        log = log_add(log_start, tl.load(flows + LOG_OUTGOING * plane + at, mask=inside, other=0.0))
        log = tl.where(inside, log, log_later)
        decays = tl.where(tokens[:, None] <= tokens[None, :], decay(log[:, None], log[None, :]), 0.0)
        sums = tl.sum(decays * weight[None, :], 1) + decay(log, log_later) * later
        # a masked token may have any Ô, but the masked are zeroed where the gradient is used
        gradient = weight - decay(flow, log) * sums
        # where that of O·D will be: no kernel may write what threads of its own program read
        tl.store(grads + GRAD_OUTGOING * plane + at, gradient, mask=inside)
        later, log_later = tl.sum(tl.where(tokens == 0, sums, 0.0), 0), tl.min(log, 0)
    tl.store(carried + row * segments + segment, decay(log_start, log_later) * later)


@triton.jit(do_not_specialize=RUNTIME)
def conserved_gradient_kernel(
    query, key, positions, bounds, state_scalars, grad_scalars, flows, grads, plane, logs, carried, partial,
    start_scalars,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dÎ/D and dÔ/D of each token; Σ (q + ε) dÎ/D and Σ (k + ε) dÔ/D of each segment."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query += batch * q_batch + head * q_head
    key += batch * k_batch + head // shared * k_head
    offset = (batch * heads + head) * length
    count = load_count(state_scalars)
    columns = tl.arange(0, BLOCK_D)
    logs += row * (segments + 1)
    log_end, log_next = tl.load(logs + segments), tl.load(logs + segment + 1)
    # the logarithm after the last token acts as one more token
    grad_log, grad_rest = 0.0, 0.0
    if grad_scalars is not None:
        grad_log = tl.where(log_end > -1e37, tl.load(grad_scalars + row * 3 + 1), 0.0)
        grad_rest = tl.load(grad_scalars + row * 3 + 2)
    later = -grad_log * decay(log_next, log_end)
    for begin in range(segment + 1, segments, 16):
        each = begin + tl.arange(0, 16)
        sums = tl.load(carried + row * segments + each, mask=each < segments, other=0.0)
        later += tl.sum(sums * decay(log_next, tl.load(logs + each, mask=each < segments, other=0.0)), 0)
    if segment == 0:
        log_first = tl.load(logs)
        reached = tl.load(carried + row * segments) + decay(log_first, log_next) * later
        if not COMPETITION:
            reached = -grad_log
        tl.store(start_scalars + row * 3, 0.0)
        tl.store(start_scalars + row * 3 + 1, tl.where(log_first > -1e37, -reached, 0.0))
        tl.store(start_scalars + row * 3 + 2, grad_rest)

    after_key, after_query = tl.zeros([C, BLOCK_D], tl.float32), tl.zeros([C, BLOCK_D], tl.float32)
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        rows = first + chunk * C + tl.arange(0, C)
        keep, position = place(positions, batch, length, rows, start, last, count)
        q = load_features(query, rows, q_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT).to(tl.float32)
        k = load_features(key, rows, k_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT).to(tl.float32)
        at, inside = offset + rows, rows < last
        grad_in, grad_out = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        if ALLOCATION:
            overlap = tl.zeros([C], tl.float32)
            for tile in range(TILES):
                overlap += tl.load(grads + (GRAD_PLANES + tile) * plane + at, mask=keep, other=0.0)
            conserved = tl.load(flows + CONSERVED_INCOMING * plane + at, mask=keep, other=0.0)
            grad_in = tl.where(keep, overlap * sigmoid(-conserved, False) / position, 0.0)
        if COMPETITION:
            flow = tl.load(flows + CONSERVED_OUTGOING * plane + at, mask=keep, other=0.0)
            grad_out = tl.load(grads + GRAD_OUTGOING * plane + at, mask=keep, other=0.0)
            grad_out -= decay(bounded(flow, clamp), log_next) * later
            grad_out = tl.where(keep & (tl.abs(flow) <= clamp), grad_out / position, 0.0)
        tl.store(grads + GRAD_CONSERVED_INCOMING * plane + at, grad_in, mask=inside)
        tl.store(grads + GRAD_CONSERVED_OUTGOING * plane + at, grad_out, mask=inside)
        after_key += (q + eps) * grad_in[:, None]
        after_query += (k + eps) * grad_out[:, None]
    index = (row * segments + segment) * 2
    store_vector(partial, index, columns, tl.sum(after_key, 0), D)
    store_vector(partial, index + 1, columns, tl.sum(after_query, 0), D)


@triton.jit(do_not_specialize=RUNTIME)
def flow_gradient_kernel(
    query, key, positions, bounds, state_scalars, grad_sums, flows, grads, plane, conserved, partial, vectors,
    start_sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    heads, shared, length, size, segments, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of I·D and O·D, from right to left, and their sums over each segment.

    `vectors` (B·H, T, chunks, 4, D) get what the queries of a chunk receive from later keys.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query += batch * q_batch + head * q_head
    key += batch * k_batch + head // shared * k_head
    offset = (batch * heads + head) * length
    count = load_count(state_scalars)
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    upper = tokens[:, None] <= tokens[None, :]
    conserved_key = load_vector(grad_sums, row * 4 + 2, columns, D)
    conserved_query = load_vector(grad_sums, row * 4 + 3, columns, D)
    conserved_key += sum_segments(conserved, segment + 1, segments, segments, columns, 0, D)
    conserved_query += sum_segments(conserved, segment + 1, segments, segments, columns, 1, D)
    # the gradients of Σk/O and Σk as `pairs`, and those of Σq/I and Σq, without what later segments add to the second
    nothing = tl.zeros([BLOCK_D], tl.float32)
    key_grads, query_grads = place_pair(conserved_key, nothing), place_pair(conserved_query, nothing)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    vectors += (row * segments + segment) * (size // C) * (4 * D)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step
        rows = first + chunk * C + tokens
        keep, position = place(positions, batch, length, rows, start, last, count)
        q = load_features(query, rows, q_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT)
        k = load_features(key, rows, k_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT)
        query_eps, key_eps = (q.to(tl.float32) + eps).to(DOT), (k.to(tl.float32) + eps).to(DOT)
        at, inside = offset + rows, rows < last
        inverse_in = tl.load(flows + INVERSE_INCOMING * plane + at, mask=inside, other=0.0)
        inverse_out = tl.load(flows + INVERSE_OUTGOING * plane + at, mask=inside, other=0.0)
        conserved_in = tl.load(grads + GRAD_CONSERVED_INCOMING * plane + at, mask=inside, other=0.0)
        conserved_out = tl.load(grads + GRAD_CONSERVED_OUTGOING * plane + at, mask=inside, other=0.0)
        overlap = tl.zeros([C], tl.float32)
        for tile in range(TILES):
            overlap += tl.load(grads + (GRAD_PLANES + tile) * plane + at, mask=keep, other=0.0)
        from_sinks = tl.where(upper, tl.dot(k, tl.trans(query_eps), input_precision=PRECISION), 0.0)
        from_sources = tl.where(upper, tl.dot(q, tl.trans(key_eps), input_precision=PRECISION), 0.0)
        grad_out = tl.sum(from_sinks * conserved_in[None, :], 1)
        grad_in = tl.sum(from_sources * conserved_out[None, :], 1)
        grad_out += pick(exact_dot(key_grads, tl.trans(k), DOT, PRECISION), 0)
        grad_in += pick(exact_dot(query_grads, tl.trans(q), DOT, PRECISION), 0)
        flow_out = -grad_out * inverse_out * inverse_out / position
        flow_in = -(overlap + grad_in * inverse_in) * inverse_in / position
        tl.store(grads + GRAD_INCOMING * plane + at, flow_in, mask=inside)
        tl.store(grads + GRAD_OUTGOING * plane + at, flow_out, mask=inside)
        store_vector(vectors, chunk * 4, columns, pick(query_grads, 1), D)
        store_vector(vectors, chunk * 4 + 1, columns, pick(query_grads, 0), D)
        key_grads = tl.dot(pairs(conserved_in, flow_in, DOT), query_eps, key_grads, input_precision=PRECISION)
        query_grads = tl.dot(pairs(conserved_out, flow_out, DOT), key_eps, query_grads, input_precision=PRECISION)
    index = (row * segments + segment) * 2
    store_vector(partial, index, columns, pick(key_grads, 1), D)
    store_vector(partial, index + 1, columns, pick(query_grads, 1), D)
    if segment == 0:
        store_vector(start_sums, row * 4 + 2, columns, pick(key_grads, 0), D)
        store_vector(start_sums, row * 4 + 3, columns, pick(query_grads, 0), D)


@triton.jit(do_not_specialize=RUNTIME)
def gradient_kernel(
    own, other, left, right, grad_own, positions, bounds, state_scalars, grad_sums, flows, grads, plane, logs, starts,
    memories, conserved, partial, vectors, start_sums,
    a_batch, a_head, a_token, b_batch, b_head, b_token, u_batch, u_head, u_token, m_batch, m_head, m_token,
    r_batch, r_head, r_token,
    heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
    REVERSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ, from left to right with S; in reverse dK, from right to left with dS: the same with in and out exchanged.

    Row i of a chunk is the token whose gradient it is, column j one it met. Sums over what came `before` and what comes
    `after` the chunk are pairs, of the flows and of the conserved flows: one pair is carried, the other one lies in
    `vectors`. WHOLE says that a program has all features.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    own_head, other_head = head, head // shared
    if REVERSE:
        own_head, other_head = other_head, own_head
    own += batch * a_batch + own_head * a_head
    other += batch * b_batch + other_head * b_head
    left += batch * u_batch + own_head * u_head
    right += batch * m_batch + other_head * m_head
    grad_own += batch * r_batch + head * r_head
    offset = (batch * heads + head) * length
    count = load_count(state_scalars)
    log_start = tl.load(logs + row * (segments + 1) + segment)
    columns, values, tokens = tile * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, C)
    inner = columns < D

    index = row * segments + segment
    if REVERSE:
        first_carried = load_vector(grad_sums, row * 4, columns, D)
        first_carried += sum_segments(partial, segment + 1, segments, segments, columns, 0, D)
        first_conserved = load_vector(grad_sums, row * 4 + 2, columns, D)
        first_conserved += sum_segments(conserved, segment + 1, segments, segments, columns, 0, D)
    else:
        first_carried = load_vector(starts, index * 4, columns, D) + eps
        first_conserved = load_vector(starts, index * 4 + 2, columns, D) + eps
        later = load_vector(grad_sums, row * 4 + 1, columns, D)
        later += sum_segments(partial, segment + 1, segments, segments, columns, 1, D)
        if segment == 0:
            store_vector(start_sums, row * 4 + 1, columns, later + load_vector(partial, index * 2 + 1, columns, D), D)
        passing = tl.zeros([16, BLOCK_D], tl.float32)
        query_sum = load_vector(starts, index * 4 + 1, columns, D) + eps
        conserved_query = load_vector(starts, index * 4 + 3, columns, D) + eps
    carried = tl.zeros([16, BLOCK_D], tl.float32)
    # turned, since what comes out of the tensor cores must not be transposed
    turned = columns[None, :] * E + values[:, None]
    memory = tl.load(memories + index * (D * E) + turned, mask=inner[None, :] & (values < E)[:, None], other=0.0)

    lower, upper = tokens[:, None] >= tokens[None, :], tokens[:, None] <= tokens[None, :]
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    vectors += index * (size // C) * (4 * D)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if REVERSE else step
        rows = first + chunk * C + tokens
        keep, position = place(positions, batch, length, rows, start, last, count)
        a = load_features(own, rows, a_token, keep, tile, scale, D, BLOCK_D, MAP, FAST, DOT)
        b = load_features(other, rows, b_token, keep, tile, scale, D, BLOCK_D, MAP, FAST, DOT)
        u = load_rows(left, rows, u_token, keep, 0, E, BLOCK_E).to(DOT)
        m = load_rows(right, rows, m_token, keep, 0, E, BLOCK_E).to(tl.float32)
        at, inside = offset + rows, rows < last
        take, give = load_weights(flows, plane, at, keep, position, log_start, clamp, COMPETITION, ALLOCATION)
        inverse = tl.load(flows + INVERSE_INCOMING * plane + at, mask=inside, other=0.0)
        other_inverse = tl.load(flows + INVERSE_OUTGOING * plane + at, mask=inside, other=0.0)
        flow = tl.load(grads + GRAD_INCOMING * plane + at, mask=inside, other=0.0)
        other_flow = tl.load(grads + GRAD_OUTGOING * plane + at, mask=inside, other=0.0)
        conserved_flow = tl.load(grads + GRAD_CONSERVED_INCOMING * plane + at, mask=inside, other=0.0)
        other_conserved = tl.load(grads + GRAD_CONSERVED_OUTGOING * plane + at, mask=inside, other=0.0)
        if REVERSE:
            take, give = give, take
            inverse, other_inverse = other_inverse, inverse
            flow, other_flow = other_flow, flow
            conserved_flow, other_conserved = other_conserved, conserved_flow

        given, one = (m * give[:, None]).to(DOT), tl.full([C], 1.0, tl.float32)
        passed = tl.dot(u, tl.trans(given), input_precision=PRECISION) * take[:, None]
        gradient = tl.dot(u, memory.to(DOT), input_precision=PRECISION) * take[:, None]
        met = tl.where(upper if REVERSE else lower, passed, 0.0).to(DOT)
        gradient = tl.dot(met, b, gradient, input_precision=PRECISION)
        if WHOLE and not REVERSE:
            # ⟨q, dq⟩ of this part is ⟨dR, R⟩, and what I takes away again must be that to the last digit
            overlap = tl.sum(gradient * a.to(tl.float32), 1)
            for part in range(TILES):
                overlap -= tl.load(grads + (GRAD_PLANES + part) * plane + at, mask=keep, other=0.0)
            flow -= overlap * inverse / position
        weights = tl.where(upper, inverse[:, None] * other_conserved[None, :] + other_flow[None, :], 0.0)
        weights += tl.where(lower, conserved_flow[:, None] * other_inverse[None, :] + flow[:, None], 0.0)
        gradient = tl.dot(weights.to(DOT), b, gradient, input_precision=PRECISION)
        rest = inverse * tl.cumsum(other_conserved, 0, reverse=True) + tl.cumsum(other_flow, 0, reverse=True)
        gradient += eps * rest[:, None]

        carry, carry_conserved = first_carried + pick(carried, 0), first_conserved + pick(carried, 1)
        if REVERSE:
            after, after_conserved = carry, carry_conserved
            before = load_vector(vectors, chunk * 4 + 2, columns, D)
            before_conserved = load_vector(vectors, chunk * 4 + 3, columns, D)
        else:
            before, before_conserved = carry, carry_conserved
            after = later + load_vector(vectors, chunk * 4, columns, D)
            after_conserved = load_vector(vectors, chunk * 4 + 1, columns, D)
        gradient += flow[:, None] * before[None, :] + conserved_flow[:, None] * before_conserved[None, :]
        gradient += after[None, :] + inverse[:, None] * after_conserved[None, :]
        gradient = feature_gradient(gradient, a.to(tl.float32), scale, MAP)
        gradient = tl.where(keep[:, None], gradient, 0.0)
        store_rows(grad_own, rows, r_token, inside, tile, gradient, D, BLOCK_D)

        if REVERSE:
            other_eps = (b.to(tl.float32) + eps).to(DOT)
            sums = pairs(other_flow, other_conserved, DOT)
            carried = tl.dot(sums, other_eps, carried, input_precision=PRECISION)
        else:
            store_vector(vectors, chunk * 4 + 2, columns, query_sum + pick(passing, 0), D)
            store_vector(vectors, chunk * 4 + 3, columns, conserved_query + pick(passing, 1), D)
            passing = tl.dot(pairs(one, inverse, DOT), a, passing, input_precision=PRECISION)
            carried = tl.dot(pairs(one, other_inverse, DOT), b, carried, input_precision=PRECISION)
        memory = tl.dot(tl.trans(given), b, memory, input_precision=PRECISION)
    if REVERSE and segment == 0:
        store_vector(start_sums, row * 4, columns, first_carried + pick(carried, 0), D)
