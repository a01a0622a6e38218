"""Kernels of the causal forward pass.

A program walks over one segment of one head in chunks of C tokens. Inside a chunk all flows come from P = q kᵀ (C × C);
what came before is a sum. Where a head has several segments, what came before each is found in dependent levels: Σk and
Σq (`sums`), which make I and O whole; Σk/O and Σq/I (`flows`), which add to Ô (`conserve`) and Î (`output`) what one
product with a constant vector gives; log Σ exp(Ô) (`conserve`) and S (`memory`).

Shapes: B sequences, H query heads, N tokens, T segments, D features, E values. Per token, (B, H, N): the planes of
`flows`. Per segment, (B·H, T, ...); per chunk, (B·H, T, chunks, ...). `positions` (B, N) counts the valid tokens up to
each, negative where masked; `bounds` are the cu_seqlens of packed sequences, which are one row of N tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .causal_parts import (
    COMPETITION_WEIGHT,
    CONSERVED_OUTGOING,
    DECLINED,
    FORWARD_PLANES,
    INVERSE_INCOMING,
    INVERSE_OUTGOING,
    LOG_OUTGOING,
    NOTHING,
    RECEIVED,
    RUNTIME,
    across,
    beside,
    eight,
    folded,
    four,
    halves,
    inside_of,
    load_count,
    load_features,
    load_log,
    load_rows,
    load_vector,
    locate,
    log_add,
    make_competition,
    pick,
    place,
    project,
    running_log_sum,
    store_rows,
    store_vector,
    sum_segments,
    totals,
    triangle,
    within,
)
from .features import centred_feature, sigmoid


@triton.jit(do_not_specialize=RUNTIME)
def sums_kernel(
    query, key, positions, bounds, partial,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    heads, shared, length, size, segments, scale, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Σk and Σq of each segment, from right to left: the next kernel begins with what is then in the cache."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    query += (batch * q_batch + head * q_head) * ALIGN
    key += (batch * k_batch + head // shared * k_head) * ALIGN
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    key_sums, query_sums = tl.zeros([BLOCK_D, 16], tl.float32), tl.zeros([BLOCK_D, 16], tl.float32)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        base = first + (chunks - 1 - step) * C
        rows, keep, _ = place(positions, batch, length, base, tokens, start, last, 0.0)
        k, _ = load_features(key, base, rows, k_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        q, _ = load_features(query, base, rows, q_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        one = tl.where(keep[:, None] & (tl.arange(0, 16) == 0)[None, :], 1.0, 0.0).to(DOT)
        key_sums = tl.dot(tl.trans(k), one, key_sums, input_precision=PRECISION)
        query_sums = tl.dot(tl.trans(q), one, query_sums, input_precision=PRECISION)
    index = (tl.program_id(0).to(tl.int64) * segments + tl.program_id(1)) * 2
    store_vector(partial, index, columns, pick(key_sums, 0), D)
    store_vector(partial, index + 1, columns, pick(query_sums, 0), D)


@triton.jit(do_not_specialize=RUNTIME)
def flows_kernel(
    query, key, positions, bounds, state_sums, state_scalars, partial, conserved, flows, sums, local_flows, local_sums,
    logs, end_sums, end_scalars,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    plane, heads, shared, length, size, segments, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, SPLIT: tl.constexpr,
    KEEP: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """All flows of each token, and the sums before each chunk, with ε, where a backward pass is to KEEP them.

    Where SPLIT, Î, Ô, Σk/O and Σq/I know of their segment only: `local_flows` and `local_sums` get them, (2, B, H, N)
    and (B·H, T, chunks, 2, D), and `conserved` what the segment adds to Σk/O and Σq/I.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query += (batch * q_batch + head * q_head) * ALIGN
    key += (batch * k_batch + head // shared * k_head) * ALIGN
    flows += (batch * heads + head) * length
    count = load_count(state_scalars)
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    lower = tokens[:, None] >= tokens[None, :]

    key_sum = load_vector(state_sums, row * 4, columns, D)
    query_sum = load_vector(state_sums, row * 4 + 1, columns, D)
    if SPLIT:
        local_flows += (batch * heads + head) * length
        key_sum += sum_segments(partial, 0, segment, segments, columns, 0, D)
        query_sum += sum_segments(partial, 0, segment, segments, columns, 1, D)
    # the ε of both sides stands once in the sum, once in every token
    once = tl.where(columns < D, eps, 0.0)
    conserved_key, conserved_query = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    if not SPLIT:
        conserved_key += load_vector(state_sums, row * 4 + 2, columns, D) + once
        conserved_query += load_vector(state_sums, row * 4 + 3, columns, D) + once
    none = tl.zeros([BLOCK_D], tl.float32)
    key_sums = beside(key_sum + once, conserved_key, none, none)
    query_sums = beside(none, none, query_sum + once, conserved_query)
    first_chunk = (row * segments + segment) * (size // C)
    log_sum = NOTHING

    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        base = first + chunk * C
        rows, keep, position = place(positions, batch, length, base, tokens, start, last, count)
        q, query_eps = load_features(
            query, base, rows, q_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT
        )
        k, key_eps = load_features(key, base, rows, k_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        seen = lower
        if positions is not None:
            seen = lower & keep[None, :]
        # stored before the wider products need their place: ptxas 12.8 loses the address of what shares it with them
        all_sums = totals(key_sums, query_sums)
        before = folded(all_sums, DOT)
        # a product for each direction, so that every sum runs along a row, inside a warp
        to_sinks = tl.where(seen, across(query_eps, k, PRECISION), 0.0)
        to_sources = tl.where(seen, across(key_eps, q, PRECISION), 0.0)
        sinks_before = project(query_eps, before, PRECISION)
        sources_before = project(key_eps, before, PRECISION)
        incoming = tl.sum(to_sinks, 1) + pick(sinks_before, 0) + flow_eps
        outgoing = tl.sum(to_sources, 1) + pick(sources_before, 2) + flow_eps
        inverse_in = tl.where(keep, position / incoming, 0.0)
        inverse_out = tl.where(keep, position / outgoing, 0.0)
        conserved_in = tl.sum(to_sinks * inverse_out[None, :], 1) + pick(sinks_before, 1) + flow_eps
        conserved_out = tl.sum(to_sources * inverse_in[None, :], 1) + pick(sources_before, 3) + flow_eps
        each = 1.0 / position
        conserved_in, conserved_out = conserved_in * each, conserved_out * each
        inside, here = inside_of(tokens, base, last), first_chunk + chunk
        at = (flows + base + tokens)[:, None]
        if SPLIT:
            which, local_at = tl.arange(0, 4)[None, :], (local_flows + base + tokens)[:, None]
            planes = four(inverse_in, inverse_out, conserved_in, conserved_out)
            to = tl.where(which == 0, at + INVERSE_INCOMING * plane, at + INVERSE_OUTGOING * plane)
            to = tl.where(which < 2, to, local_at + (which - 2) * plane)
            tl.store(to, planes, mask=inside[:, None] & (KEEP | (which != 1)))
        else:
            received, declined = receive(inverse_in, conserved_in, keep, each, FAST, ALLOCATION)
            which = tl.arange(0, 8)[None, :]
            # in the order of the planes
            planes = eight(inverse_in, conserved_out, each, received, inverse_out, declined, each, each)
            written = (which != LOG_OUTGOING) & (which < (COMPETITION_WEIGHT if KEEP else FORWARD_PLANES))
            tl.store(at + which * plane, planes, mask=inside[:, None] & written)
            if COMPETITION == "softmax":
                log, log_sum = running_log_sum(conserved_out, keep, log_sum, clamp, FAST)
                tl.store(flows + base + tokens + LOG_OUTGOING * plane, log, mask=inside)
        if KEEP:
            pair = tl.arange(0, 8)[None, :]
            to = sums + here * (4 * D) + (pair % 2 * 2 + pair // 2) * D
            if SPLIT:
                local = local_sums + here * (2 * D) + pair // 2 * D
                to = tl.where(pair % 2 == 0, sums + here * (4 * D) + pair // 2 * D, local)
            tl.store(to + columns[:, None], all_sums, mask=(columns < D)[:, None] & (pair < 4))
        one = tl.where(keep, 1.0, 0.0)
        weights = halves(one, inverse_out, one, inverse_in, DOT)
        key_sums = tl.dot(tl.trans(k), weights, key_sums, input_precision=PRECISION)
        query_sums = tl.dot(tl.trans(q), weights, query_sums, input_precision=PRECISION)

    if segment == segments - 1:
        store_vector(end_sums, row * 4, columns, pick(key_sums, 0) - once, D)
        store_vector(end_sums, row * 4 + 1, columns, pick(query_sums, 2) - once, D)
    conserved_key, conserved_query = pick(key_sums, 1), pick(query_sums, 3)
    if SPLIT:
        index = (row * segments + segment) * 2
        store_vector(conserved, index, columns, conserved_key, D)
        store_vector(conserved, index + 1, columns, conserved_query, D)
    else:
        store_vector(end_sums, row * 4 + 2, columns, conserved_key - once, D)
        store_vector(end_sums, row * 4 + 3, columns, conserved_query - once, D)
        log_start = load_log(state_scalars, 1)
        tl.store(logs + row * 2, log_start)
        finish(positions, state_scalars, logs, end_scalars, batch, length, start, last,
               log_add(log_start, log_sum), segments, COMPETITION)  # fmt: skip


@triton.jit
def receive(inverse_in, conserved_in, keep, each, FAST: tl.constexpr, ALLOCATION: tl.constexpr):
    """α/(I·D) and (1 − α)/D, 0 where masked; `each` is 1/D."""
    received, declined = inverse_in * each, tl.zeros(each.shape, tl.float32)
    if ALLOCATION:
        received *= sigmoid(conserved_in, FAST)
        declined += tl.where(keep, sigmoid(-conserved_in, FAST) * each, 0.0)
    return received, declined


@triton.jit
def finish(
    positions, state_scalars, logs, end_scalars, batch, length, start, last, log_end, segments,
    COMPETITION: tl.constexpr,
):  # fmt: skip
    """Stores the count and the logarithms after the last token of this head."""
    row = tl.program_id(0).to(tl.int64)
    count = load_count(state_scalars) + (last - start).to(tl.float32)
    if positions is not None:
        count = load_count(state_scalars) + tl.abs(tl.load(positions + batch * length + length - 1)).to(tl.float32)
    tl.store(logs + row * (segments + 1) + segments, log_end)
    log_outgoing, log_incoming = load_log(state_scalars, 1), load_log(state_scalars, 2)
    if COMPETITION == "softmax":
        log_outgoing = log_end
    tl.store(end_scalars + row * 3, count)
    tl.store(end_scalars + row * 3 + 1, tl.where(log_outgoing > NOTHING, log_outgoing, -float("inf")))
    tl.store(end_scalars + row * 3 + 2, tl.where(log_incoming > NOTHING, log_incoming, -float("inf")))


@triton.jit(do_not_specialize=RUNTIME)
def conserve_kernel(
    key, positions, bounds, state_sums, state_scalars, conserved, flows, sums, local_flows, local_sums, totals,
    end_sums,
    k_batch, k_head, k_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, COMPETITION: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Ô, log Σ exp(Ô) of each segment, and Σk/O and Σq/I before each chunk, with what came before the segment."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    k_token = D if DENSE else k_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key += (batch * k_batch + head // shared * k_head) * ALIGN
    flows += (batch * heads + head) * length
    local_flows += (batch * heads + head) * length + plane
    count = load_count(state_scalars)
    # two chunks at a time: there is little to do for a token beside the scan
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, 2 * C)
    conserved_key = load_vector(state_sums, row * 4 + 2, columns, D)
    conserved_query = load_vector(state_sums, row * 4 + 3, columns, D)
    conserved_key += sum_segments(conserved, 0, segment, segments, columns, 0, D)
    conserved_query += sum_segments(conserved, 0, segment, segments, columns, 1, D)
    index, chunks = row * segments + segment, size // C
    if segment == segments - 1:
        own_key = load_vector(conserved, index * 2, columns, D)
        own_query = load_vector(conserved, index * 2 + 1, columns, D)
        store_vector(end_sums, row * 4 + 2, columns, conserved_key + own_key, D)
        store_vector(end_sums, row * 4 + 3, columns, conserved_query + own_query, D)
    once = tl.where(columns < D, eps, 0.0)
    conserved_query += once
    which = tl.arange(0, 4)[None, :]
    before = tl.where(which % 2 == 0, (conserved_key + once)[:, None], conserved_query[:, None])
    log_sum = NOTHING
    for step in tl.range(0, tl.cdiv(last - first, 2 * C).to(tl.int32), num_stages=STAGES):
        base, here = first + step * (2 * C), index * chunks + step * 2
        rows, keep, position = place(positions, batch, length, base, tokens, start, last, count)
        k, _ = load_features(key, base, rows, k_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        at, inside = flows + base + tokens, inside_of(tokens, base, last)
        conserved_out = tl.load(local_flows + base + tokens, mask=inside, other=0.0)
        conserved_out += carried_flow(k, conserved_query, eps, DOT, PRECISION) / position
        tl.store(at + CONSERVED_OUTGOING * plane, conserved_out, mask=inside)
        if COMPETITION == "softmax":
            log, log_sum = running_log_sum(conserved_out, keep, log_sum, clamp, FAST)
            tl.store(at + LOG_OUTGOING * plane, log, mask=inside)
        if KEEP:
            inner = (columns < D)[:, None] & (step * 2 + which // 2 < chunks)
            local = tl.load(local_sums + (here * 2 + which) * D + columns[:, None], mask=inner, other=0.0)
            to = sums + (here * 4 + which // 2 * 4 + 2 + which % 2) * D
            tl.store(to + columns[:, None], before + local, mask=inner)
    tl.store(totals + index, log_sum)


@triton.jit
def carried_flow(phi, conserved, eps, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """(φ + ε)·a for the sum a of what came before the segment."""
    none = tl.zeros(conserved.shape, tl.float32)
    flow = project(phi, halves(conserved, none, none, none, DOT), PRECISION)
    return pick(flow, 0) + eps * tl.sum(conserved, 0)


@triton.jit(do_not_specialize=RUNTIME)
def memory_kernel(
    key, value, positions, bounds, state_scalars, flows, totals, logs, end_scalars, partial,
    k_batch, k_head, k_token, v_batch, v_head, v_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, CENTRE: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Σ kᵀ c V of each segment, and log Σ exp(Ô) before it; from right to left, where `conserve` has been last.

    CENTRE is φ(0) where the backward pass needs what features differ by, see `gradient_kernel`, and 0 otherwise.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key += (batch * k_batch + head // shared * k_head) * ALIGN
    value += (batch * v_batch + head // shared * v_head) * ALIGN
    flows += (batch * heads + head) * length
    log_start = load_log(state_scalars, 1)
    for begin in range(0, segment, 16):
        each = begin + tl.arange(0, 16)
        log = tl.load(totals + row * segments + each, mask=each < segment, other=NOTHING)
        high = tl.max(log, 0)
        log_start = log_add(log_start, high + tl.log(tl.sum(tl.exp(log - high), 0)))
    if tile == 0:
        tl.store(logs + row * (segments + 1) + segment, log_start)
        if segment == segments - 1:
            log_end = log_add(log_start, tl.load(totals + row * segments + segment))
            finish(positions, state_scalars, logs, end_scalars, batch, length, start, last, log_end, segments,
                   COMPETITION)  # fmt: skip
    count, tokens = load_count(state_scalars), tl.arange(0, C)
    memory, common = tl.zeros([BLOCK_D, BLOCK_E], tl.float32), tl.zeros([BLOCK_E], tl.float32)
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        base = first + (chunks - 1 - step) * C
        rows, keep, position = place(positions, batch, length, base, tokens, start, last, count)
        if CENTRE != 0:
            k = load_rows(key, base, rows, k_token, keep, positions, 0, D, BLOCK_D)
            k = centred_feature(k, scale, MAP).to(DOT)
        else:
            k, _ = load_features(key, base, rows, k_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        v = load_rows(value, base, rows, v_token, keep, positions, tile, E, BLOCK_E).to(tl.float32)
        at = flows + base + tokens
        competition = make_competition(at, plane, keep, position, log_start, clamp, FAST, COMPETITION)
        competing = v * competition[:, None]
        memory = tl.dot(tl.trans(k), competing.to(DOT), memory, input_precision=PRECISION)
        if CENTRE != 0:
            common += CENTRE * tl.sum(competing, 0)
    if CENTRE != 0:
        memory += common[None, :]
    store_memory(partial + (row * segments + segment) * (D * E), tile, memory, D, BLOCK_D, E, BLOCK_E)


@triton.jit(do_not_specialize=RUNTIME)
def scan_kernel(partial, begin, before, end, segments, WIDTH: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """begin (B·H, WIDTH) plus the sum of the segments before each (after each, in reverse), and of all."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = load_vector(begin, row, columns, WIDTH)
    for start in range(0, segments, 16):
        each = start + tl.arange(0, 16)
        place = segments - 1 - each if REVERSE else each
        previous = place + 1 if REVERSE else place - 1
        inner = (columns < WIDTH)[None, :]
        at = (row * segments + previous)[:, None] * WIDTH + columns[None, :]
        shifted = tl.load(partial + at, mask=((each > start) & (each < segments))[:, None] & inner, other=0.0)
        at = (row * segments + place)[:, None] * WIDTH + columns[None, :]
        tl.store(before + at, total[None, :] + tl.cumsum(shifted, 0), mask=(each < segments)[:, None] & inner)
        total += tl.sum(tl.load(partial + at, mask=(each < segments)[:, None] & inner, other=0.0), 0)
    store_vector(end, row, columns, total, WIDTH)


@triton.jit(do_not_specialize=RUNTIME)
def output_kernel(
    query, key, value, out, positions, bounds, state_sums, state_scalars, state_memory, conserved, flows,
    local_flows, logs, memories, end_memory,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, r_batch, r_head, r_token,
    plane, heads, shared, length, size, segments, scale, eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, SPLIT: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """R = α/(I·D)·q S; where SPLIT also Î, with what came before the segment."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    r_token = E if DENSE else r_token * ALIGN
    plane = tl.cast(plane, tl.int64)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    query += (batch * q_batch + head * q_head) * ALIGN
    key += (batch * k_batch + head // shared * k_head) * ALIGN
    value += (batch * v_batch + head // shared * v_head) * ALIGN
    out += (batch * r_batch + head * r_head) * ALIGN
    flows += (batch * heads + head) * length
    memories += (row * segments + segment) * (D * E)
    count, tokens = load_count(state_scalars), tl.arange(0, C)
    log_start = tl.load(logs + row * (segments + 1) + segment)
    if SPLIT:
        memory = load_memory(memories, tile, D, BLOCK_D, E, BLOCK_E)
        local_flows += (batch * heads + head) * length
        columns = tl.arange(0, BLOCK_D)
        conserved_key = load_vector(state_sums, row * 4 + 2, columns, D) + tl.where(columns < D, eps, 0.0)
        conserved_key += sum_segments(conserved, 0, segment, segments, columns, 0, D)
    else:
        memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
        if state_memory is not None:
            memory += load_memory(state_memory + row * (D * E), tile, D, BLOCK_D, E, BLOCK_E)
        if KEEP:
            store_memory(memories, tile, memory, D, BLOCK_D, E, BLOCK_E)

    lower = triangle(C, False)
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        base = first + chunk * C
        rows, keep, position = place(positions, batch, length, base, tokens, start, last, count)
        q, _ = load_features(query, base, rows, q_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        k, _ = load_features(key, base, rows, k_token, keep, positions, 0, scale, eps, D, BLOCK_D, MAP, FAST, DOT)
        v = load_rows(value, base, rows, v_token, keep, positions, tile, E, BLOCK_E).to(tl.float32)
        at, inside = flows + base + tokens, inside_of(tokens, base, last)
        if SPLIT:
            inverse_in = tl.load(at + INVERSE_INCOMING * plane, mask=keep, other=0.0)
            conserved_in = tl.load(local_flows + base + tokens, mask=keep, other=0.0)
            each = 1.0 / position
            conserved_in += carried_flow(q, conserved_key, eps, DOT, PRECISION) * each
            received, declined = receive(inverse_in, conserved_in, keep, each, FAST, ALLOCATION)
            if KEEP and tile == 0:
                tl.store(at + DECLINED * plane, declined, mask=inside)
                tl.store(at + RECEIVED * plane, received, mask=inside)
        else:
            received = tl.load(at + RECEIVED * plane, mask=keep, other=0.0)
        competition = make_competition(at, plane, keep, position, log_start, clamp, FAST, COMPETITION)
        if KEEP and tile == 0:
            tl.store(at + COMPETITION_WEIGHT * plane, competition, mask=inside)
        competing = (v * competition[:, None]).to(DOT)
        met = within(across(q, k, PRECISION), lower, FAST, DOT)
        result = project(q, memory.to(DOT), PRECISION)
        result = tl.dot(met, competing, result, input_precision=PRECISION) * received[:, None]
        store_rows(out, base, tokens, r_token, inside, tile, result, E, BLOCK_E)
        memory = tl.dot(tl.trans(k), competing, memory, input_precision=PRECISION)
    if not SPLIT:
        store_memory(end_memory + row * (D * E), tile, memory, D, BLOCK_D, E, BLOCK_E)


@triton.jit
def load_memory(
    memory, tile, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, feature_tile=0
):
    """One tile of a memory (D, E)."""
    features = (feature_tile * BLOCK_D + tl.arange(0, BLOCK_D))[:, None]
    values = (tile * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    return tl.load(memory + features * E + values, mask=(features < D) & (values < E), other=0.0)


@triton.jit
def store_memory(memory, tile, tensor, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    features, values = tl.arange(0, BLOCK_D)[:, None], (tile * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    tl.store(memory + features * E + values, tensor, mask=(features < D) & (values < E))
