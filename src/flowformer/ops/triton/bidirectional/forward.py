"""The forward kernels of bidirectional Flow-Attention, in the order of their launches.

Each program loops over the tokens of one segment of one head, BLOCK at a time, and writes its sums to its own
record (`records.py`); the next kernel adds the records of a head in a fixed order, so results are deterministic.
If heads have one segment (WHOLE), its record is the record of the head, and `finish_kernel` is not launched.

Shapes: query (B, H, N, D), key (B, H_kv, M, D), value (B, H_kv, M, E); per token (B·H, N) or (B·H, M), float32. Packed
sequences are one row of a batch, (1, H, T, D), with bounds (B + 1,). Math: docs/kernels.md.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import kernel
from ..numerics import LOG_ZERO, sigmoid
from ..powers import competing_flow, load_gamma, load_tau, raised_allocation
from ..precision import dot_split, dot_tn
from .records import (
    CONSERVED_KEY_SUM,
    CONSERVED_QUERY_SUM,
    FACTOR,
    INVERSE_MASS,
    KEY_SUM,
    MASS,
    QUERY_SUM,
    RATIO,
    REFERENCE,
    SINKS,
    SOURCES,
    load_vector,
    record_at,
    scalar_at,
    sum_segments,
    sum_vector,
    vector_at,
)
from .tokens import (
    add_eps,
    identity,
    load_features,
    load_memory,
    load_rows,
    load_valid,
    locate_head,
    locate_tokens,
    store_rows,
    token_at,
)


@triton.jit
def _sum_features(
    p_x, stride, p_mask, mask_start, count, p_record, scale,
    VECTOR: tl.constexpr, SCALAR: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Stores Σφ of a segment and the number of its valid tokens in its record."""
    columns, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    b_eye = identity(p_x, columns, EYE)
    b_sum = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    tokens = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_mask, mask_start, start, offset, count)
        b_phi = load_features(p_x, stride, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        weight = valid.to(tl.float32)
        b_sum += b_phi * weight[:, None]
        tokens += weight
    tl.store(vector_at(p_record, VECTOR, D, E) + columns, tl.sum(b_sum, 0), mask=columns < D)
    tl.store(scalar_at(p_record, SCALAR, D, E), tl.sum(tokens, 0))


@kernel
def sums_kernel(
    p_query, p_key, p_query_mask, p_key_mask, p_query_bounds, p_key_bounds, p_partial,
    q_batch, q_head, q_token, k_batch, k_head, k_token, sinks, sources, heads, segments, scale,
    SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr,
    DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 1: Σq and Σk, and the numbers of valid tokens.

    Grid:   (records · segments, 2). Programs (·, 0) sum queries, programs (·, 1) keys.
    Reads:  Q, K.
    Writes: Σk, Σq, m, n of each segment's record in `partial`.
    """
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    segment, sequence, head, record, _ = locate_head(segments, heads, p_query_bounds is not None, False)
    p_own = record_at(p_partial, record * segments + segment, D, E)
    if tl.program_id(1) == 0:
        first, count = locate_tokens(p_query_bounds, sequence, sinks, segment, segments, BLOCK)
        p_query = token_at(p_query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_token, p_query_bounds)
        _sum_features(
            p_query, q_token, p_query_mask, sequence * sinks + first, count, p_own, scale,
            QUERY_SUM, SINKS, D, E, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip
    else:
        first, count = locate_tokens(p_key_bounds, sequence, sources, segment, segments, BLOCK)
        p_key = token_at(p_key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_token, p_key_bounds)
        _sum_features(
            p_key, k_token, p_key_mask, sequence * sources + first, count, p_own, scale,
            KEY_SUM, SOURCES, D, E, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip


@triton.jit
def _sum_conserved(
    p_x, stride, p_mask, mask_start, count, p_records, segment, segments, p_flow, scale, eps, flow_eps,
    READ: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The flow of each token with the sum READ; stores Σφ/flow of a segment in the vector WRITE of its record."""
    columns, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    b_eye = identity(p_x, columns, EYE)
    total = add_eps(sum_vector(p_records, READ, segments, columns, D, E), columns, eps, D)
    constant = eps * tl.sum(total, 0) + flow_eps
    b_sum = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_mask, mask_start, start, offset, count)
        b_phi = load_features(p_x, stride, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        flow = tl.sum(b_phi * total[None, :], 1) + constant
        if KEEP:
            tl.store(p_flow + start + offset, flow, mask=offset < count - start)
        b_sum += b_phi * tl.where(valid, 1.0 / flow, 0.0)[:, None]
    p_vector = vector_at(record_at(p_records, segment, D, E), WRITE, D, E) + columns
    tl.store(p_vector, tl.sum(b_sum, 0), mask=columns < D)


@kernel
def flows_kernel(
    p_query, p_key, p_query_mask, p_key_mask, p_query_bounds, p_key_bounds, p_partial, p_incoming, p_outgoing,
    q_batch, q_head, q_token, k_batch, k_head, k_token, sinks, sources, heads, segments, scale, eps, flow_eps,
    SHARED: tl.constexpr, KEEP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 2: the flows I and O, and the sums Σq/I and Σk/O.

    Grid:   (records · segments, 2), heads in reverse. Programs (·, 0) work on queries, programs (·, 1) on keys.
    Reads:  Q, K; Σk and Σq of all segments of the head in `partial`.
    Writes: I (B·H, N); O (B·H, M) if a backward pass is to KEEP it; Σk/O and Σq/I of each segment's record.
    """
    q_token = D if DENSE else q_token * ALIGN
    k_token = D if DENSE else k_token * ALIGN
    segment, sequence, head, record, row = locate_head(segments, heads, p_query_bounds is not None, True)
    p_records = record_at(p_partial, record * segments, D, E)
    if tl.program_id(1) == 0:
        first, count = locate_tokens(p_query_bounds, sequence, sinks, segment, segments, BLOCK)
        p_query = token_at(p_query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_token, p_query_bounds)
        _sum_conserved(
            p_query, q_token, p_query_mask, sequence * sinks + first, count, p_records, segment, segments,
            p_incoming + row * sinks + first, scale, eps, flow_eps,
            KEY_SUM, CONSERVED_QUERY_SUM, True, D, E, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip
    else:
        first, count = locate_tokens(p_key_bounds, sequence, sources, segment, segments, BLOCK)
        p_key = token_at(p_key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_token, p_key_bounds)
        _sum_conserved(
            p_key, k_token, p_key_mask, sequence * sources + first, count, p_records, segment, segments,
            p_outgoing + row * sources + first, scale, eps, flow_eps,
            QUERY_SUM, CONSERVED_KEY_SUM, KEEP, D, E, BLOCK_D, MAP, FAST, EYE, BLOCK, STAGES,
        )  # fmt: skip


@kernel
def memory_kernel(
    p_key, p_value, p_key_mask, p_key_bounds, p_powers, p_partial, p_conserved_outgoing, p_competing,
    k_batch, k_head, k_token, v_batch, v_head, v_token, sources, heads, segments, scale, eps, flow_eps, clamp,
    SHARED: tl.constexpr, KEEP: tl.constexpr, COMPETITION: tl.constexpr, WHOLE: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, ALIGN: tl.constexpr,
    DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr, EYE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 3: Ô, and S weighted by exp(τ Ô − reference), the mass of each source.

    Grid:   (records · segments, tiles of E).
    Reads:  K, V; Σq/I of all segments of the head in `partial`.
    Writes: Ô (B·H, M) if a backward pass is to KEEP it; S, reference and mass of each segment's record, or for a WHOLE
            head its finished record; if the result is renormalised, Σ c k weighted as S is (`competing`, one vector for
            each segment).
    """
    k_token = D if DENSE else k_token * ALIGN
    v_token = E if DENSE else v_token * ALIGN
    segment, sequence, head, record, row = locate_head(segments, heads, p_key_bounds is not None, False)
    p_records = record_at(p_partial, record * segments, D, E)
    p_own = record_at(p_records, segment, D, E)
    first, count = locate_tokens(p_key_bounds, sequence, sources, segment, segments, BLOCK)
    p_key = token_at(p_key, sequence, head // SHARED, first, k_batch * ALIGN, k_head * ALIGN, k_token, p_key_bounds)
    p_value = token_at(p_value, sequence, head // SHARED, first, v_batch * ALIGN, v_head * ALIGN, v_token, p_key_bounds)
    mask_start = sequence * sources + first
    p_conserved_outgoing += row * sources + first

    columns, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    values = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    b_eye = identity(p_key, columns, EYE)
    conserved_query_sum = sum_vector(p_records, CONSERVED_QUERY_SUM, segments, columns, D, E)
    conserved_query_sum = add_eps(conserved_query_sum, columns, eps, D)
    constant = eps * tl.sum(conserved_query_sum, 0) + flow_eps
    tau = None
    if p_powers is not None:
        tau = load_tau(p_powers, head)

    # Ô is not negative, and at most Σ_i q_i/I_i if φ ≤ 1: exp needs a reference only if this bound is large
    reference = tl.zeros((), tl.float32)
    if COMPETITION == "softmax":
        bound = clamp
        if MAP == "sigmoid":
            bound = tl.minimum(clamp, tl.sum(conserved_query_sum, 0) + constant)
        if tau is not None:
            bound *= tl.abs(tau)
        if bound > 40:
            if tau is not None:
                # τ Ô may be negative for all sources
                reference += LOG_ZERO
            for start in tl.range(0, count, BLOCK):
                valid = load_valid(p_key_mask, mask_start, start, offset, count)
                b_key = load_features(p_key, k_token, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
                flow = competing_flow(tl.sum(b_key * conserved_query_sum[None, :], 1) + constant, clamp, tau)
                reference = tl.maximum(reference, tl.max(tl.where(valid, flow, 0.0 if tau is None else LOG_ZERO), 0))

    b_memory = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    b_competing = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_key_mask, mask_start, start, offset, count)
        b_key = load_features(p_key, k_token, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        b_value = load_rows(p_value, v_token, start, offset, valid, values, E)
        flow = tl.sum(b_key * conserved_query_sum[None, :], 1) + constant
        if KEEP and tl.program_id(1) == 0:
            tl.store(p_conserved_outgoing + start + offset, flow, mask=offset < count - start)
        flow = competing_flow(flow, clamp, tau)
        if COMPETITION == "softmax":
            weight = tl.exp(flow - reference)
        elif COMPETITION == "sigmoid":
            weight = sigmoid(flow, False)
        else:
            weight = tl.full((BLOCK,), 1.0, tl.float32)
        weight = tl.where(valid, weight, 0.0)
        mass += weight
        b_weighted = b_key * weight[:, None]
        if p_competing is not None:
            b_competing += b_weighted
        b_memory = dot_tn(b_weighted, b_value, b_memory, PRECISION)
    p_memory = p_own + (columns[:, None] * E + values[None, :])
    inside = (columns < D)[:, None] & (values < E)[None, :]
    if WHOLE:
        m, n = tl.load(scalar_at(p_own, SOURCES, D, E)), tl.load(scalar_at(p_own, SINKS, D, E))
        inverse = _inverse_mass(tl.sum(mass, 0), m, COMPETITION)
        tl.store(p_memory, b_memory * inverse, mask=inside)
        if p_competing is not None and tl.program_id(1) == 0:
            tl.store(p_competing + record * D + columns, tl.sum(b_competing, 0) * inverse, mask=columns < D)
        # the scalars just loaded are overwritten next: all threads must have loaded them
        tl.debug_barrier()
        if tl.program_id(1) == 0:
            _store_finished(p_own, m, n, reference, inverse, COMPETITION, RESCALE, D, E)
    else:
        tl.store(p_memory, b_memory, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(scalar_at(p_own, REFERENCE, D, E), reference)
            tl.store(scalar_at(p_own, MASS, D, E), tl.sum(mass, 0))
            if p_competing is not None:
                p_to = p_competing + (record * segments + segment) * D + columns
                tl.store(p_to, tl.sum(b_competing, 0), mask=columns < D)


@triton.jit
def _inverse_mass(mass, m, COMPETITION: tl.constexpr):
    """1/Z, from the total mass of a head's sources."""
    if COMPETITION != "softmax":
        mass = m
    return tl.where(mass > 0, 1.0 / mass, 0.0)


@triton.jit
def _store_finished(
    p_record, m, n, reference, inverse, COMPETITION: tl.constexpr, RESCALE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """The scalars of a finished head."""
    tl.store(scalar_at(p_record, FACTOR, D, E), m if RESCALE or COMPETITION != "softmax" else 1.0)
    tl.store(scalar_at(p_record, RATIO, D, E), n / tl.maximum(m, 1.0) if RESCALE else 1.0)
    tl.store(scalar_at(p_record, REFERENCE, D, E), reference)
    tl.store(scalar_at(p_record, INVERSE_MASS, D, E), inverse)


@kernel
def finish_kernel(
    p_partial, p_records, p_competing_parts, p_competing, segments,
    COMPETITION: tl.constexpr, RESCALE: tl.constexpr, SIGNED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CHUNK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """The record of each head from the records of its segments. Launched only if heads have several segments.

    Grid:   (records, chunks of S).
    Reads:  `partial`, the records of all segments of the head; if the result is renormalised, Σ c k of the segments.
    Writes: `records`, one finished record per head, and Σ c k, divided by μ like S.

    SIGNED: references may be negative, as with τ Ô.
    """
    p_partial = record_at(p_partial, tl.program_id(0).to(tl.int64) * segments, D, E)
    p_records = record_at(p_records, tl.program_id(0).to(tl.int64), D, E)
    LEAST: tl.constexpr = LOG_ZERO if SIGNED else 0.0
    m, n, mass, reference = 0.0, 0.0, 0.0, LEAST
    for start in range(0, segments, 16):
        segment = start + tl.arange(0, 16)
        keep = segment < segments
        p_each = record_at(p_partial, segment, D, E)
        m += tl.sum(tl.load(scalar_at(p_each, SOURCES, D, E), mask=keep, other=0.0), 0)
        n += tl.sum(tl.load(scalar_at(p_each, SINKS, D, E), mask=keep, other=0.0), 0)
        each = tl.load(scalar_at(p_each, REFERENCE, D, E), mask=keep, other=LEAST)
        reference = tl.maximum(reference, tl.max(each, 0))

    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    memory = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, segments, 4):
        segment = start + tl.arange(0, 4)
        keep = segment < segments
        p_each = record_at(p_partial, segment, D, E)
        weight = tl.exp(tl.load(scalar_at(p_each, REFERENCE, D, E), mask=keep, other=LEAST) - reference)
        mass += tl.sum(weight * tl.load(scalar_at(p_each, MASS, D, E), mask=keep, other=0.0), 0)
        keep = keep[:, None] & (index < D * E)[None, :]
        b_part = tl.load(record_at(p_partial, segment[:, None], D, E) + index[None, :], mask=keep, other=0.0)
        memory += tl.sum(b_part * weight[:, None], 0)
    inverse = _inverse_mass(mass, m, COMPETITION)
    tl.store(p_records + index, memory * inverse, mask=index < D * E)
    if tl.program_id(1) == 0:
        columns = tl.arange(0, VECTORS)
        if p_competing is not None:
            competing = tl.zeros((VECTORS,), tl.float32)
            for segment in range(0, segments):
                weight = tl.exp(tl.load(scalar_at(record_at(p_partial, segment, D, E), REFERENCE, D, E)) - reference)
                p_each = p_competing_parts + (tl.program_id(0).to(tl.int64) * segments + segment) * D
                competing += weight * tl.load(p_each + columns, mask=columns < D, other=0.0)
            p_to = p_competing + tl.program_id(0).to(tl.int64) * D + columns
            tl.store(p_to, competing * inverse, mask=columns < D)
        # all four vectors at once
        vectors = sum_segments(vector_at(p_partial, KEY_SUM, D, E), segments, columns, 4 * D, 4, D, E)
        tl.store(vector_at(p_records, KEY_SUM, D, E) + columns, vectors, mask=columns < 4 * D)
        _store_finished(p_records, m, n, reference, inverse, COMPETITION, RESCALE, D, E)


@kernel
def result_kernel(
    p_query, p_out, p_query_mask, p_query_bounds, p_powers, p_records, p_incoming, p_allocation, p_competing,
    p_competing_flow,
    q_batch, q_head, q_token, r_batch, r_head, r_token, sinks, heads, segments, scale, eps, flow_eps,
    KEEP: tl.constexpr, ALLOCATION: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ALIGN: tl.constexpr, DENSE: tl.constexpr, MAP: tl.constexpr, FAST: tl.constexpr,
    EYE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pass 4: Î, α and R = α μ/I · q S; if the result is renormalised, W = ⟨q, Σ c k⟩ takes the place of I.

    Grid:   (records · segments,), heads in reverse. A program loops over tiles of E.
    Reads:  Q; I; the finished record of the head, or its Σ c k (`competing`).
    Writes: R (B, H, N, E); if a backward pass is to KEEP them, W and α (B·H, N), with powers σ(r Î) instead of α.
    """
    q_token = D if DENSE else q_token * ALIGN
    r_token = E if DENSE else r_token * ALIGN
    segment, sequence, head, record, row = locate_head(segments, heads, p_query_bounds is not None, True)
    p_records = record_at(p_records, record, D, E)
    first, count = locate_tokens(p_query_bounds, sequence, sinks, segment, segments, BLOCK)
    p_query = token_at(p_query, sequence, head, first, q_batch * ALIGN, q_head * ALIGN, q_token, p_query_bounds)
    p_out = token_at(p_out, sequence, head, first, r_batch * ALIGN, r_head * ALIGN, r_token, p_query_bounds)
    mask_start = sequence * sinks + first
    p_incoming += row * sinks + first
    p_allocation += row * sinks + first

    columns, values, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    b_eye = identity(p_query, columns, EYE)
    b_high, b_low = load_memory(p_records, columns[:, None], values[None, :], D, E, PRECISION)
    conserved_key_sum = add_eps(load_vector(p_records, CONSERVED_KEY_SUM, columns, D, E), columns, eps, D)
    constant = eps * tl.sum(conserved_key_sum, 0) + flow_eps
    factor, ratio = tl.load(scalar_at(p_records, FACTOR, D, E)), tl.load(scalar_at(p_records, RATIO, D, E))
    gamma = None
    if p_powers is not None:
        gamma = load_gamma(p_powers, head, heads)
    if p_competing is not None:
        p_competing_flow += row * sinks + first
        competing_sum = tl.load(p_competing + record * D + columns, mask=columns < D, other=0.0) * factor
        competing_sum = add_eps(competing_sum, columns, eps, D)
        competing_constant = eps * tl.sum(competing_sum, 0) + flow_eps
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        valid = load_valid(p_query_mask, mask_start, start, offset, count)
        inside = offset < count - start
        b_query = load_features(p_query, q_token, start, offset, valid, columns, b_eye, scale, D, MAP, FAST, EYE)
        if ALLOCATION == "sigmoid":
            allocation = sigmoid((tl.sum(b_query * conserved_key_sum[None, :], 1) + constant) * ratio, False)
        else:
            allocation = tl.full((BLOCK,), 1.0, tl.float32)
        allocation = tl.where(valid, allocation, 0.0)
        if KEEP:
            tl.store(p_allocation + start + offset, allocation, mask=inside)
        if gamma is not None:
            allocation = tl.where(valid, raised_allocation(tl.where(valid, allocation, 1.0), gamma), 0.0)
        if p_competing is not None:
            incoming = tl.sum(b_query * competing_sum[None, :], 1) + competing_constant
            if KEEP:
                tl.store(p_competing_flow + start + offset, incoming, mask=inside)
        else:
            incoming = tl.load(p_incoming + start + offset, mask=inside, other=1.0)
        received = allocation * factor / incoming
        for tile in tl.range(0, E, BLOCK_E, num_stages=1):
            if E > BLOCK_E:
                b_high, b_low = load_memory(p_records, columns[:, None], tile + values[None, :], D, E, PRECISION)
            b_result = dot_split(b_query, b_high, b_low, tl.zeros((BLOCK, BLOCK_E), tl.float32), PRECISION)
            b_result *= received[:, None]
            store_rows(p_out, r_token, start, offset, inside, tile + values, b_result, E, PRECISION)
