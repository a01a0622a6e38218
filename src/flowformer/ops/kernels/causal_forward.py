"""Kernels of the causal forward pass; `memory` and `output` also serve the backward pass.

A program walks over one segment of one head in chunks of C tokens. Inside a chunk all flows come from P = q kᵀ (C × C);
what came before is a sum. Several segments make three dependent levels, each a sum per segment that later segments add
up: Σk and Σq (`sums`), Σk/O and Σq/I (`flows`), log Σ exp(Ô) and S (`conserve`, `memory`).

Shapes: B sequences, H query heads, N tokens, T segments, D features, E values. Per token, (B, H, N): the planes of
`flows`. Per segment, (B·H, T, ...). `positions` (B, N) counts the valid tokens up to each, negative where masked;
`bounds` are the cu_seqlens of packed sequences, which are one row of N tokens.
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
    NOTHING,
    RUNTIME,
    exact_dot,
    load_count,
    load_features,
    load_log,
    load_rows,
    load_vector,
    load_weights,
    locate,
    log_add,
    pairs,
    pick,
    place,
    place_pair,
    running_log_sum,
    store_rows,
    store_vector,
    sum_segments,
)


@triton.jit(do_not_specialize=RUNTIME)
def sums_kernel(
    query, key, positions, bounds, partial,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    heads, shared, length, size, segments, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Σk and Σq of each segment."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    query += batch * q_batch + head * q_head
    key += batch * k_batch + head // shared * k_head
    columns = tl.arange(0, BLOCK_D)
    # added up across threads once, after the loop
    key_sum, query_sum = tl.zeros([C, BLOCK_D], tl.float32), tl.zeros([C, BLOCK_D], tl.float32)
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        rows = first + chunk * C + tl.arange(0, C)
        keep, _ = place(positions, batch, length, rows, start, last, 0.0)
        key_sum += load_features(key, rows, k_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT).to(tl.float32)
        query_sum += load_features(query, rows, q_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT).to(tl.float32)
    index = (tl.program_id(0).to(tl.int64) * segments + tl.program_id(1)) * 2
    store_vector(partial, index, columns, tl.sum(key_sum, 0), D)
    store_vector(partial, index + 1, columns, tl.sum(query_sum, 0), D)


@triton.jit(do_not_specialize=RUNTIME)
def flows_kernel(
    query, key, positions, bounds, state_sums, state_scalars, partial, conserved, relative, flows, plane, starts, logs,
    end_sums, end_scalars,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    heads, shared, length, size, segments, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, COMPETITION: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """I and O of each token; Î, Ô, Σk/O and Σq/I without what segments before add to them, complete if there is one."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query += batch * q_batch + head * q_head
    key += batch * k_batch + head // shared * k_head
    offset = (batch * heads + head) * length
    count = load_count(state_scalars)
    columns, tokens = tl.arange(0, BLOCK_D), tl.arange(0, C)
    lower = tokens[:, None] >= tokens[None, :]

    key_sum = load_vector(state_sums, row * 4, columns, D)
    query_sum = load_vector(state_sums, row * 4 + 1, columns, D)
    index = (row * segments + segment) * 4
    if SPLIT:
        key_sum += sum_segments(partial, 0, segment, segments, columns, 0, D)
        query_sum += sum_segments(partial, 0, segment, segments, columns, 1, D)
        conserved_key, conserved_query = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    else:
        conserved_key = load_vector(state_sums, row * 4 + 2, columns, D)
        conserved_query = load_vector(state_sums, row * 4 + 3, columns, D)
        store_vector(starts, index + 2, columns, conserved_key, D)
        store_vector(starts, index + 3, columns, conserved_query, D)
    store_vector(starts, index, columns, key_sum, D)
    store_vector(starts, index + 1, columns, query_sum, D)

    # Σk and Σk/O as `pairs`, and Σq and Σq/I; the ε of both sides stands once in the sum, once in every token
    once = tl.where(columns < D, eps, 0.0)
    late = 0.0 if SPLIT else 1.0
    key_sums = place_pair(key_sum + once, conserved_key + late * once)
    query_sums = place_pair(query_sum + once, conserved_query + late * once)
    log_sum = NOTHING

    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        rows = first + chunk * C + tokens
        keep, position = place(positions, batch, length, rows, start, last, count)
        q = load_features(query, rows, q_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT)
        k = load_features(key, rows, k_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT)
        query_eps, key_eps = (q.to(tl.float32) + eps).to(DOT), (k.to(tl.float32) + eps).to(DOT)
        # a product for each direction, so that every sum runs along a row, inside a warp
        to_sinks = tl.where(lower, tl.dot(query_eps, tl.trans(k), input_precision=PRECISION), 0.0)
        to_sources = tl.where(lower, tl.dot(key_eps, tl.trans(q), input_precision=PRECISION), 0.0)
        sinks_before = exact_dot(key_sums, tl.trans(query_eps), DOT, PRECISION)
        sources_before = exact_dot(query_sums, tl.trans(key_eps), DOT, PRECISION)
        incoming = tl.sum(to_sinks, 1) + pick(sinks_before, 0) + flow_eps
        outgoing = tl.sum(to_sources, 1) + pick(sources_before, 0) + flow_eps
        inverse_in = tl.where(keep, position / incoming, 0.0)
        inverse_out = tl.where(keep, position / outgoing, 0.0)
        conserved_in = tl.sum(to_sinks * inverse_out[None, :], 1) + pick(sinks_before, 1) + late * flow_eps
        conserved_out = tl.sum(to_sources * inverse_in[None, :], 1) + pick(sources_before, 1) + late * flow_eps
        conserved_in, conserved_out = conserved_in / position, conserved_out / position

        at, inside = offset + rows, rows < last
        tl.store(flows + INVERSE_INCOMING * plane + at, inverse_in, mask=inside)
        tl.store(flows + INVERSE_OUTGOING * plane + at, inverse_out, mask=inside)
        if SPLIT:
            tl.store(relative + at, conserved_in, mask=inside)
            tl.store(relative + plane + at, conserved_out, mask=inside)
        else:
            tl.store(flows + CONSERVED_INCOMING * plane + at, conserved_in, mask=inside)
            tl.store(flows + CONSERVED_OUTGOING * plane + at, conserved_out, mask=inside)
        if COMPETITION and not SPLIT:
            log, log_sum = running_log_sum(conserved_out, keep, log_sum, clamp)
            tl.store(flows + LOG_OUTGOING * plane + at, log, mask=inside)
        one = tl.full([C], 1.0, tl.float32)
        key_sums = tl.dot(pairs(one, inverse_out, DOT), k, key_sums, input_precision=PRECISION)
        query_sums = tl.dot(pairs(one, inverse_in, DOT), q, query_sums, input_precision=PRECISION)

    if segment == segments - 1:
        store_vector(end_sums, row * 4, columns, pick(key_sums, 0) - eps, D)
        store_vector(end_sums, row * 4 + 1, columns, pick(query_sums, 0) - eps, D)
    conserved_key, conserved_query = pick(key_sums, 1), pick(query_sums, 1)
    if SPLIT:
        index = (row * segments + segment) * 2
        store_vector(conserved, index, columns, conserved_key, D)
        store_vector(conserved, index + 1, columns, conserved_query, D)
    else:
        store_vector(end_sums, row * 4 + 2, columns, conserved_key - eps, D)
        store_vector(end_sums, row * 4 + 3, columns, conserved_query - eps, D)
        log_start = load_log(state_scalars, 1)
        tl.store(logs + row * (segments + 1), log_start)
        finish(positions, state_scalars, logs, end_scalars, batch, length, start, last, log_add(log_start, log_sum),
               segments, COMPETITION)  # fmt: skip


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
    if COMPETITION:
        log_outgoing = log_end
    tl.store(end_scalars + row * 3, count)
    tl.store(end_scalars + row * 3 + 1, tl.where(log_outgoing > NOTHING, log_outgoing, -float("inf")))
    tl.store(end_scalars + row * 3 + 2, tl.where(log_incoming > NOTHING, log_incoming, -float("inf")))


@triton.jit(do_not_specialize=RUNTIME)
def conserve_kernel(
    query, key, positions, bounds, state_sums, state_scalars, conserved, relative, flows, plane, starts, totals,
    end_sums,
    q_batch, q_head, q_token, k_batch, k_head, k_token,
    heads, shared, length, size, segments, scale, eps, flow_eps, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr,
    COMPETITION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds to Î and Ô what the segments before give them, and sums exp(Ô) of the segment."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query += batch * q_batch + head * q_head
    key += batch * k_batch + head // shared * k_head
    offset = (batch * heads + head) * length
    count = load_count(state_scalars)
    columns = tl.arange(0, BLOCK_D)
    conserved_key = load_vector(state_sums, row * 4 + 2, columns, D)
    conserved_query = load_vector(state_sums, row * 4 + 3, columns, D)
    conserved_key += sum_segments(conserved, 0, segment, segments, columns, 0, D)
    conserved_query += sum_segments(conserved, 0, segment, segments, columns, 1, D)
    index = row * segments + segment
    store_vector(starts, index * 4 + 2, columns, conserved_key, D)
    store_vector(starts, index * 4 + 3, columns, conserved_query, D)
    if segment == segments - 1:
        own_key = load_vector(conserved, index * 2, columns, D)
        own_query = load_vector(conserved, index * 2 + 1, columns, D)
        store_vector(end_sums, row * 4 + 2, columns, conserved_key + own_key, D)
        store_vector(end_sums, row * 4 + 3, columns, conserved_query + own_query, D)
    conserved_key = tl.where(columns < D, conserved_key + eps, 0.0)
    conserved_query = tl.where(columns < D, conserved_query + eps, 0.0)
    log_sum = NOTHING
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        rows = first + chunk * C + tl.arange(0, C)
        keep, position = place(positions, batch, length, rows, start, last, count)
        q = load_features(query, rows, q_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT).to(tl.float32)
        k = load_features(key, rows, k_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT).to(tl.float32)
        at, inside = offset + rows, rows < last
        conserved_in = (tl.sum((q + eps) * conserved_key[None, :], 1) + flow_eps) / position
        conserved_out = (tl.sum((k + eps) * conserved_query[None, :], 1) + flow_eps) / position
        conserved_in += tl.load(relative + at, mask=inside, other=0.0)
        conserved_out += tl.load(relative + plane + at, mask=inside, other=0.0)
        tl.store(flows + CONSERVED_INCOMING * plane + at, conserved_in, mask=inside)
        tl.store(flows + CONSERVED_OUTGOING * plane + at, conserved_out, mask=inside)
        if COMPETITION:
            log, log_sum = running_log_sum(conserved_out, keep, log_sum, clamp)
            tl.store(flows + LOG_OUTGOING * plane + at, log, mask=inside)
    tl.store(totals + index, log_sum)


@triton.jit(do_not_specialize=RUNTIME)
def memory_kernel(
    giver, given, other, positions, bounds, state_scalars, flows, plane, totals, logs, end_scalars, partial, overlap,
    a_batch, a_head, a_token, u_batch, u_head, u_token, o_batch, o_head, o_token,
    heads, shared, length, size, segments, scale, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ kᵀ c V of each segment. Backward, Σ (α/(I·D)·q)ᵀ dR, and ⟨dR, R⟩ of each token into `overlap`."""
    batch, head, start, first, last = locate(bounds, heads, length, size)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if BACKWARD:
        giver += batch * a_batch + head * a_head
        given += batch * u_batch + head * u_head
        other += batch * o_batch + head * o_head
        overlap += tile.to(tl.int64) * plane
        log_start = 0.0
    else:
        giver += batch * a_batch + head // shared * a_head
        given += batch * u_batch + head // shared * u_head
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
    offset = (batch * heads + head) * length
    count = load_count(state_scalars)
    memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    for chunk in tl.range(0, tl.cdiv(last - first, C).to(tl.int32), num_stages=STAGES):
        rows = first + chunk * C + tl.arange(0, C)
        keep, position = place(positions, batch, length, rows, start, last, count)
        x = load_features(giver, rows, a_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT)
        u = load_rows(given, rows, u_token, keep, tile, E, BLOCK_E).to(tl.float32)
        if BACKWARD:
            weight, _ = load_weights(flows, plane, offset + rows, keep, position, log_start, clamp, False, ALLOCATION)
            result = load_rows(other, rows, o_token, keep, tile, E, BLOCK_E)
            product = tl.sum(u * result.to(tl.float32), 1)
            tl.store(overlap + offset + rows, product, mask=rows < last)
        else:
            _, weight = load_weights(flows, plane, offset + rows, keep, position, log_start, clamp, COMPETITION, False)
        memory = tl.dot(tl.trans(x), (u * weight[:, None]).to(DOT), memory, input_precision=PRECISION)
    at = tl.arange(0, BLOCK_D)[:, None] * E + (tile * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    mask = (tl.arange(0, BLOCK_D) < D)[:, None] & (tile * BLOCK_E + tl.arange(0, BLOCK_E) < E)[None, :]
    tl.store(partial + (row * segments + segment) * (D * E) + at, memory, mask=mask)


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
    taker, giver, given, out, other, positions, bounds, state_scalars, state_memory, flows, plane, logs, memories,
    end_memory, overlap,
    a_batch, a_head, a_token, b_batch, b_head, b_token, u_batch, u_head, u_token, r_batch, r_head, r_token,
    o_batch, o_head, o_token,
    heads, shared, length, size, segments, scale, clamp,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, SPLIT: tl.constexpr, BACKWARD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """R = α/(I·D)·q S, from left to right.

    Backward, from right to left: dV = c·k dS, the same with q and k, c and α/(I·D), V and dR exchanged; and ⟨V, dV⟩ of
    each token into `overlap`.
    """
    batch, head, start, first, last = locate(bounds, heads, length, size)
    row, segment, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    taker_head, giver_head = head, head // shared
    if BACKWARD:
        taker_head, giver_head = giver_head, taker_head
        other += batch * o_batch + head // shared * o_head
        overlap += tile.to(tl.int64) * plane
    taker += batch * a_batch + taker_head * a_head
    giver += batch * b_batch + giver_head * b_head
    given += batch * u_batch + giver_head * u_head
    out += batch * r_batch + head * r_head
    offset = (batch * heads + head) * length
    count = load_count(state_scalars)
    log_start = tl.load(logs + row * (segments + 1) + segment)

    features, values = tl.arange(0, BLOCK_D), tile * BLOCK_E + tl.arange(0, BLOCK_E)
    at = features[:, None] * E + values[None, :]
    mask = (features < D)[:, None] & (values < E)[None, :]
    memories += (row * segments + segment) * (D * E)
    if SPLIT:
        memory = tl.load(memories + at, mask=mask, other=0.0)
    else:
        memory = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
        if state_memory is not None:
            memory += tl.load(state_memory + row * (D * E) + at, mask=mask, other=0.0)
        tl.store(memories + at, memory, mask=mask)

    tokens = tl.arange(0, C)
    seen = tokens[:, None] <= tokens[None, :] if BACKWARD else tokens[:, None] >= tokens[None, :]
    chunks = tl.cdiv(last - first, C).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if BACKWARD else step
        rows = first + chunk * C + tokens
        keep, position = place(positions, batch, length, rows, start, last, count)
        a = load_features(taker, rows, a_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT)
        b = load_features(giver, rows, b_token, keep, 0, scale, D, BLOCK_D, MAP, FAST, DOT)
        u = load_rows(given, rows, u_token, keep, tile, E, BLOCK_E).to(tl.float32)
        take, give = load_weights(
            flows, plane, offset + rows, keep, position, log_start, clamp, COMPETITION, ALLOCATION
        )
        if BACKWARD:
            take, give = give, take
        given_tile = (u * give[:, None]).to(DOT)
        products = tl.where(seen, tl.dot(a, tl.trans(b), input_precision=PRECISION), 0.0).to(DOT)
        result = tl.dot(a, memory.to(DOT), input_precision=PRECISION)
        result = tl.dot(products, given_tile, result, input_precision=PRECISION) * take[:, None]
        store_rows(out, rows, r_token, rows < last, tile, result, E, BLOCK_E)
        if BACKWARD:
            value = load_rows(other, rows, o_token, keep, tile, E, BLOCK_E).to(tl.float32)
            tl.store(overlap + offset + rows, tl.sum(value * result, 1), mask=rows < last)
        memory = tl.dot(tl.trans(b), given_tile, memory, input_precision=PRECISION)
    if not SPLIT:
        tl.store(end_memory + row * (D * E) + at, memory, mask=mask)
